"""Small changes of one schedule, for a search on the device: the moves of annealing as values, so that one can be made again elsewhere.

*Source:* as ``anneal``.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field

import numpy as np

from autosched.core.schedule import Schedule
from autosched.search.problem import Problem


class Kind(enum.Enum):
    """What a move changes."""

    EXCHANGE = "two operators change places and lanes"
    PLACE = "an operator is launched just before another one, on a lane"
    LANE = "an operator goes to another lane"
    TAILS = "from an operator on, its lane and another one change names"
    WAIT = "an operator waits for one more"
    FREE = "an operator no longer waits for one that it does not need"


@dataclass(frozen=True, slots=True)
class Move:
    """A change that can be made to any schedule of the graph; ``other`` is an operator, ``lane`` a lane, where ``kind`` names one."""

    kind: Kind
    operator: int
    other: int = -1
    lane: int = -1


# How often each kind is drawn: as ``anneal.MoveWeights``, waits less, for each one is an edge that the device has to honour.
_KINDS = (Kind.EXCHANGE, Kind.PLACE, Kind.LANE, Kind.TAILS, Kind.WAIT, Kind.FREE)
_SHARES = (0.45, 0.30, 0.15, 0.05, 0.03, 0.02)
_NEAR = 0.5  # share of moves within a few places


@dataclass(slots=True)
class Neighbours:
    """Draws moves of schedules of ``problem`` and makes them; widths, variants and priorities stay as they are.

    Args:
        problem: whose schedules.
        lanes: most lanes to use.
        rng: the only source of chance.
    """

    problem: Problem
    lanes: int
    rng: np.random.Generator
    _before: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self._before = [self.problem.predecessors(index) for index in range(self.problem.count)]

    def draw(self, schedule: Schedule) -> Move:
        """A move of ``schedule`` by chance, which may turn out to be none, or not to be legal."""
        rng, count = self.rng, len(schedule.order)
        kind = _KINDS[int(np.searchsorted(np.cumsum(_SHARES), rng.random()))]
        if kind is Kind.FREE and schedule.extra_edges:
            before, after = schedule.extra_edges[int(rng.integers(len(schedule.extra_edges)))]
            return Move(kind, after, before)
        place = int(rng.integers(count))
        reach = min(3 * self.lanes, count) if rng.random() < _NEAR else count
        there = min(max(place + int(rng.integers(-reach, reach + 1)), 0), count - 1)
        lane = int(rng.integers(self.lanes))
        if kind is Kind.PLACE and rng.random() < 0.5:
            lane = schedule.lane[schedule.order[place]]
        if kind is Kind.WAIT:
            place, there = max(place, there), min(place, there)
        return Move(kind, schedule.order[place], schedule.order[there], lane)

    def make(self, schedule: Schedule, move: Move) -> Schedule | None:
        """The schedule after ``move``; None if it changes nothing, or would be none that computes what the graph says."""
        order, lane, edges = list(schedule.order), list(schedule.lane), set(schedule.extra_edges)
        operator, other = move.operator, move.other
        if move.kind in (Kind.EXCHANGE, Kind.PLACE) and operator == other:
            return None
        if move.kind is Kind.EXCHANGE:
            here, there = order.index(operator), order.index(other)
            order[here], order[there] = other, operator
            lane[operator], lane[other] = lane[other], lane[operator]
        elif move.kind is Kind.PLACE:
            order.remove(operator)
            order.insert(order.index(other), operator)
            lane[operator] = move.lane
        elif move.kind is Kind.LANE:
            lane[operator] = move.lane
        elif move.kind is Kind.TAILS:
            names = {lane[operator]: move.lane, move.lane: lane[operator]}
            for index in order[order.index(operator) :]:
                lane[index] = names.get(lane[index], lane[index])
        elif move.kind is Kind.WAIT:
            edges.add((other, operator))
        else:
            edges.discard((other, operator))
        if not self._is_legal(order, edges):
            return None
        problem = self.problem
        changed = problem.schedule(order, lane, width_index=problem.width_indices(schedule), extra_edges=sorted(edges))
        changed = dataclasses.replace(changed, priority=schedule.priority, variant=schedule.variant)
        return changed if changed != schedule else None

    def _is_legal(self, order: list[int], edges: set[tuple[int, int]]) -> bool:
        place = {operator: number for number, operator in enumerate(order)}
        if any(place[before] >= place[after] for before, after in edges):
            return False
        return all(place[item] < place[operator] for operator in order for item in self._before[operator])
