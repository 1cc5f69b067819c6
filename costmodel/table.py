"""The table the search reads: measured where it was measured, predicted elsewhere, and corrected by what the measurements say."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autosched.core.costs import UNATTRACTIVE, CostTable
from autosched.core.errors import NoFeasibleCandidate, UsageError
from autosched.core.graph import OpGraph
from autosched.core.records import MAX_SLOWDOWN, Contamination, Failure, PairRecord, SoloRecord
from autosched.costmodel.analytic import AnalyticModel
from autosched.costmodel.composition import room_of
from autosched.costmodel.meeting import pairs_that_meet
from autosched.costmodel.model import Floats, PairModel, PairQuery
from autosched.datasets.facts import DISTURBED, DeviceFacts, KernelFacts, LaunchFacts, kernel_facts, stolen_share, with_observed_peaks

logger = logging.getLogger(__name__)

OTHER = "+other"
"""Behind an operator's signature in the names of pairs and launches: its other variant's (``CostTable.other_kernel``)."""

PRIOR_SPREAD = 0.25
"""Standard deviation of log slowdown around a prediction; as large as the spread of our CPU pair runs."""

SAMPLE_NOISE = 0.12
"""Standard deviation of log slowdown of one repeat; medians of several differ by up to 10 % nine times in ten on our CPU."""

FLOOR_NOISE = 0.02
"""What remains however often a pair is repeated: drift between runs."""

POLLING_US = 280.0
"""How long a CPU lane of Python that waits polls, taking its lock from the others, before it sleeps.

*Source:* ``runtime.lane_pool``: 400 turns of about 0.7 us."""

TEAM_SPIN_US = 8000.0
"""How long the helper threads of a wide CPU operator spin after it. *Source:* libgomp's default of 300,000 turns, some milliseconds."""

_BLOCK = 1 << 18
"""Pairs that a model is asked at a time: it takes hundreds of bytes for each, and a graph of thousands of operators has millions."""

