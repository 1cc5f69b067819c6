"""HEFT: the operator with the longest path to the end goes first, onto the lane on which it finishes earliest.

*Source:* Topcuoglu, Hariri and Wu, "Performance-effective and low-complexity task scheduling for heterogeneous computing", IEEE TPDS
13(3), 2002, section 4 (upward rank with mean communication cost, earliest finish time). Lanes are alike, so the earliest finish is
the earliest start; insertion into earlier gaps is left out, because a lane runs its operators in launch order. Interference is not
known to it.
"""

from __future__ import annotations

import heapq

from autosched.core.schedule import Schedule
from autosched.search.problem import Problem
from autosched.search.strategy import Rule, SearchContext


def list_schedule(problem: Problem, lanes: int, rank: list[float]) -> tuple[list[int], list[int]]:
    """Launch order and lanes: ready operators by falling ``rank``, each on the lane with the earliest start.

    The order is that of a topological walk that takes the highest rank first, as an upward rank is; times ignore interference.
    """
    gap_us, cross_us = problem.latency_us[:2].tolist()
    times = problem.operator_us(0).tolist()
    waiting = [len(problem.predecessors(index)) for index in range(problem.count)]
    ready = [(-rank[index], index) for index in range(problem.count) if waiting[index] == 0]
    heapq.heapify(ready)
    free: list[float | None] = [None] * lanes
    end, lane, order = [0.0] * problem.count, [0] * problem.count, []
    while ready:
        _, index = heapq.heappop(ready)
        best: tuple[float, int] | None = None
        for candidate, since in enumerate(free):
            start = 0.0 if since is None else since + gap_us
            for before in problem.predecessors(index):
                start = max(start, end[before] + (cross_us if lane[before] != candidate else 0.0))
            if best is None or start < best[0]:
                best = (start, candidate)
        assert best is not None  # there is at least one lane
        lane[index] = best[1]
        end[index] = best[0] + times[index]
        free[best[1]] = end[index]
        order.append(index)
        for after in problem.successors(index):
            waiting[after] -= 1
            if waiting[after] == 0:
                heapq.heappush(ready, (-rank[after], after))
    return order, lane


def _critical_path(problem: Problem, context: SearchContext) -> list[Schedule]:
    lanes = context.lanes(problem)
    # The mean over lanes of the communication cost: free on one lane, a cross-lane latency on the others.
    edge_us = float(problem.latency_us[1]) * (lanes - 1) / lanes
    order, lane = list_schedule(problem, lanes, problem.bottom_levels_us(edge_us=edge_us).tolist())
    return [problem.schedule(order, lane)]


CRITICAL_PATH = Rule("critical_path", _critical_path)
