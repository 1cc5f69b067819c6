"""Exact oracles for small graphs: brute force under the model, and CP-SAT for the optimum without interference.

Brute force simulates every launch order with every assignment to lanes (lanes are alike: a new lane is opened in order), as far as the
budget goes; nine operators on three lanes are up to a million schedules. CP-SAT (optional, ``pip install autosched[exact]``) knows no
interference: its optimum is a seed and, without interference, a lower bound.

*Source:* CP-SAT: Perron and Furnon, OR-Tools; the model is the textbook one of optional intervals on alike machines.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from dataclasses import dataclass

import numpy as np

from autosched.core.errors import UsageError
from autosched.core.schedule import Schedule
from autosched.search.compiled import layout
from autosched.search.policies import Candidate, Decoder, best_policies
from autosched.search.problem import Problem
from autosched.search.simulate import makespan_us
from autosched.search.strategy import SearchContext

logger = logging.getLogger(__name__)

BRUTE_OPERATORS = 10
"""More have too many launch orders to try them all."""

_TICKS_PER_US = 20
"""CP-SAT wants integers; a twentieth of a microsecond is far below any noise."""


@dataclass(frozen=True, slots=True)
class BruteForce:
    """The best schedule of all, and whether all were simulated within the budget."""

    best: Candidate
    evaluations: int
    complete: bool


def brute_force(problem: Problem, lanes: int, *, max_evaluations: int = 5_000_000, width_index: int = 0) -> BruteForce:
    """Simulate every launch order and lane assignment at one width, without extra waits.

    Args:
        problem: at most ten operators.
        lanes: lane slots.
        max_evaluations: stop after so many.
        width_index: the width of every operator.

    Raises:
        UsageError: if the graph is too large.
    """
    from autosched.search.compiled import exact as compiled

    count = problem.count
    if count > BRUTE_OPERATORS:
        raise UsageError(f"brute force was asked for {count} operators; expected at most {BRUTE_OPERATORS}; use CP-SAT or 'portfolio'")
    order, lane = np.arange(count, dtype=np.int32), np.zeros(count, dtype=np.int32)
    widths, wait = np.full(count, width_index, dtype=np.int32), np.full(count, -1, dtype=np.int32)
    result = np.zeros(3)
    compiled.enumerate_schedules(
        *problem.arrays, lanes, order, lane, widths, wait, *layout.workspace(count, lanes), np.zeros(6 * count + 2, dtype=np.int32),
        max_evaluations, result,
    )  # fmt: skip
    return BruteForce(Candidate(float(result[0]), order, lane, widths, wait), int(result[1]), bool(result[2]))


def cp_sat_available() -> bool:
    """Whether OR-Tools is installed."""
    return importlib.util.find_spec("ortools") is not None


@dataclass(frozen=True, slots=True)
class CpSatResult:
    """``bound_us`` and ``makespan_us`` are without interference, latencies and the fixed cost; equal if proven optimal."""

    schedule: Schedule
    makespan_us: float
    bound_us: float


def cp_sat(
    problem: Problem, lanes: int, *, deterministic_time: float = 2.0, seconds: float | None = None, seed: int = 0
) -> CpSatResult | None:
    """The shortest schedule without interference at the narrow width; None if OR-Tools is not installed or found nothing.

    Args:
        problem: what to schedule.
        lanes: alike machines.
        deterministic_time: limit in CP-SAT's own unit (about a second), so that equal seeds give equal schedules.
        seconds: wall time limit, if any; what is found then depends on the machine.
        seed: of the solver.
    """
    if not cp_sat_available():
        return None
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    ticks = [max(0, round(float(time) * _TICKS_PER_US)) for time in problem.operator_us()]
    horizon = sum(ticks)
    starts = [model.new_int_var(0, horizon, f"start{index}") for index in range(problem.count)]
    intervals = [
        model.new_fixed_size_interval_var(start, size, f"run{index}") for index, (start, size) in enumerate(zip(starts, ticks, strict=True))
    ]
    end = model.new_int_var(0, horizon, "end")
    for index in range(problem.count):
        model.add(end >= starts[index] + ticks[index])
        for before in problem.predecessors(index):
            model.add(starts[index] >= starts[before] + ticks[before])
    model.add_cumulative(intervals, [1] * problem.count, lanes)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = deterministic_time
    # It would put the system's own handler in Python's place and leave it there: the next Ctrl-C would end this process with its children
    # and scratch files left behind.
    solver.parameters.catch_sigint_signal = False
    if seconds is not None:
        solver.parameters.max_time_in_seconds = max(seconds, 1e-3)
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    begins = [solver.value(start) for start in starts]
    order, lane = _onto_lanes(problem, begins, ticks, lanes)
    return CpSatResult(problem.schedule(order, lane), solver.objective_value / _TICKS_PER_US, solver.best_objective_bound / _TICKS_PER_US)


def _onto_lanes(problem: Problem, begins: list[int], ticks: list[int], lanes: int) -> tuple[list[int], list[int]]:
    """Launch order by start, and an interval colouring that keeps an operator on a predecessor's lane where it can."""
    depth = [0] * problem.count  # zero-time operators start with their predecessors: depth keeps the order topological
    for index in range(problem.count):
        depth[index] = 1 + max((depth[before] for before in problem.predecessors(index)), default=0)
    order = sorted(range(problem.count), key=lambda index: (begins[index], depth[index], index))
    free, lane = [0] * lanes, [0] * problem.count
    for index in order:
        idle = [place for place in range(lanes) if free[place] <= begins[index]] or [free.index(min(free))]
        wanted = {lane[before] for before in problem.predecessors(index)}
        lane[index] = next((place for place in idle if place in wanted), idle[0])
        free[lane[index]] = begins[index] + ticks[index]
    return order, lane


@dataclass(frozen=True, slots=True)
class Exact:
    """Brute force up to ten operators, CP-SAT's schedule replayed above that; the best list policy beside both."""

    name: str = "exact"
    is_baseline: bool = False

    def propose(self, problem: Problem, context: SearchContext) -> list[Schedule]:
        """What the oracle found, and the best list policy; best predicted first."""
        lanes, widths = context.lanes(problem), context.width_indices(problem)
        decoder = Decoder(problem, lanes, widths)
        found = [best_policies(problem, context, decoder)[0][0].schedule(problem)]
        left = context.max_evaluations - decoder.evaluations
        if left > 0 and not context.expired():
            if problem.count <= BRUTE_OPERATORS:
                for width in widths.tolist():
                    solved = brute_force(problem, lanes, max_evaluations=max(1, left // len(widths)), width_index=width)
                    found.append(solved.best.schedule(problem))
                    logger.info("brute force: %d schedules, complete: %s", solved.evaluations, solved.complete)
            else:
                # A deterministic second of the solver costs about as much as a hundred thousand simulations.
                seed = int(context.rng.integers(0, 2**31 - 1))
                seconds = None if context.deadline_s is None else context.deadline_s - time.monotonic()
                seeded = cp_sat(problem, lanes, deterministic_time=min(2.0, left / 100_000), seconds=seconds, seed=seed)
                found += [seeded.schedule] if seeded is not None else []
        return sorted(dict.fromkeys(found), key=lambda schedule: makespan_us(problem, schedule))


EXACT = Exact()