CLASS_PSEUDO_COUNT = 4.0
"""A class of pairs needs this many measurements before its mean error is believed by half."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """The kernels of a graph and where each operator finds its own: ``index`` is int32 ``[n_operators, n_widths]``, and ``other`` int32
    ``[n_operators]``, ``None`` where no operator has another variant. ``names`` are those that the kernels were measured under, which
    tell variants apart; ``facts`` have those of the pairs. Of them, the first ``beside`` may run beside others."""

    facts: tuple[KernelFacts, ...]
    names: tuple[str, ...]
    index: NDArray[np.int32]
    other: NDArray[np.int32] | None
    beside: int


def make_cost_table(
    graph: OpGraph,
    solo: Sequence[Sequence[SoloRecord | Failure]],
    pairs: Sequence[PairRecord],
    *,
    widths: Sequence[int],
    launch_gap_us: float,
    cross_lane_us: float,
    fixed_us: float,
    max_lanes: int,
    device: DeviceFacts,
    model: PairModel | None = None,
    launches: Mapping[str, LaunchFacts] | None = None,
    one_team: bool = False,
    others: Sequence[SoloRecord | None] = (),
) -> CostTable:
    """Combine measurements and a model into the costs of a graph.

    Args:
        graph: the operators.
        solo: ``[n_operators][len(widths)]``, in the order of ``widths``.
        pairs: any measured pairs; those of kernels that the graph does not have, or never lets run together, are passed over.
        widths: ascending, first 1.
        launch_gap_us, cross_lane_us, fixed_us, max_lanes, one_team: as in ``CostTable``.
        device: facts; unknown peaks are taken from the solo records.
        model: predicts what is not measured; ``None`` is the analytic prior.
        launches: CUDA launch facts by signature.
        others: ``[n_operators]`` or empty: another variant of each operator at width 1, or ``None``. In ``pairs`` and ``launches`` its
            name is the signature with :data:`OTHER` behind it. Which variant that is, the caller adds to the table.

    Returns:
        Slowdowns between 1 and ``MAX_SLOWDOWN``. Pairs of kernels that the graph never lets run together stand at 1.

    Raises:
        UsageError: ``solo`` of another shape than the graph and the widths.
        NoFeasibleCandidate: an operator that could not be timed at width 1, naming it and why.
    """
    if len(solo) != len(graph) or any(len(row) != len(widths) for row in solo):
        raise UsageError(f"solo has {len(solo)} rows; expected {len(graph)} operators with {len(widths)} widths each")
    if not widths or widths[0] != 1 or list(widths) != sorted(set(widths)):
        raise UsageError(f"widths are {tuple(widths)}; expected ascending numbers that start with 1")
    rows = _with_others(graph, others, launches or {}, _kernel_rows(graph, solo, widths, launches or {}))
    if one_team:
        rows = _narrow_first(rows)
    device = with_observed_peaks(device, rows.facts)
    table_first, table_last, needed = _predicted(graph, rows, device, model or AnalyticModel(), one_team)
    measured = _correct(rows, _undisturbed(pairs, device), table_first, table_last, needed)
    return CostTable(
        widths=tuple(widths),
        kernel=rows.index,
        solo_us=np.asarray([kernel.solo_us for kernel in rows.facts], dtype=np.float64),
        slowdown_first=table_first,
        slowdown_last=table_last,
        launch_gap_us=launch_gap_us,
        cross_lane_us=cross_lane_us,
        fixed_us=fixed_us,
        max_lanes=max_lanes,
        measured_pairs=measured,
        room=room_of(rows.facts, (device,), np.zeros(len(rows.facts), dtype=np.int64)),
        polling_us=POLLING_US if device.kind == "cpu" and not one_team else 0.0,
        team_spin_us=TEAM_SPIN_US if device.kind == "cpu" and not one_team else 0.0,
        one_team=one_team,
        other_kernel=rows.other,
        other_variant=None if rows.other is None else np.zeros_like(rows.other),
    )


def _kernel_rows(
    graph: OpGraph, solo: Sequence[Sequence[SoloRecord | Failure]], widths: Sequence[int], launches: Mapping[str, LaunchFacts]
) -> _Rows:
    """One row for each signature and width; equal kernels share the median of their times."""
    times: dict[tuple[str, int], list[float]] = {}
    measured: dict[tuple[str, int], str] = {}
    for operator in graph.operators:
        for width, record in zip(widths, solo[operator.index], strict=True):
            if isinstance(record, SoloRecord) and math.isfinite(record.samples.median_us) and record.samples.median_us >= 0:
                times.setdefault((operator.signature, width), []).append(record.samples.median_us)
                measured.setdefault((operator.signature, width), record.signature)
    for operator in graph.operators:
        record = solo[operator.index][0]
        if (operator.signature, 1) not in times:
            why = f"{record.kind}: {record.detail}" if isinstance(record, Failure) else f"its time is {record.samples.median_us} us"
            # What ends the runs of all of them, now and then, is not the first one's fault.
            alone = len(graph) == 1 or any(row[0] != record for row in solo)
            named = f"operator {operator.index} ({operator.name}, {operator.kind}) could not"
            raise NoFeasibleCandidate(
                f"{named if alone else f'none of the {len(graph)} operators could'} be timed alone at width 1 ({why}). "
                "For a schedule, every operator must run on the device, on inputs drawn at random like the example's (integers within "
                "their range, in any order)."
            )
    total = sum(statistics.median(times[operator.signature, 1]) for operator in graph.operators)
    unattractive = UNATTRACTIVE * max(total, 1.0)
    place: dict[tuple[str, int], int] = {}
    facts: list[KernelFacts] = []
    names: list[str] = []
    index = np.zeros((len(graph), len(widths)), dtype=np.int32)
    for operator in graph.operators:
        for column, width in enumerate(widths):
            key = (operator.signature, width)
            if key not in place:
                place[key] = len(facts)
                known = times.get(key)
                solo_us = statistics.median(known) if known else unattractive
                facts.append(kernel_facts(operator, graph, width, solo_us, launches.get(operator.signature)))
                names.append(measured.get(key, operator.signature))
            index[operator.index, column] = place[key]
    return _Rows(tuple(facts), tuple(names), index, None, len(facts))


def _with_others(graph: OpGraph, others: Sequence[SoloRecord | None], launches: Mapping[str, LaunchFacts], rows: _Rows) -> _Rows:
    """With a row more for each signature that has another variant."""
    times: dict[str, list[float]] = {}
    for operator, record in zip(graph.operators, others, strict=bool(others)):
        if record is not None:
            times.setdefault(operator.signature, []).append(record.samples.median_us)
    if not times:
        return rows
    facts, names, place = list(rows.facts), list(rows.names), dict[str, int]()
    other = rows.index[:, 0].copy()
    for operator, record in zip(graph.operators, others, strict=True):
        if record is None:
            continue
        if operator.signature not in place:
            place[operator.signature] = len(facts)
            name = operator.signature + OTHER
            solo_us = statistics.median(times[operator.signature])
            facts.append(replace(kernel_facts(operator, graph, 1, solo_us, launches.get(name)), signature=name))
            names.append(record.signature)
        other[operator.index] = place[operator.signature]
    return _Rows(tuple(facts), tuple(names), rows.index, other, len(facts))


def _narrow_first(rows: _Rows) -> _Rows:
    """Renumbered for one team: first the kernels that may run beside others, which the table's pairs are of."""
    narrow = np.unique(rows.index[:, 0] if rows.other is None else np.concatenate([rows.index[:, 0], rows.other]))
    order = np.concatenate([narrow, np.setdiff1d(np.arange(len(rows.facts)), narrow)])
    number = np.empty(len(order), dtype=np.int32)
    number[order] = np.arange(len(order))
    facts, names = (tuple(items[row] for row in order.tolist()) for items in (rows.facts, rows.names))
    return _Rows(facts, names, number[rows.index], None if rows.other is None else number[rows.other], len(narrow))


