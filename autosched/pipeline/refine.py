"""The device loop on a session: every schedule is proved before its first timing, and what was measured corrects the model."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autosched.config import Budget
from autosched.core.errors import NoFeasibleCandidate
from autosched.core.progress import Progress
from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule, canonical_key
from autosched.device.base import Comparison, Session
from autosched.pipeline.candidates import Candidate, make_candidate, prove
from autosched.pipeline.measuring import Ledger
from autosched.pipeline.references import References
from autosched.search.correction import Trace
from autosched.search.loop import LoopState, search_on_device
from autosched.search.problem import Problem
from autosched.search.strategy import SearchContext

TUNED = "tuned"
_TRACE_ROUNDS = 5


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
        verdicts = [self._refutation(schedule) for schedule in schedules]
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

    def _refutation(self, schedule: Schedule) -> Failure | None:
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
) -> list[Candidate]:
    """Search and measure in turns until ``deadline`` (``time.monotonic``); returns the best schedule found, named ``tuned``.

    ``proved`` schedules are in the first round whatever the model says of them. New proofs are added to ``proofs``.
    """
    limits = session.limits
    bench = SessionBench(session, problem, references, proofs, ledger)
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
    given = [_Given(candidate.name, candidate.is_baseline, candidate.schedule) for candidate in proved]
    try:
        result = search_on_device(problem, bench, context, settings, strategies=given, progress=tell)
    except NoFeasibleCandidate as error:
        ledger.notes.append(f"the device loop found nothing: {error}")
        return []
    return [make_candidate(problem, TUNED, False, result.best.schedule, lanes_matter=limits.lanes_matter)]
