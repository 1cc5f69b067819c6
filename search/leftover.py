"""The block-level simulation: thread blocks of kernels that started earlier are dispatched first, later kernels get what is left over.

Finer than the fluid: a kernel is ``blocks`` thread blocks of which at most ``capacity`` fit on the device at once. A block takes
``1 / capacity`` of the device's room. While the resident blocks' demand for arithmetic (or for memory bandwidth) exceeds the device,
each block advances at ``1 / (1 + stall_compute * (C - 1) + stall_bandwidth * (M - 1))``, with ``C`` and ``M`` the summed demands, only
where above 1. Blocks dispatched at one time are one cohort. Lanes, waits and latencies are those of the fluid simulation.

*Source:* the leftover policy as observed by Amert et al., "GPU Scheduling on the NVIDIA TX2", RTSS 2017, sections III and IV; the
saturation terms are this project's and are fitted, not proven.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autosched.core.errors import UsageError
from autosched.core.schedule import Schedule
from autosched.search.compiled import layout
from autosched.search.compiled.layout import ROOM_DUST
from autosched.search.fluid import Simulation
from autosched.search.problem import Floats, Ints, Problem
from autosched.search.simulate import split_waits

COHORTS = 8
"""Cohorts followed for each running kernel; later ones join the youngest, with the mean of what is left."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockKernels:
    """What the block simulation knows of each row of ``Problem.solo_us``. All arrays ``[n_kernels]``.

    Args:
        blocks: int32, thread blocks, at least 1.
        capacity: int32, blocks that fit on the idle device, at least 1.
        block_us: float64, time of one block when nothing is saturated, microseconds.
        compute, bandwidth: float64, share of the device's arithmetic and memory bandwidth that one block demands.
        stall_compute, stall_bandwidth: float64, how much of an excess demand a block feels (0 to 1).
    """

    blocks: Ints
    capacity: Ints
    block_us: Floats
    compute: Floats
    bandwidth: Floats
    stall_compute: Floats
    stall_bandwidth: Floats

    def __post_init__(self) -> None:
        if (self.blocks < 1).any() or (self.capacity < 1).any():
            raise UsageError("blocks and capacity must be at least 1; drop kernels that launch nothing")

    @property
    def arrays(self) -> tuple[Ints, Ints, Floats, Floats, Floats, Floats, Floats]:
        """The arrays the compiled twin takes, in its order."""
        return (
            self.blocks, self.capacity, self.block_us, self.compute, self.bandwidth, self.stall_compute, self.stall_bandwidth,
        )  # fmt: skip


@dataclass(slots=True)
class _Running:
    operator: int
    row: int
    rank: int
    start_us: float
    left: int  # blocks not yet dispatched
    sequence: int
    counts: list[int]
    remaining_us: list[float]


class _Device:
    """The resident blocks and the clock."""

    def __init__(self, kernels: BlockKernels, lanes: int) -> None:
        self.kernels = kernels
        self.lanes: list[_Running | None] = [None] * lanes
        self.time_us = 0.0
        self.started = 0

    def stalls(self) -> tuple[float, float]:
        """Demand above the device's arithmetic and bandwidth."""
        compute = bandwidth = 0.0
        for kernel in self.lanes:
            if kernel is not None:
                for count in kernel.counts:
                    compute += count * float(self.kernels.compute[kernel.row])
                    bandwidth += count * float(self.kernels.bandwidth[kernel.row])
        return max(0.0, compute - 1.0), max(0.0, bandwidth - 1.0)

    def slowdown(self, row: int, stalls: tuple[float, float]) -> float:
        """How much longer a block of ``row`` takes now."""
        return 1.0 + float(self.kernels.stall_compute[row]) * stalls[0] + float(self.kernels.stall_bandwidth[row]) * stalls[1]

    def dispatch(self) -> None:
        """Fill the free room, earliest start first; nobody overtakes a kernel that still has blocks to dispatch."""
        used = 0.0
        for kernel in self.lanes:
            if kernel is not None:
                for count in kernel.counts:
                    used += count / float(self.kernels.capacity[kernel.row])
        started = [kernel for kernel in self.lanes if kernel is not None and kernel.sequence >= 0]
        for kernel in sorted(started, key=lambda item: item.sequence):
            if kernel.left == 0:
                continue
            capacity = float(self.kernels.capacity[kernel.row])
            room = math.floor((1.0 - used) * capacity + ROOM_DUST)
            taken = min(kernel.left, max(0, room))
            if taken > 0:
                kernel.left -= taken
                used += taken / capacity
                block_us = float(self.kernels.block_us[kernel.row])
                if len(kernel.counts) < COHORTS:
                    kernel.counts.append(taken)
                    kernel.remaining_us.append(block_us)
                else:
                    both = kernel.counts[-1] + taken
                    kernel.remaining_us[-1] = (kernel.remaining_us[-1] * kernel.counts[-1] + block_us * taken) / both
                    kernel.counts[-1] = both
            if kernel.left > 0:
                return

    def next_event(self) -> tuple[float, int, int, int]:
        """Time, kind (0 a cohort ends, 1 a kernel starts), lane and cohort of the next event."""
        best = (math.inf, 2, 0)
        place = (-1, -1)
        stalls = self.stalls()
        for lane, kernel in enumerate(self.lanes):
            if kernel is None:
                continue
            if kernel.sequence < 0:
                if (kernel.start_us, 1, kernel.rank) < best:
                    best, place = (kernel.start_us, 1, kernel.rank), (lane, -1)
                continue
            slowdown = self.slowdown(kernel.row, stalls)
            for cohort, remaining in enumerate(kernel.remaining_us):
                when = self.time_us + remaining * slowdown
                if (when, 0, kernel.rank) < best:
                    best, place = (when, 0, kernel.rank), (lane, cohort)
        return best[0], best[1], place[0], place[1]

    def pass_time(self, until_us: float) -> None:
        """Let resident blocks advance."""
        passed = until_us - self.time_us
        if passed <= 0.0:
            return
        stalls = self.stalls()
        for kernel in self.lanes:
            if kernel is not None and kernel.sequence >= 0:
                slowdown = self.slowdown(kernel.row, stalls)
                kernel.remaining_us = [max(0.0, remaining - passed / slowdown) for remaining in kernel.remaining_us]
        self.time_us = until_us


