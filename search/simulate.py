"""The fluid simulation as the rest of the project calls it: compiled, one call for each schedule.

Everything computed here is a prediction of the cost table, never a measurement.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from autosched.core.schedule import Schedule
from autosched.search.compiled import layout
from autosched.search.fluid import Simulation
from autosched.search.problem import Floats, Ints, Problem


class Evaluator:
    """Reusable buffers around the compiled evaluation of one problem. Not thread-safe; counts its ``evaluations``."""

    def __init__(self, problem: Problem, lanes: int) -> None:
        from autosched.search.compiled import fluid as compiled

        self._compiled = compiled
        self.evaluations = 0
        count = problem.count
        self._arrays = problem.arrays
        self._space = layout.workspace(count, lanes)
        self._times: Floats = self._space[2]
        self._no_bound = np.zeros(count)
        self._no_wait = np.full(count, -1, dtype=np.int32)

    def makespan_us(self, order: Ints, lane: Ints, width_index: Ints, wait: Ints | None = None) -> float:
        """Predicted makespan in microseconds.

        Args:
            order, lane, width_index: int32 ``[n]``; lanes below ``lanes``.
            wait: int32 ``[n]``, one more operator to wait for, or -1.
        """
        self.evaluations += 1
        wait = self._no_wait if wait is None else wait
        return float(
            self._compiled.evaluate(*self._arrays, order, lane, width_index, wait, self._no_bound, layout.UNREACHED, -1, *self._space)
        )

    def starts_us(self) -> Floats:
        """Start of each operator in the last evaluation: float64 ``[n]``."""
        starts: Floats = self._times[layout.START].copy()
        return starts

    def ends_us(self) -> Floats:
        """End of each operator in the last evaluation: float64 ``[n]``."""
        ends: Floats = self._times[layout.END].copy()
        return ends


def simulate(problem: Problem, schedule: Schedule) -> Simulation:
    """Run a legal schedule through the compiled twin of :func:`autosched.search.fluid.simulate`.

    Raises:
        UsageError: if the schedule uses a width that was not costed.
    """
    width_index = problem.width_indices(schedule)
    problem, wait = split_waits(problem, schedule)
    evaluator = Evaluator(problem, schedule.lane_slots)
    order, lane = np.array(schedule.order, dtype=np.int32), np.array(schedule.lane, dtype=np.int32)
    makespan = evaluator.makespan_us(order, lane, width_index, wait)
    return Simulation(makespan, tuple(evaluator.starts_us().tolist()), tuple(evaluator.ends_us().tolist()))


def makespan_us(problem: Problem, schedule: Schedule) -> float:
    """Predicted makespan of a legal schedule in microseconds."""
    return simulate(problem, schedule).makespan_us


def split_waits(problem: Problem, schedule: Schedule) -> tuple[Problem, Ints]:
    """The schedule's extra edges as the compiled simulators take them: one wait for each operator, int32 ``[n]``, -1 for none.

    Where an operator has several, all of them become edges of the returned problem instead.
    """
    wait = np.full(problem.count, -1, dtype=np.int32)
    for before, after in schedule.extra_edges:
        if wait[after] >= 0:
            return _with_edges(problem, schedule.extra_edges), np.full(problem.count, -1, dtype=np.int32)
        wait[after] = before
    return problem, wait


def _with_edges(problem: Problem, edges: tuple[tuple[int, int], ...]) -> Problem:
    before = [set(problem.predecessors(index)) for index in range(problem.count)]
    after = [set(problem.successors(index)) for index in range(problem.count)]
    for first, second in edges:
        before[second].add(first)
        after[first].add(second)
    pointers: list[Ints] = []
    for sets in (before, after):
        pointers.append(np.concatenate([[0], np.cumsum([len(items) for items in sets])]).astype(np.int32))
        pointers.append(np.array([item for items in sets for item in sorted(items)], dtype=np.int32))
    return dataclasses.replace(problem, pred_ptr=pointers[0], pred_idx=pointers[1], succ_ptr=pointers[2], succ_idx=pointers[3])
