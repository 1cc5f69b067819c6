"""Measured schedules correct the cost table: what the model got wrong where the search looked is what must be repaired.

Each traced operator gives one equation: the work it did, ``sum over intervals of length / S`` with ``S`` what the simulator makes of
what ran beside it then (``fluid.py``), is its time alone. The equations are linearised in the logarithms of the slowdowns and swept a
few times by Kaczmarz projections; no slowdown may leave a band around what it was before.

*Source:* Kaczmarz, "Angenäherte Auflösung von Systemen linearer Gleichungen", Bull. Acad. Pol. Sci. Lett. A 35, 1937; with relaxation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autosched.core.costs import CostTable
from autosched.core.schedule import Schedule
from autosched.search.compiled.layout import MIN_SLOWDOWN
from autosched.search.problem import Floats, Problem
from autosched.search.simulate import simulate


@dataclass(frozen=True, slots=True)
class Trace:
    """When each operator ran, by operator index, microseconds from the start of the run."""

    start_us: tuple[float, ...]
    end_us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CorrectionLimits:
    """How far measurements may move the table.

    Args:
        slowdown_band: a slowdown stays within this factor of its old value, and above ``1 / band`` of it.
        solo_band: the same for times alone, which were measured with more care.
        relaxation: share of each equation's residual that one step removes.
        sweeps: passes over all equations.
        alone_share: an operator overlapped for less than this share of its duration corrects its time alone.
        longest_step: most that one step changes the logarithm of a slowdown.
    """

    slowdown_band: float = 2.0
    solo_band: float = 1.25
    relaxation: float = 0.3
    sweeps: int = 10
    alone_share: float = 0.05
    longest_step: float = 0.1


_Pair = tuple[int, int, bool]
"""Kernel, the kernel beside it, and whether the first one started first."""

_LEAST_SLOWDOWN = 1e-3
"""No corrected slowdown is below this: its logarithm is what is moved."""


@dataclass(frozen=True, slots=True)
class _Interval:
    """A time in which the same operators ran: the pairs that slowed one of them, the part of the room that each of the others got then,
    and its own part (``costmodel.composition``), less what helper threads that spin took of it."""

    length_us: float
    pairs: tuple[_Pair, ...]
    parts: tuple[float, ...]
    own_part: float


@dataclass(frozen=True, slots=True)
class _Equation:
    """One operator's run."""

    operator: int
    kernel: int
    duration_us: float
    intervals: tuple[_Interval, ...]

    @property
    def overlapped_us(self) -> float:
        """Time with company."""
        return sum(interval.length_us for interval in self.intervals if interval.pairs)


class _Tables:
    """The corrected table in the making: times alone, and logarithms of those slowdowns that were touched."""

    def __init__(self, problem: Problem, limits: CorrectionLimits) -> None:
        self.problem, self.limits = problem, limits
        self.solo_us = problem.solo_us.copy()
        self.logs: dict[_Pair, float] = {}
        self._now: Problem | None = None

    def original(self, pair: _Pair) -> float:
        """The slowdown before correction."""
        excess = self.problem.excess_first if pair[2] else self.problem.excess_last
        return max(_LEAST_SLOWDOWN, 1.0 + float(excess[pair[0], pair[1]]))

    def slowdown(self, pair: _Pair) -> float:
        """The slowdown now."""
        return self.original(pair) * math.exp(self.logs.get(pair, 0.0))

    def move(self, changes: Iterable[tuple[_Pair, float]]) -> None:
        """Change logarithms of slowdowns, within the step and the band."""
        longest, band = self.limits.longest_step, math.log(self.limits.slowdown_band)
        for pair, change in changes:
            moved = self.logs.get(pair, 0.0) + min(max(change, -longest), longest)
            self.logs[pair] = min(max(moved, -band), band)

    def costs(self) -> CostTable:
        """The table."""
        costs = self.problem.costs
        beside = len(costs.slowdown_first)
        first, last = (excess[:beside, :beside] + 1.0 for excess in (self.problem.excess_first, self.problem.excess_last))
        for pair in self._tabled():
            (first if pair[2] else last)[pair[0], pair[1]] = self.slowdown(pair)
        return replace(
            costs,
            solo_us=self.solo_us.copy(),
            slowdown_first=np.maximum(first, _LEAST_SLOWDOWN),
            slowdown_last=np.maximum(last, _LEAST_SLOWDOWN),
        )

    def now(self) -> Problem:
        """The problem with the slowdowns of this moment; the same arrays each time, in which only what was moved is set."""
        if self._now is None:
            self._now = Problem.make(self.problem.graph, self.costs())
        for pair in self._tabled():
            excess = self._now.excess_first if pair[2] else self._now.excess_last
            excess[pair[0], pair[1]] = max(self.slowdown(pair), _LEAST_SLOWDOWN) - 1.0
        return self._now

    def _tabled(self) -> list[_Pair]:
        """What was moved and is in the table; a trace may show company of an operator that the table knows to run alone."""
        beside = len(self.problem.costs.slowdown_first)
        return [pair for pair in self.logs if max(pair[0], pair[1]) < beside]