def simulate(problem: Problem, kernels: BlockKernels, schedule: Schedule) -> Simulation:
    """Run a legal schedule at block level, in plain Python (the oracle of the compiled twin).

    Raises:
        UsageError: if the schedule uses a width that was not costed, or lanes are one team.
        RuntimeError: if it is not legal: nothing runs, and nothing can start.
    """
    _require_blocks(problem)
    width_index = problem.width_indices(schedule)
    gap_us, cross_us, fixed_us = problem.latency_us[:3].tolist()
    before = [problem.predecessors(index) for index in range(problem.count)]
    after = [problem.successors(index) for index in range(problem.count)]
    for first, second in schedule.extra_edges:
        before[second].append(first)
        after[first].append(second)
    pending = [len(items) for items in before]
    queues: list[list[int]] = [[] for _ in range(schedule.lane_slots)]
    for operator in reversed(schedule.order):
        queues[schedule.lane[operator]].append(operator)
    rank = {operator: place for place, operator in enumerate(schedule.order)}
    device = _Device(kernels, schedule.lane_slots)
    free_us = [-1.0] * schedule.lane_slots
    start_us, end_us = [0.0] * problem.count, [0.0] * problem.count
    finished = 0
    while finished < problem.count:
        for lane, queue in enumerate(queues):
            if queue and device.lanes[lane] is None and pending[queue[-1]] == 0:
                operator = queue.pop()
                start = 0.0 if free_us[lane] < 0.0 else free_us[lane] + gap_us
                for item in before[operator]:
                    start = max(start, end_us[item] + (cross_us if schedule.lane[item] != lane else 0.0))
                row = int(problem.kernel[operator, width_index[operator]])
                device.lanes[lane] = _Running(operator, row, rank[operator], start, int(kernels.blocks[row]), -1, [], [])
        when, kind, lane, cohort = device.next_event()
        device.pass_time(when)
        chosen = device.lanes[lane]
        if chosen is None:
            raise RuntimeError("nothing runs and nothing can start: the schedule is not legal")
        if kind == 1:
            chosen.sequence = device.started
            device.started += 1
            start_us[chosen.operator] = device.time_us
        else:
            del chosen.counts[cohort], chosen.remaining_us[cohort]
            if chosen.left == 0 and not chosen.counts:
                device.lanes[lane] = None
                free_us[lane] = end_us[chosen.operator] = device.time_us
                finished += 1
                for item in after[chosen.operator]:
                    pending[item] -= 1
        device.dispatch()
    return Simulation(max(end_us) + fixed_us, tuple(start_us), tuple(end_us))


def _require_blocks(problem: Problem) -> None:
    if problem.costs.one_team:
        raise UsageError("the block simulation was asked about lanes that are one team (a CPU's); expected a device of thread blocks")


class BlockEvaluator:
    """Reusable buffers around the compiled block simulation of one problem. Not thread-safe."""

    def __init__(self, problem: Problem, kernels: BlockKernels, lanes: int) -> None:
        from autosched.search.compiled import leftover as compiled

        _require_blocks(problem)
        self._compiled = compiled
        self.problem, self.kernels, self.lanes = problem, kernels, lanes
        count = problem.count
        self._floats = np.zeros(2 * lanes + lanes * COHORTS + count)
        self._ints = np.zeros(compiled.int_row(lanes, COHORTS), dtype=np.int32)
        _, lane_numbers, _, links = layout.workspace(count, lanes)
        self._links = lane_numbers, links
        self._no_wait = np.full(count, -1, dtype=np.int32)
        self.start_us = np.zeros(count)

    def makespan_us(self, order: Ints, lane: Ints, width_index: Ints, wait: Ints | None = None) -> float:
        """Predicted makespan in microseconds; arguments as ``simulate.Evaluator.makespan_us``."""
        problem = self.problem
        return float(
            self._compiled.evaluate_blocks(
                problem.pred_ptr, problem.pred_idx, problem.succ_ptr, problem.succ_idx, problem.kernel, problem.latency_us,
                *self.kernels.arrays, self.lanes, COHORTS, order, lane, width_index, self._no_wait if wait is None else wait,
                self._floats, self.start_us, self._ints, *self._links,
            )
        )  # fmt: skip

    def ends_us(self) -> Floats:
        """End of each operator in the last evaluation: float64 ``[n]``."""
        return self._floats[2 * self.lanes + self.lanes * COHORTS :].copy()


def simulate_compiled(problem: Problem, kernels: BlockKernels, schedule: Schedule) -> Simulation:
    """The compiled twin of :func:`simulate`.

    Raises:
        UsageError: if the schedule uses a width that was not costed, or lanes are one team.
    """
    width_index = problem.width_indices(schedule)
    problem, wait = split_waits(problem, schedule)
    evaluator = BlockEvaluator(problem, kernels, schedule.lane_slots)
    order, lane = np.array(schedule.order, dtype=np.int32), np.array(schedule.lane, dtype=np.int32)
    makespan = evaluator.makespan_us(order, lane, width_index, wait)
    return Simulation(makespan, tuple(evaluator.start_us.tolist()), tuple(evaluator.ends_us().tolist()))