def _predicted(
    graph: OpGraph, rows: _Rows, device: DeviceFacts, model: PairModel, one_team: bool
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Slowdowns for every pair of kernels that may meet, 1 elsewhere; and which those are (bool ``[n_beside, n_beside]``)."""
    count = rows.beside
    needed = pairs_that_meet(graph, rows.index, count, one_team=one_team, other=rows.other)
    # Models know kernels by the names in the data set; an operator's signature there is that of its calls.
    kernels = tuple(replace(kernel, signature=name) for kernel, name in zip(rows.facts[:count], rows.names[:count], strict=True))
    kernel_device = np.zeros(count, dtype=np.int64)
    table_first, table_last = np.ones((count, count)), np.ones((count, count))
    for begin, end in _blocks(needed):
        first, last = np.nonzero(needed[begin:end])
        first += begin
        answer = model.predict(PairQuery(kernels, (device,), kernel_device, first, last))
        table_first[first, last] = answer.slowdown_first
        # CostTable's slowdown_last[a, b] is that of a when a started last, so the last-started kernel comes first in the index.
        table_last[last, first] = answer.slowdown_last
    return table_first, table_last, needed


def _blocks(needed: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Rows of a table, from and to, of which each part has about ``_BLOCK`` pairs, or is one row."""
    ends = np.cumsum(needed.sum(axis=1))
    found: list[tuple[int, int]] = []
    begin = 0
    while begin < len(needed):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + _BLOCK, side="right")))
        found.append((begin, end))
        begin = end
    return found


def _undisturbed(pairs: Sequence[PairRecord], device: DeviceFacts) -> list[PairRecord]:
    """Leave out pairs that were timed while others had the cores: two lanes that take turns look like one stopped by the other."""
    kept = [pair for pair in pairs if stolen_share(pair.contamination, device, pair.first_width + pair.last_width) <= DISTURBED]
    if len(kept) < len(pairs):
        logger.warning(
            "%d of %d measured pairs are left out: other processes had more than %.0f %% of the cores they needed",
            len(pairs) - len(kept),
            len(pairs),
            DISTURBED * 100,
        )
    return kept


@dataclass(frozen=True, slots=True)
class _Observation:
    """Log slowdown of kernel ``own`` beside ``other``, with its variance."""

    own: int
    other: int
    log_slowdown: float
    variance: float


