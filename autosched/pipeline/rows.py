"""The table of a report: one row for each strategy and baseline, whether it ran or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autosched.core.errors import UsageError
from autosched.core.records import Failure, FailureKind
from autosched.core.report import StrategyRow
from autosched.pipeline.judge import External, Times
from autosched.pipeline.proving import Entry
from autosched.search.strategy import STRATEGIES


def strategy_rows(
    entries: Sequence[Entry],
    peaks_bytes: Sequence[int | None],
    externals: Sequence[External],
    failures: Mapping[str, Failure],
    times: Times,
) -> list[StrategyRow]:
    """Rows of proved schedules (one for each name; ``peaks_bytes`` as ``entries``), baselines and failures, by name.

    A row without a time holds its ``Failure``.
    """
    baselines = [entry.name for entry in entries if any(candidate.is_baseline for candidate in entry.candidates)]
    sequential_us = _least_us(times, [entry.name for entry in entries if entry.is_static])
    best_us = _least_us(times, [*baselines, *(item.name for item in externals)])
    rows = [
        _row(
            candidate.name,
            times,
            entry.name,
            (sequential_us, best_us),
            is_baseline=candidate.is_baseline,
            predicted_us=candidate.predicted_us,
            error=entry.proof.max_abs_error,
            peak=peak,
        )
        for entry, peak in zip(entries, peaks_bytes, strict=True)
        for candidate in entry.candidates
    ]
    rows += [
        _row(
            item.name,
            times,
            item.name,
            (sequential_us, best_us),
            is_baseline=True,
            error=item.max_abs_error,
            peak=item.peak_memory_bytes,
        )
        for item in externals
    ]
    named = {row.name for row in rows}
    return rows + [
        StrategyRow(name, _is_baseline(name), None, None, None, None, None, None, None, why)
        for name, why in failures.items()
        if name not in named
    ]


def _is_baseline(name: str) -> bool:
    """The same of a strategy that failed, ``opara``, or of one of its proposals, ``opara_2``."""
    strategy = name if name in STRATEGIES.names() else name.rpartition("_")[0]
    try:
        return STRATEGIES.get(strategy).is_baseline
    except UsageError:  # the device loop; or a package that cannot be imported
        return False


def best_baseline(rows: Sequence[StrategyRow]) -> str:
    """The fastest of the baselines that have a time: the program in order, a published scheduler's schedule, or what is no schedule."""
    return min(((row.measured_us, place, row.name) for place, row in enumerate(rows) if row.is_baseline and row.measured_us is not None))[2]


def _least_us(times: Times, names: Sequence[str]) -> float:
    return min(sample.median_us for name in names if (sample := times.samples(name)) is not None)


def _row(
    name: str,
    times: Times,
    measured_as: str,
    references_us: tuple[float, float],
    *,
    is_baseline: bool,
    predicted_us: float | None = None,
    error: float | None = None,
    peak: int | None = None,
) -> StrategyRow:
    samples = times.samples(measured_as)
    if samples is None:
        why = times.failures.get(measured_as, Failure(FailureKind.UNSTABLE, "not measured within the budget"))
        return StrategyRow(name, is_baseline, predicted_us, None, None, None, None, peak, error, why)
    interval = (samples.ci_low_us, samples.ci_high_us)
    sequential_us, best_us = references_us
    speedups = (sequential_us / samples.median_us, best_us / samples.median_us)
    return StrategyRow(name, is_baseline, predicted_us, samples.median_us, interval, *speedups, peak, error, None)
