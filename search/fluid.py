"""The fluid simulation in plain Python: the reference that the compiled twin must equal.

Operators on one lane run in launch order. Running operator ``a`` advances at rate ``1 / S(a)`` with
``S(a) = 1 + sum over b beside it of (slowdown of a by b - 1)``, where the slowdown is ``slowdown_first`` if ``a`` started before
``b`` and ``slowdown_last`` if it started after. The sum is exact for processor sharing (k equal saturating operators: ``S = k``).
Where three or more that run want more room than the device has (``CostTable.room``), the earlier ones have it: the excesses are weighed
by, and ``S`` is divided by, the part that each gets (``costmodel/composition.py`` has the formula, and composes groups the same way).
An operator starts at the latest of: its lane's last end plus the launch gap, the end of each predecessor on its lane, and the end of
each predecessor elsewhere plus the cross-lane latency. Extra edges count as predecessors. If another operator runs at that moment, it
starts ``concurrent_gap_us`` later.

On a CPU, threads that do no work disturb those that do. A lane that waits asks for up to ``polling_us`` whether it may go on, each time
with the interpreter's lock, which an operator on another lane needs at its end: it ends ``cross_lane_us`` later, for its own lane too, and
the waiting lane goes on at once. Who slept is woken, and goes on ``cross_lane_us`` after the end. And the helper threads of an operator of
several threads keep spinning for ``team_spin_us`` after it: all that runs beside them shares the cores with them. Where the lanes are the
threads of one team (``CostTable.one_team``) there are no helpers: an operator wider than the first width runs alone, as if it had edges
from everything launched before it and to everything launched after it (``Problem.team_waits``).

The state between two events is a value that can be copied: a beam search extends *prefix states* and never simulates a prefix twice.

Source: additive excess after processor sharing; the leftover policy makes who starts first matter (Amert et al., "GPU Scheduling on the
NVIDIA TX2", RTSS 2017, section III).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autosched.core.schedule import Schedule
from autosched.search.compiled.layout import MIN_SLOWDOWN
from autosched.search.problem import Problem


@dataclass(frozen=True, slots=True)
class Simulation:
    """One simulated run. Times in microseconds from the start of the run; ``makespan_us`` includes the fixed cost."""

    makespan_us: float
    start_us: tuple[float, ...]
    end_us: tuple[float, ...]


@dataclass(slots=True)
class _Slot:
    """What a lane holds: an operator waiting for its start time, or running."""

    operator: int
    kernel: int
    rank: int  # place in the launch order; breaks ties
    start_us: float
    remaining_us: float
    slowdown: float = 1.0
    sequence: int = -1  # place among all starts; -1 while it waits, -2 once it was put off


@dataclass(slots=True)
class FluidState:
    """A simulated prefix: time, what runs, what is finished. ``copy`` gives an independent one."""

    problem: Problem
    lanes: int
    time_us: float = 0.0
    started: int = 0
    slots: list[_Slot | None] = field(default_factory=list)
    lane_free_us: list[float] = field(default_factory=list)  # -1 while the lane has run nothing
    end_us: list[float] = field(default_factory=list)
    start_us: list[float] = field(default_factory=list)
    lane_of: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    short: bool = False  # whether one of those that run gets less room than it would beside one other
    spin_until_us: float = -1.0  # helper threads of a wide operator that is done
    spin_room: float = 0.0
    crowd: float = 1.0  # how many times slower what runs is for them

    def __post_init__(self) -> None:
        count = self.problem.count
        self.slots = [None] * self.lanes
        self.lane_free_us = [-1.0] * self.lanes
        self.end_us = [-1.0] * count
        self.start_us = [-1.0] * count
        self.lane_of = [-1] * count
        self.pending = [int(item) for item in self.problem.pred_ptr[1:] - self.problem.pred_ptr[:-1]]

    def copy(self) -> FluidState:
        """An independent state that goes on from here."""
        twin = FluidState(self.problem, self.lanes, self.time_us, self.started, short=self.short)
        twin.spin_until_us, twin.spin_room, twin.crowd = self.spin_until_us, self.spin_room, self.crowd
        twin.slots = [
            None
            if slot is None
            else _Slot(slot.operator, slot.kernel, slot.rank, slot.start_us, slot.remaining_us, slot.slowdown, slot.sequence)
            for slot in self.slots
        ]
        for name in ("lane_free_us", "end_us", "start_us", "lane_of", "pending"):
            setattr(twin, name, list(getattr(self, name)))
        return twin

    def place(self, operator: int, lane: int, width_index: int, rank: int, waits: tuple[int, ...] = ()) -> None:
        """Put ``operator`` on the idle ``lane``; everything it waits for must be finished."""
        gap_us = float(self.problem.latency_us[0])
        start = 0.0
        if self.lane_free_us[lane] >= 0.0:
            start = self.lane_free_us[lane] + gap_us
        for before in (*self.problem.predecessors(operator), *waits):
            ready = self.end_us[before]
            if self.lane_of[before] != lane:
                ready = self._arrival_us(ready, lane)
            start = max(start, ready)
        kernel = int(self.problem.kernel[operator, width_index])
        self.slots[lane] = _Slot(operator, kernel, rank, start, float(self.problem.solo_us[kernel]))
        self.lane_of[operator] = lane

    def advance(self) -> int:
        """Go to the next event. Returns the operator that finished, or -1 if one started or was put off.

        Finishes come before starts at the same time; equal starts, and equal finishes, in launch order.

        Raises:
            RuntimeError: if nothing is placed.
        """
        best_us, best_lane, best_kind, best_rank = math.inf, -1, 2, 0
        for lane, slot in enumerate(self.slots):
            if slot is None:
                continue
            if slot.sequence < 0:
                when, kind = slot.start_us, 1
            else:
                when, kind = self.time_us + slot.remaining_us * self._pace(slot), 0
            if when < best_us or (when == best_us and (kind, slot.rank) < (best_kind, best_rank)):
                best_us, best_lane, best_kind, best_rank = when, lane, kind, slot.rank
        chosen = self.slots[best_lane]
        if chosen is None:
            raise RuntimeError("nothing is placed; place an operator before advancing")
        passed_us = best_us - self.time_us
        if passed_us > 0.0:
            for slot in self.slots:
                if slot is not None and slot.sequence >= 0:
                    slot.remaining_us = max(0.0, slot.remaining_us - passed_us / self._pace(slot))
            self.time_us = best_us
        if best_kind == 1:
            put_off_us = float(self.problem.latency_us[3])
            if put_off_us > 0.0 and chosen.sequence == -1 and any(slot is not None and slot.sequence >= 0 for slot in self.slots):
                chosen.start_us += put_off_us
                chosen.sequence = -2
            else:
                self._start(chosen)
            return -1
        self._finish(chosen, best_lane)
        return chosen.operator

    def _start(self, chosen: _Slot) -> None:
        problem = self.problem
        running = self._running()
        for slot in running:
            chosen.slowdown += float(problem.excess_last[chosen.kernel, slot.kernel])
            slot.slowdown += float(problem.excess_first[slot.kernel, chosen.kernel])
        chosen.sequence = self.started
        self.started += 1
        self.start_us[chosen.operator] = self.time_us
        self._share_room([*running, chosen])
        if self._is_wide(chosen.kernel):
            self.spin_until_us = -1.0
        self.crowd = self._crowding()

    def _finish(self, chosen: _Slot, lane: int) -> None:
        problem = self.problem
        self.slots[lane] = None
        running = self._running()
        for slot in running:
            excess = problem.excess_first if slot.sequence < chosen.sequence else problem.excess_last
            slot.slowdown -= float(excess[slot.kernel, chosen.kernel])
        if len(running) == 1:
            running[0].slowdown = 1.0  # adding and subtracting must leave no dust
        self._share_room(running)
        ended_us = self.time_us + self._lateness_us(lane)
        self.end_us[chosen.operator] = ended_us
        self.lane_free_us[lane] = ended_us
        if self._is_wide(chosen.kernel):
            self.spin_until_us = self.time_us + float(problem.latency_us[5])
            self.spin_room = float(problem.room[chosen.kernel]) - float(problem.latency_us[6])
        self.crowd = self._crowding()
        for after in problem.successors(chosen.operator):
            self.pending[after] -= 1

    def _arrival_us(self, end_us: float, lane: int) -> float:
        """When a lane that waits may go on after an operator elsewhere: awake it saw the end at once, else it is woken."""
        cross_us, polling_us = float(self.problem.latency_us[1]), float(self.problem.latency_us[4])
        awake = polling_us > 0.0 and end_us - self.lane_free_us[lane] < polling_us
        return end_us if awake else end_us + cross_us

    def _lateness_us(self, own_lane: int) -> float:
        """By how much the operator that finishes now ends late, because a lane that has run something polls.

        Whether a lane has anything left is not asked: a prefix does not know, and its twin is to say the same.
        """
        gap_us, cross_us, _, _, polling_us = self.problem.latency_us[:5].tolist()
        if self.started == self.problem.count:
            return 0.0  # nobody has anything to wait for
        idle_us = [
            self.time_us - free_us
            for lane, (slot, free_us) in enumerate(zip(self.slots, self.lane_free_us, strict=True))
            if lane != own_lane and free_us >= 0.0 and not (slot is not None and slot.sequence >= 0)
        ]
        return float(cross_us) if any(gap_us < idle < polling_us for idle in idle_us) else 0.0

    def _is_wide(self, kernel: int) -> bool:
        """Whether a kernel has helper threads that spin after it."""
        spin_us, thread = float(self.problem.latency_us[5]), float(self.problem.latency_us[6])
        return spin_us > 0.0 and float(self.problem.room[kernel]) > 1.5 * thread

    def _crowding(self) -> float:
        """How many times slower what runs is for helper threads that spin: threads over cores, beyond what those that run share already."""
        if self.time_us >= self.spin_until_us:
            return 1.0
        wanted = 0.0
        for slot in self._running():
            wanted += float(self.problem.room[slot.kernel])
        return max(1.0, (wanted + self.spin_room) / max(1.0, wanted))

    def _pace(self, slot: _Slot) -> float:
        """How many times slower than alone a running operator advances."""
        return max(slot.slowdown, MIN_SLOWDOWN) * self.crowd

    def _running(self) -> list[_Slot]:
        """What has started and not finished, in order of start: the compiled twin adds up in this order, on which the last bit depends."""
        return sorted((slot for slot in self.slots if slot is not None and slot.sequence >= 0), key=lambda slot: slot.sequence)

    def _share_room(self, running: list[_Slot]) -> None:
        """Where one of these gets less room than it would beside one other, set all slowdowns by what each gets; else leave the sums."""
        problem = self.problem
        part = problem.shares(slot.kernel for slot in running)
        was_short, self.short = self.short, min(part, default=1.0) < 1.0
        if not (self.short or was_short):
            return
        for place, slot in enumerate(running):
            total = 1.0
            for other_place, other in enumerate(running):
                if other is not slot:
                    excess = problem.excess_last if other_place < place else problem.excess_first
                    total += part[other_place] * float(excess[slot.kernel, other.kernel])
            slot.slowdown = total / part[place]


def simulate(problem: Problem, schedule: Schedule) -> Simulation:
    """Run a legal schedule.

    Raises:
        UsageError: if the schedule uses a width that was not costed.
    """
    width_index = problem.width_indices(schedule)
    waits = [list(team) for team in problem.team_waits(schedule.order, width_index)]
    for before, after in schedule.extra_edges:
        waits[after].append(before)
    waiters: list[list[int]] = [[] for _ in range(problem.count)]
    for after, awaited in enumerate(waits):
        for before in awaited:
            waiters[before].append(after)
    rank = {operator: place for place, operator in enumerate(schedule.order)}
    queues: list[list[int]] = [[] for _ in range(schedule.lane_slots)]
    for operator in reversed(schedule.order):
        queues[schedule.lane[operator]].append(operator)
    state = FluidState(problem, schedule.lane_slots)
    for after, awaited in enumerate(waits):
        state.pending[after] += len(awaited)
    finished = 0
    while finished < problem.count:
        for lane, queue in enumerate(queues):
            if queue and state.slots[lane] is None and state.pending[queue[-1]] == 0:
                operator = queue.pop()
                state.place(operator, lane, int(width_index[operator]), rank[operator], tuple(waits[operator]))
        operator = state.advance()
        if operator >= 0:
            finished += 1
            for after in waiters[operator]:
                state.pending[after] -= 1
    fixed_us = float(problem.latency_us[2])
    return Simulation(state.time_us + fixed_us, tuple(state.start_us), tuple(state.end_us))
