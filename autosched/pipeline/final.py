"""The final comparison: which schedules it has the time for, who wins it, and the report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autosched.core.errors import NoFeasibleCandidate
from autosched.core.progress import OUTSIDE
from autosched.core.records import Failure, Paging, ScheduleRecord, Source
from autosched.core.report import StrategyRow, TuneReport
from autosched.core.schedule import Schedule
from autosched.datasets.facts import DISTURBED
from autosched.device.contamination import foreign_load, mark_job
from autosched.pipeline.baselines import Rivals
from autosched.pipeline.candidates import Candidate
from autosched.pipeline.graph_proofs import stress_capture
from autosched.pipeline.judge import Duel, External, Judgement, Times, duel, finalists, interleave, judge
from autosched.pipeline.left_out import LeftOut
from autosched.pipeline.memory import remember_runs, timed_schedules
from autosched.pipeline.no_schedule import listed
from autosched.pipeline.options import Outcome
from autosched.pipeline.other_work import other_work_note
from autosched.pipeline.proving import Entry
from autosched.pipeline.replaying import replayed_report
from autosched.pipeline.rows import best_baseline, strategy_rows
from autosched.pipeline.run import Costs, Run
from autosched.pipeline.scope import scope_row
from autosched.pipeline.timetable import LEAST_ROWS
from autosched.search.simulate import simulate

_TRACE_ROUNDS = 5
_TRACE_BLOCK_US = 25_000.0  # so long that what else the machine did meanwhile can be told
_DUEL_SHARE = 0.1
_MUCH_PAGING, _LEAST_ANEW_BYTES = 0.05, 1 << 20


@dataclass(frozen=True, eq=False)
class Field:
    """Everyone in the final comparison, and who is not.

    Args:
        entries: proved schedules, the sequential ones first.
        failures: candidates and strategies that failed, by name; grows.
        externals: baselines that are no schedules.
    """

    entries: tuple[Entry, ...]
    failures: dict[str, Failure]
    externals: tuple[External, ...]

    @property
    def static(self) -> tuple[str, ...]:
        """Names of the sequential schedules."""
        return tuple(entry.name for entry in self.entries if entry.is_static)

    @property
    def searched(self) -> tuple[str, ...]:
        """Names of the others."""
        return tuple(entry.name for entry in self.entries if not entry.is_static)

    def entry(self, name: str) -> Entry:
        """Who stands under ``name``."""
        return next(entry for entry in self.entries if entry.name == name)


def decide(
    run: Run, costs: Costs, proved: Sequence[Entry], ranking: Sequence[str], failures: dict[str, Failure], rivals: Rivals
) -> Outcome:
    """Compare, judge and report.

    Args:
        proved: every proved schedule; a sequential one among them.
        ranking: canonical keys of those that were measured before, fastest first.
        failures: what failed, by name.

    Raises:
        NoFeasibleCandidate: if no sequential schedule can be timed.
    """
    run.progress.stage("baselines", OUTSIDE)
    began_s = time.monotonic()
    externals = rivals.ready(run.captured, run.references.answer)
    # A rival's compile time is not taken from the budget of the search.
    run.timetable.extend(time.monotonic() - began_s)
    run.timetable.outside = len(externals)
    field = Field(_admitted(run, proved, ranking), failures, tuple(externals))
    run.progress.stage("final comparison", run.timetable.left_s())
    load = mark_job()
    times = _compared(run, field)
    if not any(times.columns.get(name) for name in field.static):
        raise NoFeasibleCandidate(f"no sequential schedule can be timed: {listed({**failures, **times.failures})}")
    run.progress.stage("duel of the two best", run.timetable.left_s())
    judgement = _judged(run, field, times)
    here = run.recording is None and run.device.key.kind == "cpu"
    cores = disturbance_note(foreign_load(load, mark_job())) if here else ""
    run.progress.stage("trace and memory", run.timetable.left_s())
    return _outcome(run, costs, field, times, judgement, cores)


def _admitted(run: Run, proved: Sequence[Entry], ranking: Sequence[str]) -> tuple[Entry, ...]:
    """The sequential schedules, and as many of the others as get all their rounds in time: those measured fastest, then best predicted."""
    static = [entry for entry in proved if entry.is_static]
    place = {key: index for index, key in enumerate(ranking)}
    others = sorted(
        (entry for entry in proved if not entry.is_static),
        key=lambda entry: (place.get(entry.key, len(place)), entry.candidates[0].predicted_us, entry.key),
    )
    count = run.timetable.rows(min(LEAST_ROWS, len(proved)), len(proved)) - len(static)
    if absent := [candidate.name for entry in others[count:] for candidate in entry.candidates]:
        what = f"{len(absent)} {'strategy' if len(absent) == 1 else 'strategies'} in the final comparison ({', '.join(absent)})"
        run.ledger.left_out.append(LeftOut(what, run.timetable.more_rows_s(len(proved), refine=run.options.refine)))
    return (*static, *others[:count])


def _compared(run: Run, field: Field) -> Times:
    timetable, budget = run.timetable, run.options.budget
    duel_s = min(_DUEL_SHARE * budget.total_s, 6 * budget.final_rounds * timetable.pace.turn_s)
    after_s = max(timetable.after_comparison_s(len(field.entries)), duel_s)
    times = interleave(
        run.session,
        [(entry.name, entry.schedule) for entry in field.entries],
        field.externals,
        rounds=budget.final_rounds,
        deadline=timetable.end_s - after_s,
        progress=run.progress,
        anchor=field.static[0],
        stand_ins=field.static[1:],
    )
    run.ledger.measurements += sum(len(column) for column in times.columns.values())
    run.ledger.failures += len(times.failures)
    return times


def _judged(run: Run, field: Field, times: Times) -> Judgement:
    """Judge; a candidate that fails in the duel, or races under injected delays, is struck out, and the rest is judged again."""
    left = list(field.searched)
    while True:
        best, base = finalists(times, left, field.static)
        fought = _duel(run, field, best, base) if best is not None else None
        judgement = judge(times, left, field.static, [item.name for item in field.externals], fought)
        if best is None or (judgement.chosen in field.static and not isinstance(fought, Failure)):
            return judgement
        guilty = _guilty(run, field.entry(base).schedule, fought) if isinstance(fought, Failure) else _race(run, field, best)
        if guilty is None:
            return judgement
        left.remove(best)
        times.columns.pop(best)
        times.failures[best] = field.failures[best] = guilty
        run.ledger.failures += 1
        if isinstance(fought, Failure) and not any(times.columns.get(name) for name in left):
            return judgement


def _race(run: Run, field: Field, name: str) -> Failure | None:
    return stress_capture(run.session, run.graph, field.entry(name).schedule, run.options.seed)


def _guilty(run: Run, base: Schedule, fought: Failure) -> Failure | None:
    """The failure of a duel as its candidate's; none where not even ``base`` runs by now: then nobody else would come through either."""
    return None if isinstance(run.session.paired([base], rounds=1), Failure) else fought


