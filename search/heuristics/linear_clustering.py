"""Linear clustering: the longest path becomes a cluster, then the longest path of what is left, and so on; clusters share lanes.

No cluster holds two independent operators, so clustering costs no parallelism. Clusters are then given to lanes by dynamic
programming over clusters in order of their earliest start: a state is the time at which each lane becomes free, of equal states the
better is kept, and at most ``STATES`` of them.

*Source:* Kim and Browne, "A general approach to mapping of parallel computation upon multiprocessor architectures", ICPP 1988; the
dynamic programme over clusters after the description of the whole-process compiler (thesis 2022) is this project's reading.
"""

from __future__ import annotations

from dataclasses import dataclass

from autosched.core.schedule import Schedule
from autosched.search.problem import Problem
from autosched.search.strategy import Rule, SearchContext

STATES = 64
"""States of the dynamic programme kept after each cluster, the best by when the last lane becomes free."""


def clusters(problem: Problem) -> list[list[int]]:
    """Paths that cover every operator once, longest (in time, waits included) first."""
    times = problem.operator_us().tolist()
    cross_us = float(problem.latency_us[1])
    left = set(range(problem.count))
    found: list[list[int]] = []
    while left:
        length = dict.fromkeys(left, 0.0)
        follower: dict[int, int] = {}
        for index in sorted(left, reverse=True):
            length[index] = times[index]
            options = [after for after in problem.successors(index) if after in left]
            if options:
                follower[index] = max(options, key=lambda after: (length[after], -after))
                length[index] += cross_us + length[follower[index]]
        index = max(sorted(left), key=lambda item: length[item])
        path = [index]
        while index in follower:
            index = follower[index]
            path.append(index)
        found.append(path)
        left -= set(path)
    return found


@dataclass(frozen=True, slots=True)
class _State:
    free_us: tuple[float, ...]
    lane: tuple[int, ...]  # of each cluster so far

    @property
    def value(self) -> tuple[float, float]:
        return max(self.free_us), sum(self.free_us)


def _assign(problem: Problem, groups: list[list[int]], start_us: list[float], lanes: int) -> list[int]:
    """Lane of each cluster."""
    times = problem.operator_us()
    states = [_State((0.0,) * lanes, ())]
    for group in groups:
        work_us = float(sum(times[index] for index in group))
        best: dict[tuple[float, ...], _State] = {}
        for state in states:
            for lane in range(lanes):
                free = list(state.free_us)
                free[lane] = max(free[lane], start_us[group[0]]) + work_us
                grown = _State(tuple(free), (*state.lane, lane))
                key = tuple(sorted(round(item, 3) for item in free))  # lanes are alike
                best.setdefault(key, grown)
                if free[lane] == work_us + start_us[group[0]] and state.free_us[lane] == 0.0:
                    break  # all further empty lanes are the same choice
        states = sorted(best.values(), key=lambda state: state.value)[:STATES]
    return list(states[0].lane)


def _linear_clustering(problem: Problem, context: SearchContext) -> list[Schedule]:
    times = problem.operator_us().tolist()
    start_us = [0.0] * problem.count
    for index in range(problem.count):
        start_us[index] = max((start_us[before] + times[before] for before in problem.predecessors(index)), default=0.0)
    groups = sorted(clusters(problem), key=lambda group: (start_us[group[0]], group[0]))
    chosen = _assign(problem, groups, start_us, context.lanes(problem))
    lane = [0] * problem.count
    for group, place in zip(groups, chosen, strict=True):
        for index in group:
            lane[index] = place
    order = sorted(range(problem.count), key=lambda index: (start_us[index], index))
    return [problem.schedule(order, lane)]


LINEAR_CLUSTERING = Rule("linear_clustering", _linear_clustering)