def correct_with_traces(problem: Problem, traced: Sequence[tuple[Schedule, Trace]], limits: CorrectionLimits | None = None) -> CostTable:
    """The problem's cost table, corrected by when operators really ran.

    Args:
        problem: whose table to correct.
        traced: schedules and what was measured of each.
        limits: how far to go.
    """
    tables = _Tables(problem, limits or CorrectionLimits())
    equations = [equation for schedule, trace in traced for equation in _equations(problem, schedule, trace)]
    _correct_solo(tables, equations)
    for _ in range(tables.limits.sweeps):
        for equation in equations:
            if equation.overlapped_us >= tables.limits.alone_share * equation.duration_us:
                _project(tables, equation)
    return tables.costs()


def correct_with_times(problem: Problem, timed: Sequence[tuple[Schedule, float]]) -> CostTable:
    """The same where a device gives no traces: the error of each makespan is laid on the overlaps along its critical chain.

    Args:
        problem: whose table to correct.
        timed: schedules and their measured medians, microseconds.
    """
    tables = _Tables(problem, CorrectionLimits())
    for _ in range(min(3, tables.limits.sweeps)):
        for schedule, measured_us in timed:
            run = simulate(tables.now(), schedule)
            chain = _critical_chain(problem, schedule, run.end_us)
            gradient: dict[_Pair, float] = {}
            for equation in _equations(problem, schedule, Trace(run.start_us, run.end_us)):
                if equation.operator in chain:
                    for pair, lost in _sensitivity(tables, equation).items():
                        gradient[pair] = gradient.get(pair, 0.0) + lost
            norm = sum(value * value for value in gradient.values())
            if norm > 0.0:
                step = tables.limits.relaxation * (measured_us - run.makespan_us) / norm
                tables.move((pair, step * value) for pair, value in gradient.items())
    return tables.costs()


def _equations(problem: Problem, schedule: Schedule, trace: Trace) -> list[_Equation]:
    start = np.array(trace.start_us)
    end = np.array(trace.end_us) - _lateness_us(problem, schedule, trace)
    kernels = problem.kernel[np.arange(problem.count), problem.width_indices(schedule)]
    rank = np.empty(problem.count, dtype=np.int64)
    rank[np.array(schedule.order)] = np.arange(problem.count)
    found: list[_Equation] = []
    for index in range(problem.count):
        duration = float(end[index] - start[index])
        if duration <= 0.0:
            continue
        others = np.flatnonzero((start < end[index]) & (end > start[index]))
        others = others[others != index]
        earlier = (start[index] < start[others]) | ((start[index] == start[others]) & (rank[index] < rank[others]))
        cuts = np.unique(np.clip(np.concatenate([start[others], end[others], [start[index], end[index]]]), start[index], end[index]))
        intervals: list[_Interval] = []
        for left, right in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            middle = 0.5 * (left + right)
            beside = np.flatnonzero((start[others] <= middle) & (end[others] > middle))
            pairs = tuple((int(kernels[index]), int(kernels[others[place]]), bool(earlier[place])) for place in beside)
            in_order = sorted([index, *others[beside].tolist()], key=lambda item: (start[item], rank[item]))
            part = dict(zip(in_order, problem.shares(int(kernels[item]) for item in in_order), strict=True))
            own_part = part[index] / _crowding(problem, kernels, start, end, middle)
            intervals.append(_Interval(right - left, pairs, tuple(part[item] for item in others[beside].tolist()), own_part))
        found.append(_Equation(index, int(kernels[index]), duration, tuple(intervals)))
    return found