def _duel(run: Run, field: Field, candidate: str, base: str) -> Duel | Failure:
    budget = run.options.budget
    seconds = min(_DUEL_SHARE * budget.total_s, run.timetable.left_s() - run.timetable.after_duel_s(len(field.entries)))
    first, second = field.entry(candidate).schedule, field.entry(base).schedule
    fought = duel(run.session, first, second, rounds=budget.final_rounds, seconds=seconds)
    run.ledger.measurements += 3 * len(fought.base_us) if isinstance(fought, Duel) else 1
    return fought


def _outcome(run: Run, costs: Costs, field: Field, times: Times, judgement: Judgement, cores: str) -> Outcome:
    """The report of it all; ``cores`` says who else had them, if anybody."""
    kept = field.entry(judgement.chosen).schedule
    traced = run.session.schedules([kept], rounds=_TRACE_ROUNDS, trace=True, min_block_us=_TRACE_BLOCK_US)[0]
    peaks = run.session.schedules([entry.schedule for entry in field.entries], rounds=1)
    device = other_work_note(run.device, "at the end of this job")
    run.ledger.notes += [note for note in (cores, device, paging_note(traced)) if note]
    bytes_of = [None if isinstance(peak, Failure) else peak.peak_memory_bytes for peak in peaks]
    rows = strategy_rows(field.entries, bytes_of, field.externals, field.failures, times)
    report = _report(run, costs, field, judgement, rows, times)
    if run.recording is not None:
        report = replayed_report(report, _by_key(field), run.session)
    elif any(isinstance(peak, ScheduleRecord) and peak.source is not Source.MEASURED for peak in peaks):
        report = _simulated(report)
    else:
        _remember(run, costs, field, times, report, quiet=not (judgement.restless or cores or device))
    trace = None if isinstance(traced, Failure) else traced
    planned = simulate(costs.problem, kept)
    ends = tuple(map(float, planned.start_us)), tuple(map(float, planned.end_us))
    return Outcome(report, run.captured, kept, run.device, trace, ends, _alone(costs, kept), tuple(run.ledger.left_out))


