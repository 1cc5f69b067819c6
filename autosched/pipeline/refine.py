"""The device loop on a session: every schedule is proved before its first timing, and what was measured corrects the model."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autosched.core.errors import NoFeasibleCandidate
from autosched.core.progress import Progress
from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule, canonical_key
from autosched.device.base import Session
from autosched.pipeline.budget import Budget
from autosched.pipeline.candidates import Candidate, make_candidate
from autosched.pipeline.diary import Diary, KeptBench
from autosched.pipeline.left_out import LeftOut
from autosched.pipeline.measuring import Ledger
from autosched.pipeline.proving import Entry, Prover
from autosched.pipeline.request import TUNED
from autosched.pipeline.timetable import Pace, Timetable
from autosched.pipeline.variants import MOST_TRIED, VariantTimes, try_variants
from autosched.search.climb import ClimbSettings, climb
from autosched.search.correction import Trace
from autosched.search.device_study import study_on_device
from autosched.search.halving import halve
from autosched.search.loop import Bench, LoopProgress, LoopResult, LoopState, search_on_device
from autosched.search.portfolio import Proposal
from autosched.search.problem import Problem
from autosched.search.simulate import makespan_us
from autosched.search.strategy import Progress as SearchProgress
from autosched.search.strategy import SearchContext

_TRACE_ROUNDS = 5
# Rounds in which the best of the loop and the best of the study meet.
_MATCH_ROUNDS = 8
# Share of the time left that the loop may use where a study follows it, or changes of variants.
_LOOP_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class _Given:
    """A schedule that is already at hand, as a strategy."""

    name: str
    is_baseline: bool
    schedule: Schedule

    def propose(self, problem: Problem, context: SearchContext) -> list[Schedule]:
        """The schedule."""
        return [self.schedule]


class SessionBench:
    """The loop's ``Bench`` over a device session: proves what is new before it is timed, and proves nothing new after ``until_s``."""

    def __init__(self, session: Session, prover: Prover, ledger: Ledger, pace: Pace, *, until_s: float = math.inf) -> None:
        self._session = session
        self._prover = prover
        self._ledger = ledger
        self._pace = pace
        self._until_s = until_s

    def measure(self, schedules: Sequence[Schedule], rounds: int) -> Sequence[Sequence[float] | Failure]:
        """Prove what is new, then time the rest in the same rounds."""
        verdicts = [self._prover.refutation(schedule, until_s=self._until_s) for schedule in schedules]
        sound = [schedule for schedule, failure in zip(schedules, verdicts, strict=True) if failure is None]
        columns = iter(self._timed(sound, rounds))
        return [failure if failure is not None else next(columns) for failure in verdicts]

    def trace(self, schedules: Sequence[Schedule]) -> Sequence[Trace | Failure]:
        """When each operator ran, as the device tells."""
        answers: list[Trace | Failure] = []
        for record in self._session.schedules(schedules, rounds=_TRACE_ROUNDS, trace=True):
            self._ledger.count(record)
            if isinstance(record, Failure):
                answers.append(record)
            elif not record.operator_end_us:
                answers.append(Failure(FailureKind.UNAVAILABLE, "this device does not say when operators run"))
            else:
                answers.append(Trace(record.operator_start_us, record.operator_end_us))
        return answers

    def _timed(self, schedules: Sequence[Schedule], rounds: int) -> list[Sequence[float] | Failure]:
        if not schedules:
            return []
        self._ledger.measurements += rounds * len(schedules)
        begin_s = time.monotonic()
        answer = self._session.paired(schedules, rounds=rounds)
        if not isinstance(answer, Failure):
            # How long a process takes to be found dead and replaced says nothing of the turns to come.
            self._pace.timed(time.monotonic() - begin_s, rounds * len(schedules))
        if isinstance(answer, Failure) and len(schedules) > 1:
            # One of them brought the worker down; apart from each other, only the guilty one fails.
            alone = [self._session.paired([schedule], rounds=rounds) for schedule in schedules]
            return [item if isinstance(item, Failure) else item[0] for item in alone]
        return [answer] if isinstance(answer, Failure) else list(answer)