def _lateness_us(problem: Problem, schedule: Schedule, trace: Trace) -> Floats:
    """By how much each operator ended late because a lane polled: float64 ``[n]``; ``fluid`` has the rule. It did no work meanwhile."""
    gap_us, cross_us, _, _, polling_us = problem.latency_us[:5].tolist()
    lane, start, end = np.array(schedule.lane), np.array(trace.start_us), np.array(trace.end_us)
    late = np.zeros(problem.count)
    done = end - cross_us  # if it was late
    for index in np.flatnonzero((done > start) & (done < start.max())) if polling_us > 0.0 else []:
        for other in set(schedule.lane) - {schedule.lane[index]}:
            begun = end[(lane == other) & (start <= done[index])]
            if len(begun) and gap_us < done[index] - begun.max() < polling_us:
                late[index] = cross_us
    return late


def _crowding(problem: Problem, kernels: NDArray[np.int32], start_us: Floats, end_us: Floats, when_us: float) -> float:
    """How many times slower what runs at a moment is for the helper threads of a wide operator before it; ``fluid`` has the rule."""
    spin_us, thread = float(problem.latency_us[5]), float(problem.latency_us[6])
    if spin_us == 0.0:
        return 1.0
    begun = np.flatnonzero((problem.room[kernels] > 1.5 * thread) & (start_us <= when_us))
    last = begun[np.argmax(start_us[begun])] if len(begun) else -1
    if last < 0 or not end_us[last] <= when_us < end_us[last] + spin_us:
        return 1.0
    wanted = float(problem.room[kernels[(start_us <= when_us) & (end_us > when_us)]].sum())
    return max(1.0, (wanted + float(problem.room[kernels[last]]) - thread) / max(1.0, wanted))


def _correct_solo(tables: _Tables, equations: Sequence[_Equation]) -> None:
    limits = tables.limits
    alone: dict[int, list[float]] = {}
    for equation in equations:
        if equation.overlapped_us < limits.alone_share * equation.duration_us:
            alone.setdefault(equation.kernel, []).append(equation.duration_us)
    for kernel, durations in alone.items():
        old = float(tables.solo_us[kernel])
        wanted = old + limits.relaxation * (float(np.median(durations)) - old)
        tables.solo_us[kernel] = min(max(wanted, old / limits.solo_band), old * limits.solo_band)


def _summed(tables: _Tables, interval: _Interval) -> float:
    excess = sum(part * (tables.slowdown(pair) - 1.0) for pair, part in zip(interval.pairs, interval.parts, strict=True))
    return max(MIN_SLOWDOWN, (1.0 + excess) / interval.own_part)


def _project(tables: _Tables, equation: _Equation) -> None:
    solo = float(tables.solo_us[equation.kernel])
    if solo <= 0.0:
        return
    work = 0.0
    gradient: dict[_Pair, float] = {}  # of the work done, with the opposite sign, in the logarithm of each slowdown
    for interval in equation.intervals:
        summed = _summed(tables, interval)
        work += interval.length_us / summed / solo
        for pair, part in zip(interval.pairs, interval.parts, strict=True):
            steepness = part / interval.own_part * tables.slowdown(pair)
            gradient[pair] = gradient.get(pair, 0.0) + interval.length_us / (summed * summed) * steepness / solo
    norm = sum(value * value for value in gradient.values()) + 1e-2
    step = tables.limits.relaxation * (work - 1.0) / norm
    tables.move((pair, step * value) for pair, value in gradient.items())


def _sensitivity(tables: _Tables, equation: _Equation) -> dict[_Pair, float]:
    """Microseconds by which the operator gets longer for each unit of the logarithm of each slowdown, to first order."""
    found: dict[_Pair, float] = {}
    for interval in equation.intervals:
        summed = _summed(tables, interval)
        for pair, part in zip(interval.pairs, interval.parts, strict=True):
            steepness = part / interval.own_part * tables.slowdown(pair)
            found[pair] = found.get(pair, 0.0) + interval.length_us * steepness / summed
    return found


def _critical_chain(problem: Problem, schedule: Schedule, end_us: Sequence[float]) -> set[int]:
    """Operators that decide the makespan: from the last end back through whatever each one waited for."""
    before: list[list[int]] = [problem.predecessors(index) for index in range(problem.count)]
    for first, second in schedule.extra_edges:
        before[second].append(first)
    for index, awaited in enumerate(problem.team_waits(schedule.order, problem.width_indices(schedule))):
        before[index] += awaited
    last: dict[int, int] = {}
    for index in schedule.order:
        lane = schedule.lane[index]
        if lane in last:
            before[index].append(last[lane])
        last[lane] = index
    index = max(range(problem.count), key=lambda item: end_us[item])
    chain = {index}
    while before[index]:
        index = max(before[index], key=lambda item: end_us[item])
        chain.add(index)
    return chain
