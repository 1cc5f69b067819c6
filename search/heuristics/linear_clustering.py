"""Linear clustering: the longest path becomes a cluster, then the longest path of what is left, and so on; clusters share lanes.

No cluster holds two independent operators, so clustering costs no parallelism. Clusters are then given to lanes by dynamic
programming over clusters in order of their earliest start: a state is the time at which each lane becomes free, of equal states the
better is kept, and at most ``STATES`` of them.

*Source:* Kim and Browne, "A general approach to mapping of parallel computation upon multiprocessor architectures", ICPP 1988; the
dynamic programme over clusters after the description of the whole-process compiler (thesis 2022) is this project's reading.
"""

from __future__ import annotations

import heapq
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
    length = [-1.0] * problem.count  # of the longest path of what is left that begins here; no length is known yet
    follower = [-1] * problem.count
    left = [True] * problem.count
    # A path that is taken shortens few others: only those are looked at again, last operator first.
    stale = [-index for index in range(problem.count)]
    heapq.heapify(stale)
    longest: list[tuple[float, int]] = []
    found: list[list[int]] = []

    def look_again(index: int) -> None:
        # Lengths only fall: what follows another one is as long as before. An operator is stale once, until it is looked at.
        for before in problem.predecessors(index):
            if left[before] and follower[before] == index:
                follower[before] = -1
                heapq.heappush(stale, -before)

    while True:
        while stale:
            index = -heapq.heappop(stale)
            options = [after for after in problem.successors(index) if left[after]]
            follower[index] = max(options, key=lambda after: (length[after], -after), default=-1)
            whole = times[index] + (cross_us + length[follower[index]] if options else 0.0)
            if whole != length[index]:
                length[index] = whole
                heapq.heappush(longest, (-whole, index))
                look_again(index)
        while longest and not (left[longest[0][1]] and -longest[0][0] == length[longest[0][1]]):
            heapq.heappop(longest)
        if not longest:
            return found
        path = [longest[0][1]]
        while follower[path[-1]] >= 0:
            path.append(follower[path[-1]])
        found.append(path)
        for index in path:
            left[index] = False
        for index in path:
            look_again(index)


@dataclass(frozen=True, slots=True)
class _State:
    free_us: tuple[float, ...]
    lane: int  # of the last cluster
    before: _State | None  # without it

    @property
    def value(self) -> tuple[float, float]:
        return max(self.free_us), sum(self.free_us)


def _assign(problem: Problem, groups: list[list[int]], start_us: list[float], context: SearchContext) -> list[int]:
    """Lane of each cluster. Past the deadline only the best state is kept."""
    times = problem.operator_us()
    lanes = context.lanes(problem)
    states = [_State((0.0,) * lanes, -1, None)]
    for group in groups:
        work_us = float(sum(times[index] for index in group))
        best: dict[tuple[float, ...], _State] = {}
        for state in states:
            for lane in range(lanes):
                free = list(state.free_us)
                free[lane] = max(free[lane], start_us[group[0]]) + work_us
                grown = _State(tuple(free), lane, state)
                key = tuple(sorted(round(item, 3) for item in free))  # lanes are alike
                best.setdefault(key, grown)
                if free[lane] == work_us + start_us[group[0]] and state.free_us[lane] == 0.0:
                    break  # all further empty lanes are the same choice
        states = sorted(best.values(), key=lambda state: state.value)[: 1 if context.expired() else STATES]
    chosen: list[int] = []
    last = states[0]
    while last.before is not None:
        chosen.append(last.lane)
        last = last.before
    return chosen[::-1]


def _linear_clustering(problem: Problem, context: SearchContext) -> list[Schedule]:
    times = problem.operator_us().tolist()
    start_us = [0.0] * problem.count
    for index in range(problem.count):
        start_us[index] = max((start_us[before] + times[before] for before in problem.predecessors(index)), default=0.0)
    groups = sorted(clusters(problem), key=lambda group: (start_us[group[0]], group[0]))
    chosen = _assign(problem, groups, start_us, context)
    lane = [0] * problem.count
    for group, place in zip(groups, chosen, strict=True):
        for index in group:
            lane[index] = place
    order = sorted(range(problem.count), key=lambda index: (start_us[index], index))
    return [problem.schedule(order, lane)]


LINEAR_CLUSTERING = Rule("linear_clustering", _linear_clustering)