def _report(run: Run, costs: Costs, field: Field, judgement: Judgement, rows: Sequence[StrategyRow], times: Times) -> TuneReport:
    return TuneReport(
        model=run.options.name,
        graph_hash=run.graph.hash,
        device=run.device.key,
        lowering=run.captured.program.lowering,
        operators=len(run.graph),
        chosen=judgement.chosen,
        best_baseline=best_baseline(rows),
        verdict=judgement.verdict,
        ratio_low=judgement.ratio.ci_low,
        ratio_high=judgement.ratio.ci_high,
        strategies=tuple(rows),
        measurements=run.ledger.measurements,
        failures=run.ledger.failures,
        search_s=time.monotonic() - run.timetable.begin_s,
        noise_floor_pct=judgement.noise_pct,
        seed=run.options.seed,
        effort=run.options.effort,
        notes=(*run.ledger.notes, *dict.fromkeys(item.note for item in field.externals if item.note)),
        unstable=judgement.unstable,
        critical_path_us=costs.bounds.critical_path_us,
        work_us=costs.bounds.work_us,
        rounds=times.rounds(),
    )


def _simulated(report: TuneReport) -> TuneReport:
    """The report on a device, brought by a plugin, whose own records say that nothing was measured."""
    return dataclasses.replace(
        report,
        strategies=tuple(dataclasses.replace(row, source=Source.SIMULATED) for row in report.strategies),
        verdict=f"Simulated, nothing was measured: {report.verdict}",
        measurements=0,
        source=Source.SIMULATED,
        rounds=(),
    )


def disturbance_note(taken: float) -> str:
    """What to say if other processes had ``taken`` of the cores, a share, while the schedules were compared; empty where that is little."""
    if taken <= DISTURBED:
        return ""
    return (
        f"other processes had {taken:.0%} of the cores while the schedules were compared: what is fastest beside them need not be "
        "fastest alone; stop other work and tune again"
    )


def paging_note(traced: ScheduleRecord | Failure) -> str:
    """What to say if the kept schedule spends its time on taking memory that it has just given back; empty if it does not."""
    paging = traced.paging if isinstance(traced, ScheduleRecord) else Paging()
    if paging.system_share < _MUCH_PAGING or paging.anew_bytes < _LEAST_ANEW_BYTES:
        return ""
    return (
        f"{paging.system_share:.0%} of this schedule's processor time goes to the operating system, which gives every run "
        f"{paging.anew_bytes / 2**20:,.0f} MiB of memory anew; it is kept, and the runs are faster, with --keep-memory (in Python: "
        "autosched.keep_memory() where you tune and where you serve)"
    )


def _remember(run: Run, costs: Costs, field: Field, times: Times, report: TuneReport, *, quiet: bool) -> None:
    """Leave what was measured to the next training of a cost model."""
    if costs.measured is None:
        return
    name, scope = run.options.name, scope_row(run.device, run.session.limits)
    peaks = {row.name: row.peak_memory_bytes for row in report.strategies}
    # What a restless machine said of whole schedules is worth nothing; operators and pairs carry their own disturbance.
    sound = _by_key(field) if quiet else {}
    timed = timed_schedules(scope.scope, run.graph, name, run.model.name, sound, times, peaks)
    remember_runs(scope, run.graph, name, run.session.limits, costs.measured, timed)


def _by_key(field: Field) -> Mapping[str, Sequence[Candidate]]:
    return {entry.key: entry.candidates for entry in field.entries}


def _alone(costs: Costs, schedule: Schedule) -> tuple[float, ...]:
    """Time alone of each operator at the width and in the variant that ``schedule`` gives it, microseconds."""
    problem = costs.problem
    return tuple(problem.solo_us[problem.kernel[np.arange(problem.count), problem.width_indices(schedule)]].tolist())
