"""Race amplification: which delays make a missing edge, or memory used again too early, a mismatch that is always seen.

An edge that is missing shows only if the operator before it really ends late. So every operator is held back, in some capture, for
longer than a whole undisturbed run takes: on one lane at a time, and in random groups. Between replays all memory that
nobody holds is poisoned, and the inputs change, so that neither stale nor leftover values can pass.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from autosched.core.graph import OpGraph
from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule
from autosched.device.cuda.stress import DelaySet, StressOutcome

# Longest sum of delays in one capture, as a multiple of an undisturbed run: bounds the time of a replay.
_MOST_STALL = 12.0
_SHORTEST_US = 50.0
_LARGEST_GROUP = 8
_MOST_GROUPS = 16
_DELAYED_REPLAYS = 2


class Stressable(Protocol):
    """A session that can replay a schedule under delays (the CUDA device's)."""

    def replay_us(self, schedule: Schedule) -> float | Failure:
        """Time of one undisturbed replay, microseconds."""

    def stressed(self, schedule: Schedule, delay_sets: Sequence[DelaySet], *, replays: int) -> list[StressOutcome | Failure]:
        """Capture and replay with each delay set, unused memory poisoned, inputs changing, compared bitwise with one stream."""


@dataclass(frozen=True, slots=True)
class StressReport:
    """Captures and replays done, and one line for each capture that gave other outputs."""

    captures: int
    replays: int
    problems: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether every replay gave the reference's bits."""
        return not self.problems


def plan_delays(graph: OpGraph, schedule: Schedule, makespan_us: float, rng: random.Random) -> list[DelaySet]:
    """Which operators to hold back in which capture: each lane as a whole, then random groups that cover every operator.

    Args:
        makespan_us: of an undisturbed run; the delays of a group on one lane add up, all of them to at least that long.
    """
    delay_us = max(_SHORTEST_US, makespan_us)
    sets: list[DelaySet] = []
    lanes: dict[int, list[int]] = {}
    for operator in schedule.order:
        lanes.setdefault(schedule.lane[operator], []).append(operator)
    if len(lanes) > 1:
        for operators in lanes.values():
            each_us = max(_SHORTEST_US, min(delay_us, _MOST_STALL * delay_us / len(operators)))
            sets.append(DelaySet(tuple((operator, each_us) for operator in operators)))
        shuffled = rng.sample(range(len(graph)), len(graph))
        size = max(_LARGEST_GROUP, -(-len(graph) // _MOST_GROUPS))
        for begin in range(0, len(shuffled), size):
            group = shuffled[begin : begin + size]
            each_us = max(_SHORTEST_US, min(delay_us, _MOST_STALL * delay_us / len(group)))
            sets.append(DelaySet(tuple((operator, each_us) for operator in sorted(group))))
    return sets


def stress(session: Stressable, graph: OpGraph, schedule: Schedule, *, rng: random.Random, replays: int = 100) -> StressReport | Failure:
    """Replay ``schedule`` undisturbed ``replays`` times, then a few times under each delay set.

    Returns:
        A report; or the failure of the first capture that could not be made.
    """
    makespan_us = session.replay_us(schedule)
    if isinstance(makespan_us, Failure):
        return makespan_us
    delayed = plan_delays(graph, schedule, makespan_us, rng)
    plain = session.stressed(schedule, [DelaySet(())], replays=replays)
    outcomes = session.stressed(schedule, delayed, replays=_DELAYED_REPLAYS) if delayed else []
    return judge_outcomes(graph, [DelaySet(()), *delayed], [*plain, *outcomes])


def judge_outcomes(graph: OpGraph, delay_sets: Sequence[DelaySet], outcomes: Iterable[StressOutcome | Failure]) -> StressReport | Failure:
    """Add up what each capture gave."""
    captures = replays = 0
    problems: list[str] = []
    for delay_set, outcome in zip(delay_sets, outcomes, strict=True):
        if isinstance(outcome, Failure):
            return Failure(FailureKind(outcome.kind), f"race stress could not run: {outcome.detail}")
        captures += 1
        replays += outcome.replays
        if outcome.mismatches:
            held = ", ".join(graph.operators[operator].name for operator, _ in delay_set.delays[:4]) or "nothing"
            problems.append(f"{outcome.mismatches} of {outcome.replays} replays differ from one stream, with {held} held back")
    return StressReport(captures, replays, tuple(problems))
