"""Lower bounds on what any schedule can reach under the model: how far from the optimum a search can be at most.

*Source:* the configuration linear programme of multiprocessor scheduling (Gilmore and Gomory, "A linear programming approach to the
cutting-stock problem", Operations Research 9, 1961), with columns that are sets of operators running together.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from typing import Any

import numpy as np

from autosched.core.errors import UsageError
from autosched.search.compiled.layout import MIN_SLOWDOWN
from autosched.search.problem import Problem

MOST_COLUMNS = 400_000
"""A linear programme of a whole graph with more is refused."""

_MOST_PART_COLUMNS = 20_000  # the same of one part of a graph, of which there may be dozens


def critical_path_bound_us(problem: Problem) -> float:
    """Longest path at each operator's fastest width or variant, plus the fixed cost; valid where no pair speeds up together."""
    levels = problem.paths_to_end_us(problem.fastest_us(range(problem.kernel.shape[1])))
    return float(levels.max(initial=0.0) + problem.latency_us[2])


def configuration_bound_us(problem: Problem, lanes: int, *, most_columns: int = MOST_COLUMNS) -> float:
    """Least total time in which sets of independent operators, each at its rate in that set, do all the work.

    Columns: every antichain of at most ``lanes`` operators in every order of start, narrow width. Precedence between sets, launch gaps
    and waits are ignored, so the bound is valid but not tight.

    Args:
        problem: one width, and no other variants; up to about 24 operators.
        lanes: most operators at once.
        most_columns: a larger programme is refused.

    Raises:
        UsageError: if there would be more than ``most_columns`` columns.
    """
    optimize, sparse = importlib.import_module("scipy.optimize"), importlib.import_module("scipy.sparse")
    rows: list[int] = []
    columns: list[int] = []
    rates: list[float] = []
    column = 0
    for members in _antichains(problem, lanes, most_columns):
        for order in itertools.permutations(members):
            part = problem.shares(int(problem.kernel[index, 0]) for index in order)
            for place, index in enumerate(order):
                kernel = problem.kernel[index, 0]
                slowdown = 1.0
                for other_place, other in enumerate(order):
                    if other != index:
                        excess = problem.excess_first if place < other_place else problem.excess_last
                        slowdown += part[other_place] * float(excess[kernel, problem.kernel[other, 0]])
                slowdown /= part[place]
                rows.append(index)
                columns.append(column)
                rates.append(1.0 / max(slowdown, MIN_SLOWDOWN))
            column += 1
            if column > most_columns:
                raise _too_many(most_columns)
    matrix = sparse.csc_matrix((rates, (rows, columns)), shape=(problem.count, column))
    solved = optimize.linprog(np.ones(column), A_ub=-matrix, b_ub=-problem.operator_us(0), method="highs")
    bound = float(solved.fun) + float(problem.latency_us[2])
    return bound if _any_speed_up(problem) else max(bound, critical_path_bound_us(problem))


def decomposed_bound_us(problem: Problem, lanes: int) -> float:
    """A bound for graphs that narrow to one operator now and then, as convolution nets do, at any size.

    An operator that every other one comes before or after runs alone, and what lies between two of those begins after the first and ends
    before the second; so the least times of the parts add up. Each part gets the configuration bound where that is possible (one width
    and variant, few enough columns), else its longest path.

    Args:
        problem: any.
        lanes: most operators at once.
    """
    count = problem.count
    cuts = [index for index in range(count) if not any(problem.graph.independent(index, other) for other in range(count) if other != index)]
    bound = float(problem.latency_us[2])
    begin = 0
    for cut in [*cuts, count]:
        bound += _part_us(problem, range(begin, cut), lanes)
        if cut < count:
            bound += min(float(problem.operator_us(place)[cut]) for place in range(problem.kernel.shape[1]))
        begin = cut + 1
    return bound if _any_speed_up(problem) else max(bound, critical_path_bound_us(problem))


def _any_speed_up(problem: Problem) -> bool:
    """Whether some pair runs faster together than alone, so that a path may take less than its operators' times."""
    return min(float(excess.min(initial=0.0)) for excess in (problem.excess_first, problem.excess_last)) < 0.0


def _part_us(problem: Problem, members: range, lanes: int) -> float:
    """Least time of some consecutive operators by themselves, microseconds."""
    if not members:
        return 0.0
    by_operator = ((name, getattr(problem.costs, name)) for name in ("kernel", "variant", "other_kernel", "other_variant"))
    of_part: dict[str, Any] = {name: rows[members.start : members.stop] for name, rows in by_operator if rows is not None}
    costs = dataclasses.replace(problem.costs, fixed_us=0.0, **of_part)
    before = [[item - members.start for item in problem.predecessors(index) if item >= members.start] for index in members]
    part = Problem.from_arrays(before, costs)
    # In another variant an operator may do more beside others than the configurations of one variant allow.
    if part.kernel.shape[1] == 1:
        try:
            return configuration_bound_us(part, min(lanes, part.count), most_columns=_MOST_PART_COLUMNS)
        except UsageError:
            pass  # too many columns: the longest path it is
    return critical_path_bound_us(part) * (MIN_SLOWDOWN if _any_speed_up(part) else 1.0)


def _too_many(most_columns: int) -> UsageError:
    return UsageError(f"the configuration bound needs more than {most_columns} columns; use a smaller or narrower graph")


def _antichains(problem: Problem, most: int, most_columns: int) -> list[tuple[int, ...]]:
    """Sets of at most ``most`` operators of which none comes before another.

    Raises:
        UsageError: if there are more than ``most_columns``, while they are counted: a wide graph has more than fit into memory.
    """
    found: list[tuple[int, ...]] = [(index,) for index in range(problem.count)]
    layer = found
    for _ in range(most - 1):
        wider: list[tuple[int, ...]] = []
        for members in layer:
            wider += [
                (*members, index)
                for index in range(members[-1] + 1, problem.count)
                if all(problem.graph.independent(index, member) for member in members)
            ]
            if len(found) + len(wider) > most_columns:
                raise _too_many(most_columns)
        layer = wider
        found = found + layer
    return found