@dataclass(frozen=True, slots=True)
class Refined:
    """What the device loop found: its best schedule, named ``tuned`` (none if there was no time, or nothing ran), and canonical keys of
    all it measured, fastest first."""

    best: tuple[Candidate, ...] = ()
    ranking: tuple[str, ...] = ()


def refine(
    session: Session,
    problem: Problem,
    proved: Sequence[Entry],
    prover: Prover,
    *,
    budget: Budget,
    timetable: Timetable,
    rng: np.random.Generator,
    ledger: Ledger,
    progress: Progress,
    diary: Diary | None = None,
    study_path: Path | None = None,
    variants: VariantTimes | None = None,
) -> Refined:
    """Search and measure in turns until the final comparison must begin.

    ``proved`` schedules are in the first round whatever the model says of them; where there is no time for all of them, the sequential
    ones and those that the model likes best. What ``diary`` (entered) holds of an interrupted run is not measured again. After the loop,
    where the effort has trials for it, Optuna tries list policies on the device, in the study at ``study_path`` (memory if None). The
    winner's operators are then tried in other ``variants``, and with the time that is left after that, small changes of it.
    """
    limits, profile = session.limits, budget.search
    deadline = timetable.loop_until_s(len(proved) + 1, budget.final_rounds)
    left_s = deadline - time.monotonic()
    loop_s = left_s * (_LOOP_SHARE if variants is not None else 1.0)
    given, count = _first_round(proved, timetable, loop_s, profile.candidates, ledger)
    if not count:
        return Refined()
    sessions = SessionBench(session, prover, ledger, timetable.pace, until_s=deadline)
    kept = diary if diary is not None else Diary(None, "")
    bench = KeptBench(sessions, kept, problem.graph, lanes_matter=limits.lanes_matter)
    if kept.resumed:
        ledger.notes.append(f"went on from an interrupted run: {sum(map(len, kept.times_us.values()))} schedule timings were at hand")
    # Priorities cannot be simulated; where the device has them they are tried as variants of the best schedules.
    settings = profile.loop(lanes_matter=limits.lanes_matter, priority_variants=3 if len(limits.priorities) > 1 else 0)
    settings = dataclasses.replace(settings, candidates=count)
    context = SearchContext(rng, profile.evaluations, time.monotonic() + loop_s, max_lanes=limits.max_lanes, widths=limits.widths)
    first = context.share(context.max_evaluations, seconds_share=_LOOP_SHARE if profile.trials else 1.0)
    strategies = [_Given(entry.name, entry.candidates[0].is_baseline, entry.schedule) for entry in given]
    try:
        result = search_on_device(
            problem, bench, first, settings, strategies=strategies, progress=_teller(progress, ledger, deadline),
            known_times_us=kept.times_us, known_lots=kept.lots, known_failures=kept.failures, known_traces=kept.traces,
        )  # fmt: skip
    except NoFeasibleCandidate as error:
        ledger.notes.append(f"the device loop found nothing: {error}")
        return Refined()
    best, corrected = result.best, problem.with_costs(result.costs)
    if profile.trials and limits.max_lanes > 1 and not context.expired():
        study = dataclasses.replace(context.share(0), study_path=None if study_path is None else str(study_path))
        best = _studied(corrected, bench, study, result, profile.trials, lanes_matter=limits.lanes_matter, run=kept.run)
    schedule = best.schedule
    if variants is not None:
        most = timetable.variants(deadline - time.monotonic(), MOST_TRIED)
        schedule = try_variants(sessions, schedule, problem.graph, variants, most=most)
    if profile.idle_climbs and limits.max_lanes > 1:
        climbs = ClimbSettings(idle=profile.idle_climbs)
        # A batch that is begun is measured to its end.
        until_s = deadline - timetable.work_s(climbs.batch, climbs.turns)
        left = dataclasses.replace(context.share(0), deadline_s=until_s, progress=_climb_teller(progress, ledger, deadline))
        if not left.expired():
            progress.stage("small changes", timetable.left_s())
            schedule = _climbed(corrected, bench, left, result, schedule, climbs, lanes_matter=limits.lanes_matter)
    # What an interrupted run measured it had proved; this process trusts only its own proofs.
    if (refuted := prover.refutation(schedule)) is not None:
        ledger.notes.append(f"the device loop's best was refuted when it was proved again: {refuted.detail}")
        return Refined()
    found = make_candidate(problem, TUNED, False, schedule, lanes_matter=limits.lanes_matter)
    # What a study or other variants made of the loop's best won against it: it has no place in the loop's own ranking.
    return Refined((found,), tuple(dict.fromkeys((found.key, *result.ranking))))


