"""What a tuning job or a comparison found: one row for each strategy, all measured in one run on one device."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autosched.core.records import DeviceKey, Failure, Source

_WORTH_TELLING_S = 0.1

RESTLESS = "this machine was too noisy for any conclusion; stop other work on it and run again"
"""What to say where ``TuneReport.unstable``."""


@dataclass(frozen=True, slots=True)
class StrategyRow:
    """One strategy's best schedule, or one baseline. Times are medians in microseconds; ``None`` where there is no figure.

    ``measured_us`` and ``ci_us`` (95 %) come from rounds interleaved with every other row's. Speed-ups are ratios of medians.
    ``source`` says whether they were measured in this run, replayed from an earlier one, or simulated.
    """

    name: str
    is_baseline: bool
    predicted_us: float | None
    measured_us: float | None
    ci_us: tuple[float, float] | None
    speedup_vs_sequential: float | None
    speedup_vs_best_baseline: float | None
    peak_memory_bytes: int | None
    max_abs_error: float | None
    failure: Failure | None
    source: Source = Source.MEASURED


@dataclass(frozen=True, slots=True)
class FoundSchedule:
    """One schedule, or one baseline that is none, and who found it.

    Args:
        row: of the strategy that is named for it; a baseline if one of them is.
        others: names of the strategies that found the same schedule.
    """

    row: StrategyRow
    others: tuple[str, ...] = ()

    @property
    def suffix(self) -> str:
        """What follows the name where there is room for one more.

        >>> FoundSchedule(StrategyRow("estf", True, 9.0, 9.0, None, 1.0, 1.0, None, None, None), ("opara", "ios")).suffix
        ' = 2 others'
        """
        return f" = {self.others[0] if len(self.others) == 1 else f'{len(self.others)} others'}" if self.others else ""


@dataclass(frozen=True, slots=True)
class TimedRounds:
    """Raw times of one schedule or baseline in the final comparison, microseconds: one for each round, in the order of the rounds; for the
    first rounds alone where it was no rival, and time was over.

    Args:
        name: of the row it was timed as; rows of other names with the same schedule have the same times.
        again: whether this is the second column of that schedule, which was run twice in each round (A/A).
    """

    name: str
    times_us: tuple[float, ...]
    again: bool = False


class LoweringOutcome(enum.StrEnum):
    """What became of one way to cut the model into operators."""

    KEPT = "kept"  # tuned, and its schedule is what the job gives back
    TUNED = "tuned"  # tuned, and another one's schedule won
    DROPPED = "dropped"  # measured in order, and not able to win
    SKIPPED = "skipped"  # not tried: no compiler, or no time to compile
    FAILED = "failed"  # tried, and could not be captured, compiled or run


@dataclass(frozen=True, slots=True)
class LoweringRow:
    """One lowering in a job that tried several.

    Args:
        lowering: which.
        outcome: what became of it.
        why: the reason, as a sentence without its stop; empty for the one that was kept.
        operators: how many it cuts the model into; ``None`` if that is not known.
        sequential_us: median of its best sequential order, microseconds, from rounds interleaved with those of the others.
        ci_us: 95 % interval of that median.
        bound_us: what no schedule of its operators can be faster than, from their times alone; ``None`` if unknown.
        prepared_s: seconds for capturing and compiling it.
        tuned_us: median of the schedule that its own tuning kept; ``None`` if it was not tuned.
    """

    lowering: str
    outcome: LoweringOutcome
    why: str = ""
    operators: int | None = None
    sequential_us: float | None = None
    ci_us: tuple[float, float] | None = None
    bound_us: float | None = None
    prepared_s: float | None = None
    tuned_us: float | None = None

    def sentence(self) -> str:
        """The row as text.

        >>> LoweringRow("fused", LoweringOutcome.DROPPED, "inductor takes 63 us in order", 6, 117.0).sentence()
        'fused dropped: 6 operators, 117 us in order; inductor takes 63 us in order'
        """
        facts = [f"{self.operators} operators"] if self.operators is not None else []
        facts += [f"{self.sequential_us:,.0f} us in order"] if self.sequential_us is not None else []
        facts += [f"{self.tuned_us:,.0f} us tuned"] if self.tuned_us is not None else []
        said = "; ".join(part for part in (", ".join(facts), self.why) if part)
        return f"{self.lowering} {self.outcome}" + (f": {said}" if said else "")


@dataclass(frozen=True, slots=True)
class StageTime:
    """One stage of a job.

    Args:
        name: as the progress line showed it.
        seconds: of all its turns together.
        in_budget: whether they are the budget's; what comes before it begins (capture, the start of the first process) is not,
            nor are the compilers of baselines.
    """

    name: str
    seconds: float
    in_budget: bool = True


def where_time_went(stages: Sequence[StageTime]) -> str:
    """The stages as a sentence, longest first, those under a tenth of a second left out; empty if none took longer.

    What a stage is of is put in brackets, because commas separate the stages.

    >>> where_time_went([StageTime("capture", 2.0, False), StageTime("search", 1.25), StageTime("duel", 3.0), StageTime("trace", 0.01)])
    'duel 3.0 s, search 1.2 s; not in the budget: capture 2.0 s'
    """
    longest = sorted((stage for stage in stages if stage.seconds >= _WORTH_TELLING_S), key=lambda stage: -stage.seconds)
    inside, outside = (
        ", ".join(f"{_bracketed(stage.name)} {stage.seconds:.1f} s" for stage in longest if stage.in_budget is counted)
        for counted in (True, False)
    )
    return "; ".join(part for part in (inside, f"not in the budget: {outside}" if outside else "") if part)


def _bracketed(stage: str) -> str:
    what, comma, of = stage.partition(", ")
    return f"{what} ({of})" if comma else stage


@dataclass(frozen=True, slots=True)
class TuneReport:
    """The result of one run.

    Args:
        chosen: name of the row whose schedule was kept.
        best_baseline: the fastest baseline that measured: the program in order, a published scheduler's schedule, or no schedule at all.
        verdict: one sentence saying what was kept and why.
        ratio_low, ratio_high: 95 % interval of (chosen over best sequential) time, from a final head-to-head; 1.0 if that was kept.
        unstable: whether the machine was too restless for any statement; the sequential schedule is then kept.
        noise_floor_pct: how much two runs of the same schedule differ in this run (A/A).
        search_s: seconds for the whole job, capture excluded.
        source: ``REPLAYED`` if the device was a recording, ``SIMULATED`` if it says so: then this run measured nothing.
        critical_path_us, work_us: bounds on every schedule of these operators, as ``pipeline.bounds`` gives them; ``None`` if unknown.
        lowerings: every lowering that the job considered, in the order tried; empty where one was asked for.
        stages: where the time went, in the order the stages came; empty if nobody kept count.
        bundle: the file that the schedule was saved to; ``None`` if it was not.
        cached: the same in the cache of tuned schedules, where ``torch.compile`` finds it; ``None`` if it was not kept there.
        rounds: raw times behind ``strategies``; empty in a file's evidence, where medians and intervals are enough.
    """

    model: str
    graph_hash: str
    device: DeviceKey
    lowering: str
    operators: int
    chosen: str
    best_baseline: str
    verdict: str
    ratio_low: float
    ratio_high: float
    strategies: tuple[StrategyRow, ...]
    measurements: int
    failures: int
    search_s: float
    noise_floor_pct: float
    seed: int
    effort: str
    notes: tuple[str, ...] = ()
    unstable: bool = False
    bundle: str | None = None
    critical_path_us: float | None = None
    work_us: float | None = None
    source: Source = Source.MEASURED
    lowerings: tuple[LoweringRow, ...] = ()
    cached: str | None = None
    stages: tuple[StageTime, ...] = ()
    rounds: tuple[TimedRounds, ...] = ()

    def schedules(self) -> list[FoundSchedule]:
        """The rows with each schedule once, fastest first; of several names that of the kept one, then the first."""
        rows = sorted(self.strategies, key=lambda row: (row.measured_us is None, row.measured_us or 0.0, row.name != self.chosen))
        groups: dict[object, list[StrategyRow]] = {}
        for place, row in enumerate(rows):
            # One measurement gave the figures of all who found a schedule; a simulator may give different ones the same.
            told = row.measured_us is not None and row.predicted_us is not None and row.source is not Source.SIMULATED
            figures = (row.predicted_us, row.measured_us, row.ci_us, row.peak_memory_bytes, row.max_abs_error)
            groups.setdefault(figures if told else place, []).append(row)
        return [
            FoundSchedule(replace(first, is_baseline=any(row.is_baseline for row in (first, *rest))), tuple(row.name for row in rest))
            for first, *rest in groups.values()
        ]

    def summary(self) -> str:
        """The verdict, a line for each schedule and baseline, and what there is to know besides, as text."""
        lines = [f"{self.model} on {self.device.name}: {self.verdict}"]
        lines += [f"  lowering {row.sentence()}" for row in self.lowerings]
        for found in self.schedules():
            row = found.row
            if row.failure is not None:
                lines.append(f"  {row.name:<20} {row.failure.kind}: {row.failure.detail}")
            elif row.measured_us is not None:
                said = f"{row.measured_us:12,.1f} us measured  {row.speedup_vs_best_baseline:.3f}x over the best baseline"
                lines.append(f"  {row.name + found.suffix:<20} {said}")
        lines += [f"  {line}" for line in self.found_by_several()]
        lines += [f"  note: {note}" for note in self.notes]
        if spent := where_time_went(self.stages):
            lines.append(f"  where the time went: {spent}")
        if self.unstable:
            lines.append(f"  {RESTLESS}")
        return "\n".join(lines)

    def found_by_several(self) -> list[str]:
        """Sentences that name the strategies which rows count only."""
        several = [found for found in self.schedules() if len(found.others) > 1]
        return [f"{', '.join(found.others)} found the schedule of {found.row.name}, too" for found in several]
