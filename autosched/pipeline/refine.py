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
from autosched.device.base import Comparison, Session
from autosched.pipeline.budget import Budget
from autosched.pipeline.candidates import Candidate, make_candidate, prove
from autosched.pipeline.diary import Diary, KeptBench
from autosched.pipeline.measuring import Ledger
from autosched.pipeline.references import References
from autosched.pipeline.variants import VariantTimes, try_variants
from autosched.search.correction import Trace
from autosched.search.device_study import study_on_device
from autosched.search.halving import halve
from autosched.search.loop import Bench, LoopResult, LoopState, search_on_device
from autosched.search.portfolio import Proposal
from autosched.search.problem import Problem
from autosched.search.strategy import SearchContext

TUNED = "tuned"
_TRACE_ROUNDS = 5
# Rounds in which the best of the loop and the best of the study meet.
_MATCH_ROUNDS = 8
# Share of the time left that the loop may use where a study follows it.
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
    """The loop's ``Bench`` over a device session. Remembers every proof, failed or not, by canonical key."""

    def __init__(self, session: Session, problem: Problem, references: References, proofs: dict[str, Comparison], ledger: Ledger) -> None:
        self._session = session
        self._graph = problem.graph
        self._references = references
        self._proofs = proofs
        self._refuted: dict[str, Failure] = {}
        self._ledger = ledger

    def measure(self, schedules: Sequence[Schedule], rounds: int) -> Sequence[Sequence[float] | Failure]:
        """Prove what is new, then time the rest in the same rounds."""
        verdicts = [self.refutation(schedule) for schedule in schedules]
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
        answer = self._session.paired(schedules, rounds=rounds)
        if isinstance(answer, Failure) and len(schedules) > 1:
            # One of them brought the worker down; apart from each other, only the guilty one fails.
            alone = [self._session.paired([schedule], rounds=rounds) for schedule in schedules]
            self._ledger.measurements += rounds * len(schedules)
            return [item if isinstance(item, Failure) else item[0] for item in alone]
        self._ledger.measurements += rounds * len(schedules)
        return [answer] if isinstance(answer, Failure) else list(answer)

    def refutation(self, schedule: Schedule) -> Failure | None:
        """Why the schedule must not run, or None once it is proved."""
        key = canonical_key(self._graph, schedule, lanes_matter=self._session.limits.lanes_matter)
        if key in self._refuted:
            return self._refuted[key]
        if key not in self._proofs:
            answer = prove(self._session, self._graph, schedule, self._references)
            self._ledger.count(answer)
            if isinstance(answer, Failure):
                self._refuted[key] = answer
                return answer
            self._proofs[key] = answer
        return None


def refine(
    session: Session,
    problem: Problem,
    proved: Sequence[Candidate],
    proofs: dict[str, Comparison],
    references: References,
    *,
    budget: Budget,
    deadline: float,
    rng: np.random.Generator,
    ledger: Ledger,
    progress: Progress,
    diary: Diary | None = None,
    study_path: Path | None = None,
    variants: VariantTimes | None = None,
) -> list[Candidate]:
    """Search and measure in turns until ``deadline`` (``time.monotonic``); returns the best schedule found, named ``tuned``.

    ``proved`` schedules are in the first round whatever the model says of them. New proofs are added to ``proofs``. What ``diary``
    (entered) holds of an interrupted run is not measured again. After the loop, where the effort has trials for it, Optuna tries list
    policies on the device, in the study at ``study_path`` (memory if None). The winner's operators are then tried in other ``variants``.
    """
    limits = session.limits
    sessions = SessionBench(session, problem, references, proofs, ledger)
    kept = diary if diary is not None else Diary(None, "")
    bench = KeptBench(sessions, kept, problem.graph, lanes_matter=limits.lanes_matter)
    if kept.resumed:
        ledger.notes.append(f"went on from an interrupted run: {sum(map(len, kept.times_us.values()))} schedule timings were at hand")
    # Priorities cannot be simulated; where the device has them they are tried as variants of the best schedules.
    settings = budget.search.loop(lanes_matter=limits.lanes_matter, priority_variants=3 if len(limits.priorities) > 1 else 0)

    def tell(state: LoopState) -> None:
        gain = state.baseline_us / state.incumbent_us if math.isfinite(state.baseline_us) else math.nan
        incumbent = f"{state.incumbent} {state.incumbent_us:,.0f} us" + (f" ({gain:.2f}x)" if math.isfinite(gain) else "")
        left_s = max(deadline - time.monotonic(), 0.0)
        progress.update(
            done=state.round, total=state.rounds, incumbent=incumbent, measured=ledger.measurements, failed=ledger.failures, left_s=left_s
        )

    context = SearchContext(rng, budget.search.evaluations, deadline, max_lanes=limits.max_lanes, widths=limits.widths)
    trials = budget.search.trials
    first = context.share(context.max_evaluations, seconds_share=_LOOP_SHARE if trials else 1.0)
    given = [_Given(candidate.name, candidate.is_baseline, candidate.schedule) for candidate in proved]
    try:
        result = search_on_device(
            problem, bench, first, settings, strategies=given, progress=tell, known_times_us=kept.times_us, known_failures=kept.failures,
            known_traces=kept.traces,
        )  # fmt: skip
    except NoFeasibleCandidate as error:
        ledger.notes.append(f"the device loop found nothing: {error}")
        return []
    best = result.best
    if trials and limits.max_lanes > 1 and not context.expired():
        path = str(study_path) if study_path is not None else None
        study = dataclasses.replace(context.share(0), study_path=path)
        best = _studied(problem, bench, study, result, trials, lanes_matter=limits.lanes_matter, run=kept.run)
    schedule = best.schedule if variants is None else try_variants(sessions, best.schedule, problem.graph, variants)
    # What an interrupted run measured it had proved; this process trusts only its own proofs.
    if (refuted := sessions.refutation(schedule)) is not None:
        ledger.notes.append(f"the device loop's best was refuted when it was proved again: {refuted.detail}")
        return []
    return [make_candidate(problem, TUNED, False, schedule, lanes_matter=limits.lanes_matter)]


def _studied(
    problem: Problem, bench: Bench, context: SearchContext, result: LoopResult, trials: int, *, lanes_matter: bool, run: str
) -> Proposal:
    """The better of the loop's best and the best of a study of list policies on the device, by rounds that both run in."""
    corrected = Problem.make(problem.graph, result.costs, demand=problem.demand.tolist(), memory_bound=problem.memory_bound.tolist())
    found = study_on_device(
        corrected, bench, context, result.ledger, incumbent=result.best, lanes_matter=lanes_matter, trials=trials, name=run
    )
    if found.best is None or found.best.key == result.best.key:
        return result.best
    ranked = halve([result.best, found.best], bench.measure, result.ledger, first_rounds=_MATCH_ROUNDS, finalists=2)
    return ranked[0].proposal if ranked else result.best