def _first_round(
    proved: Sequence[Entry], timetable: Timetable, seconds: float, candidates: int, ledger: Ledger
) -> tuple[Sequence[Entry], int]:
    """Who of ``proved`` is in the first round, and how many ``candidates`` a round has; 0 if there is no time for any."""
    most = max(candidates, len(proved))
    count = timetable.loop_candidates(seconds, most)
    if not count:
        ledger.left_out.append(LeftOut("the device loop", timetable.more_loop_s(seconds, most)))
    elif count < most:
        what = f"{most - count} of the {most} candidates that a round of the device loop may have"
        ledger.left_out.append(LeftOut(what, timetable.more_loop_s(seconds, most)))
    return (proved if count == most else _most_likely(proved, count)), min(count, candidates)


def _most_likely(proved: Sequence[Entry], count: int) -> list[Entry]:
    """The sequential ones, and as many of the best predicted as leave half the places to what the loop's own search finds."""
    static = [entry for entry in proved if entry.is_static]
    others = sorted((entry for entry in proved if not entry.is_static), key=lambda entry: (entry.candidates[0].predicted_us, entry.key))
    return [*static, *others[: max(1, (count + 1) // 2 - len(static))]]


def _teller(progress: Progress, ledger: Ledger, deadline: float) -> LoopProgress:
    def tell(state: LoopState) -> None:
        gain = state.baseline_us / state.incumbent_us if math.isfinite(state.baseline_us) else math.nan
        incumbent = f"{state.incumbent} {state.incumbent_us:,.0f} us" + (f" ({gain:.2f}x)" if math.isfinite(gain) else "")
        left_s = max(deadline - time.monotonic(), 0.0)
        progress.update(
            done=state.round, total=state.rounds, incumbent=incumbent, measured=ledger.measurements, failed=ledger.failures, left_s=left_s
        )

    return tell


def _climb_teller(progress: Progress, ledger: Ledger, deadline: float) -> SearchProgress:
    def tell(strategy: str, evaluations: int, best_us: float) -> None:  # of batches
        left_s = max(deadline - time.monotonic(), 0.0)
        progress.update(done=evaluations, total=evaluations + 1, measured=ledger.measurements, failed=ledger.failures, left_s=left_s)

    return tell


def _studied(
    corrected: Problem, bench: Bench, context: SearchContext, result: LoopResult, trials: int, *, lanes_matter: bool, run: str
) -> Proposal:
    """The better of the loop's best and the best of a study of list policies on the device, by rounds that both run in."""
    found = study_on_device(
        corrected, bench, context, result.ledger, incumbent=result.best, lanes_matter=lanes_matter, trials=trials, name=run
    )
    if found.best is None or found.best.key == result.best.key:
        return result.best
    ranked = halve([result.best, found.best], bench.measure, result.ledger, first_rounds=_MATCH_ROUNDS, finalists=2)
    return ranked[0].proposal if ranked else result.best


def _climbed(
    corrected: Problem,
    bench: Bench,
    context: SearchContext,
    result: LoopResult,
    schedule: Schedule,
    settings: ClimbSettings,
    *,
    lanes_matter: bool,
) -> Schedule:
    """``schedule``, or what small changes made of it that won against it."""
    key = canonical_key(corrected.graph, schedule, lanes_matter=lanes_matter)
    start = Proposal((TUNED,), False, schedule, makespan_us(corrected, schedule), key)
    found = climb(corrected, bench, context, result.ledger, incumbent=start, lanes_matter=lanes_matter, settings=settings)
    return found.best.schedule
