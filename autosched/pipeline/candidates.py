"""What goes to the device: the schedules that strategies propose, each once, each proved before it is timed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from autosched.core.errors import IllegalSchedule
from autosched.core.graph import OpGraph
from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule, canonical_key, violations
from autosched.device.base import Comparison, Session
from autosched.device.worker_child import describe
from autosched.pipeline.graph_proofs import audit_capture
from autosched.pipeline.overrun import Overrun, ended_at
from autosched.pipeline.references import References
from autosched.runtime.plan import make_plan
from autosched.search.problem import Problem
from autosched.search.simulate import simulate
from autosched.search.strategy import STRATEGIES, SearchContext
from autosched.verify.legality import plan_violations

_log = logging.getLogger(__name__)

_OVERRUN_S = 60.0
"""How long a strategy may go on when its time is up. Published heuristics do not look at the clock, and take seconds of a large graph."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule under the name of the strategy that proposed it; ``predicted_us`` is the simulator's makespan."""

    name: str
    is_baseline: bool
    schedule: Schedule
    key: str
    predicted_us: float


def propose(
    problem: Problem, names: Sequence[str], context: SearchContext, *, lanes_matter: bool
) -> tuple[list[Candidate], dict[str, Failure]]:
    """A baseline's variants and a search's best, for each name. A strategy that breaks or hangs is a failure, not the end of the job.

    Each has an equal part of the time that those before it have left: one that takes all it is given leaves the others theirs.
    """
    found: list[Candidate] = []
    failures: dict[str, Failure] = {}
    for place, name in enumerate(names):
        if name not in STRATEGIES.names():
            STRATEGIES.get(name)  # which raises: a misspelt name is the caller's mistake
        share = context.share(context.max_evaluations, seconds_share=1.0 / (len(names) - place))
        try:
            found += _proposals(problem, name, share, lanes_matter=lanes_matter)
        except Exception as error:  # a plugin's strategy must not end a tuning job
            _log.warning("strategy %s failed: %s", name, error)
            failures[name] = describe(error)
        except Overrun:
            failures[name] = Failure(FailureKind.TIMEOUT, f"it had not ended {_OVERRUN_S:.0f} s after its time was up")
            _log.warning("strategy %s failed: %s", name, failures[name].detail)
    return found, failures


def _proposals(problem: Problem, name: str, context: SearchContext, *, lanes_matter: bool) -> list[Candidate]:
    strategy = STRATEGIES.get(name)
    with ended_at(None if context.deadline_s is None else context.deadline_s + _OVERRUN_S):
        schedules = list(strategy.propose(problem, context))
    if not schedules:
        raise IllegalSchedule("it proposed none; expected at least one schedule")
    # A published scheduler counts with each of its documented variants (Opara's two launch orders), a search with its best.
    chosen = schedules if strategy.is_baseline else schedules[:1]
    for schedule in chosen:
        # Compiled code predicts their makespans, and checks nothing.
        if illegal := violations(problem.graph, schedule):
            raise IllegalSchedule("; ".join(illegal[:3]))
    return [
        make_candidate(problem, name if place == 0 else f"{name}_{place + 1}", strategy.is_baseline, schedule, lanes_matter=lanes_matter)
        for place, schedule in enumerate(chosen)
    ]


def make_candidate(problem: Problem, name: str, is_baseline: bool, schedule: Schedule, *, lanes_matter: bool) -> Candidate:
    """Name a schedule and predict its makespan."""
    key = canonical_key(problem.graph, schedule, lanes_matter=lanes_matter)
    return Candidate(name, is_baseline, schedule, key, simulate(problem, schedule).makespan_us)


def prove(session: Session, graph: OpGraph, schedule: Schedule, references: References) -> Comparison | Failure:
    """Legality, hazards of its plan by an independent oracle, the captured graph if there is one, its numbers on every input set."""
    illegal = violations(graph, schedule)
    if not illegal:
        illegal = plan_violations(graph, schedule, make_plan(graph, schedule))
    if illegal:
        return Failure(FailureKind.ILLEGAL, "; ".join(illegal[:3]))
    if (unsound := audit_capture(session, graph, schedule)) is not None:
        return unsound
    answer = session.compare(schedule, references.inputs, references.outputs)
    if isinstance(answer, Failure):
        return answer
    if not answer.within_tolerance:
        return Failure(
            FailureKind.MISMATCH, f"differs from the original model by up to {answer.max_abs_error:.3g}, beyond its dtype's tolerance"
        )
    if not answer.bitwise:
        return Failure(
            FailureKind.MISMATCH, "differs bitwise from the same operators on one lane: a race, or an operator that is not deterministic"
        )
    return answer


def by_key(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """Candidates that are the same program on the device, under one key."""
    groups: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.key, []).append(candidate)
    return groups