def _correct(rows: _Rows, pairs: Sequence[PairRecord], table_first: Floats, table_last: Floats, needed: NDArray[np.bool_]) -> float:
    """Move predictions by their mean error in each class, then each measured pair to its shrunk measurement; return the share measured."""
    place = {(kernel.signature, kernel.width): row for row, kernel in enumerate(rows.facts)}
    for_first: list[_Observation] = []
    for_last: list[_Observation] = []
    unusable = 0
    for pair in pairs:
        first, last = place.get((pair.first, pair.first_width)), place.get((pair.last, pair.last_width))
        if first is None or last is None or max(first, last) >= rows.beside or not needed[first, last]:
            continue  # of other graphs, or of two that never run together here: nothing to correct, and nothing to learn from
        values = (pair.slowdown_first, pair.slowdown_last)
        if not all(math.isfinite(value) and value > 0 for value in values):
            unusable += 1
            continue
        variance = pair_variance(pair.count, pair.contamination)
        # Noise below 1 is kept until the end: cutting each sample at 1 would make the mean of undisturbed pairs too high.
        logs = [math.log(min(max(value, 1.0 / MAX_SLOWDOWN), MAX_SLOWDOWN)) for value in values]
        for_first.append(_Observation(first, last, logs[0], variance))
        for_last.append(_Observation(last, first, logs[1], variance))
    if unusable:
        logger.warning("%d of %d pair records hold slowdowns that are not finite and positive; they were left out", unusable, len(pairs))
    wide = np.asarray([kernel.width > 1 for kernel in rows.facts[: rows.beside]])
    covered: set[tuple[int, int]] = set()
    for table, observations in ((table_first, for_first), (table_last, for_last)):
        _shift_classes(table, observations, wide, needed)
        for (own, other), group in _grouped(observations).items():
            table[own, other] = shrunk(table[own, other], group)
            covered.add((own, other) if table is table_first else (other, own))
    return len(covered) / max(1, int(needed.sum()))


def pair_variance(count: int, contamination: Contamination) -> float:
    """Variance of a measured log slowdown of ``count`` repeats; a core that others used makes it worth less."""
    foreign = max(0.0, contamination.foreign_load)
    return float((SAMPLE_NOISE**2 / max(1, count) + FLOOR_NOISE**2) * (1.0 + 10.0 * foreign) ** 2)


def shrunk(predicted: float, observations: Sequence[_Observation]) -> float:
    """Precision-weighted mean of prediction and measurements in log space.

    *Source:* the posterior mean of a normal with a normal prior, Gelman et al., Bayesian Data Analysis, section 2.5.
    """
    # A prediction far from 1 is uncertain in proportion: whether a kernel waits for the other is all or nothing.
    spread = PRIOR_SPREAD * (1.0 + math.log(predicted))
    precision = 1.0 / spread**2
    weighted = precision * math.log(predicted)
    for observation in observations:
        precision += 1.0 / observation.variance
        weighted += observation.log_slowdown / observation.variance
    return min(max(math.exp(weighted / precision), 1.0), MAX_SLOWDOWN)


def _shift_classes(table: Floats, observations: Sequence[_Observation], wide: NDArray[np.bool_], needed: NDArray[np.bool_]) -> None:
    """Add each class's mean log error (narrow or wide beside narrow or wide) to its predictions, shrunk to none where few were measured."""
    for own_wide in (False, True):
        for other_wide in (False, True):
            errors = [
                observation.log_slowdown - math.log(table[observation.own, observation.other])
                for observation in observations
                if wide[observation.own] == own_wide and wide[observation.other] == other_wide
            ]
            if errors:
                shift = sum(errors) / (len(errors) + CLASS_PSEUDO_COUNT)
                for own in np.flatnonzero(wide == own_wide):
                    others = needed[own] & (wide == other_wide)
                    table[own, others] = np.clip(table[own, others] * math.exp(shift), 1.0, MAX_SLOWDOWN)


def _grouped(observations: Sequence[_Observation]) -> dict[tuple[int, int], list[_Observation]]:
    groups: dict[tuple[int, int], list[_Observation]] = {}
    for observation in observations:
        groups.setdefault((observation.own, observation.other), []).append(observation)
    return groups
