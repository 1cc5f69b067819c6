"""From a schedule to what an executor runs: reduced waits and safe frees, both by vector clocks.

The clock of lane ``s`` says, for every lane, how many of its operators are known to be finished when the next operator
of ``s`` starts. A wait is issued only where the lane does not know yet. A storage is dropped at the first host step at
which its *allocating lane* has waited for every use of it: only then may the allocator hand the block to that lane's next
operator without a race. Dropping it when its last consumer has merely been launched is the classic silent error.
"""

from __future__ import annotations

import enum
import heapq
from dataclasses import dataclass

from autosched.core.graph import OpGraph, ValueRole
from autosched.core.schedule import Schedule, require_legal


class FreeRule(enum.StrEnum):
    """When an intermediate's memory is given back."""

    VECTOR_CLOCK = "vector_clock"  # production: once its lane has waited for all users
    HOLD_ALL = "hold_all"  # audit and debugging: at the end of the run
    LAST_LAUNCH = "last_launch"  # wrong across lanes; exists so that tests can show it is caught


@dataclass(frozen=True, slots=True)
class Step:
    """Launch one operator.

    Args:
        operator, lane, width, priority, variant: as in the schedule.
        waits: operators on other lanes whose event this lane waits for first.
        records: whether another lane waits for this operator.
        frees: values dropped right after the launch, each allocated on this lane.
    """

    operator: int
    lane: int
    width: int
    priority: int
    variant: int
    waits: tuple[int, ...]
    records: bool
    frees: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in launch order. ``lanes`` counts lane slots; ``held`` are values that live to the end of the run."""

    graph_hash: str
    lanes: int
    steps: tuple[Step, ...]
    held: tuple[int, ...]

    def of_lane(self, lane: int) -> tuple[Step, ...]:
        """The steps of one lane, in order."""
        return tuple(step for step in self.steps if step.lane == lane)


def make_plan(graph: OpGraph, schedule: Schedule, rule: FreeRule = FreeRule.VECTOR_CLOCK) -> Plan:
    """Compute waits and frees.

    Raises:
        IllegalSchedule: if the schedule is not legal for the graph.
    """
    require_legal(graph, schedule)
    lanes = schedule.lane_slots
    direct: list[list[int]] = [list(before) for before in graph.predecessors]
    for first, last in schedule.extra_edges:
        direct[last].append(first)

    position: dict[int, int] = {}  # operator -> its 1-based place on its lane
    clocks = [[0] * lanes for _ in range(lanes)]  # what each lane has absorbed
    finished: list[list[int]] = [[] for _ in range(len(graph))]  # clock that follows from an operator being finished
    waits: dict[int, tuple[int, ...]] = {}
    recorded: set[int] = set()
    tracker = _FreeTracker(graph, schedule, rule)
    frees: dict[int, tuple[int, ...]] = {}
    for index in schedule.order:
        lane = schedule.lane[index]
        clock = clocks[lane]
        chosen: list[int] = []
        # The latest of each lane suffices, and what it implies may make others needless.
        foreign = sorted((item for item in set(direct[index]) if schedule.lane[item] != lane), key=lambda item: -_rank(finished[item]))
        for before in foreign:
            if clock[schedule.lane[before]] < position[before]:
                chosen.append(before)
                _absorb(clock, finished[before])
        waits[index] = tuple(sorted(chosen))
        recorded.update(chosen)
        # In-order lane: the next operator on it starts after this one.
        clock[lane] += 1
        position[index] = clock[lane]
        finished[index] = list(clock)
        frees[index] = tracker.launch(index, clock, position)
    steps = tuple(
        Step(
            index,
            schedule.lane[index],
            schedule.width[index],
            schedule.priority[index],
            schedule.variant[index],
            waits[index],
            index in recorded,
            frees[index],
        )
        for index in schedule.order
    )
    dropped = {value for items in frees.values() for value in items}
    held = tuple(value.index for value in graph.values if value.role is ValueRole.INTERMEDIATE and value.index not in dropped)
    return Plan(graph.hash, lanes, steps, held)


def _rank(clock: list[int]) -> int:
    return sum(clock)


def _absorb(clock: list[int], other: list[int]) -> None:
    for lane, count in enumerate(other):
        if count > clock[lane]:
            clock[lane] = count


class _FreeTracker:
    """Which storages may be dropped, lane by lane, as operators are launched."""

    def __init__(self, graph: OpGraph, schedule: Schedule, rule: FreeRule) -> None:
        self._schedule = schedule
        self._rule = rule
        outputs = {graph.values[value].storage for value in graph.outputs}
        self._uses: dict[int, tuple[int, ...]] = {}
        self._members: dict[int, list[int]] = {}
        for value in graph.values:
            if value.role is ValueRole.INTERMEDIATE:
                self._members.setdefault(value.storage, []).append(value.index)
        # Memory of inputs, constants and outputs is never ours to give back; a storage owned by an internal value is.
        for storage, uses in graph.storage_uses.items():
            owner = graph.values[storage]
            if owner.role in (ValueRole.INTERMEDIATE, ValueRole.INTERNAL) and storage not in outputs:
                self._uses[storage] = uses
        self._pending: dict[int, list[int]] = {}  # allocating lane -> storages whose users are all launched
        # By allocating lane, and by the lane of a user that it has not waited for: that user's place there, and the storage. A lane that
        # never waits for another holds thousands; they are not to be gone through at each launch.
        self._held_up: dict[int, dict[int, list[tuple[int, int]]]] = {}
        self._remaining = {storage: len(uses) for storage, uses in self._uses.items()}
        self._of_operator: dict[int, list[int]] = {}
        for storage, uses in self._uses.items():
            for index in uses:
                self._of_operator.setdefault(index, []).append(storage)

    def launch(self, index: int, clock: list[int], position: dict[int, int]) -> tuple[int, ...]:
        """Record that ``index`` is launched; return the values whose memory its lane may reuse afterwards."""
        lane = self._schedule.lane[index]
        for storage in self._of_operator.get(index, ()):
            self._remaining[storage] -= 1
            if self._remaining[storage] == 0:
                allocator = self._schedule.lane[self._uses[storage][0]]
                self._pending.setdefault(lane if self._rule is FreeRule.LAST_LAUNCH else allocator, []).append(storage)
        if self._rule is FreeRule.HOLD_ALL:
            return ()
        freed: list[int] = []
        for storage in self._due(lane, clock):
            user = None if self._rule is FreeRule.LAST_LAUNCH else self._not_absorbed(storage, clock, position)
            if user is None:
                freed += self._members.get(storage, [])
            else:
                held_up = self._held_up.setdefault(lane, {}).setdefault(self._schedule.lane[user], [])
                heapq.heappush(held_up, (position[user], storage))
        return tuple(sorted(freed))

    def _due(self, lane: int, clock: list[int]) -> list[int]:
        """The storages of ``lane`` that may have become free: new ones, and those whose user ``clock`` was short of."""
        found = self._pending.pop(lane, [])
        for user_lane, held_up in self._held_up.get(lane, {}).items():
            while held_up and held_up[0][0] <= clock[user_lane]:
                found.append(heapq.heappop(held_up)[1])
        return found

    def _not_absorbed(self, storage: int, clock: list[int], position: dict[int, int]) -> int | None:
        """A user of the storage that whatever follows on the lane of ``clock`` need not come after; ``None`` if there is none."""
        for user in self._uses[storage]:
            # On this lane none is: whatever follows on it runs after the operator just launched, too.
            if clock[self._schedule.lane[user]] < position[user]:
                return user
        return None
