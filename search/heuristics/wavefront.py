"""Wavefronts: all operators that are ready form a wave, a wave's operators run side by side, the next wave waits for all of them.

*Source:* Ma et al., "Rammer: Enabling Holistic Deep Learning Compiler Optimizations with rTasks", OSDI 2020, section 4.2 (the wavefront
policy), on streams instead of block executors. The barrier between waves is made of extra edges, because in an exported
schedule only an edge orders two lanes. Within a wave the longest operator goes first onto the emptiest lane.
"""

from __future__ import annotations

import numpy as np

from autosched.core.schedule import Schedule
from autosched.search.problem import Problem
from autosched.search.strategy import Rule, SearchContext


def waves(problem: Problem) -> list[list[int]]:
    """Operators by as-soon-as-possible level, ascending within a level."""
    level = np.zeros(problem.count, dtype=np.int64)
    for index in range(problem.count):
        level[index] = 1 + max((int(level[before]) for before in problem.predecessors(index)), default=-1)
    return [[int(item) for item in np.flatnonzero(level == depth)] for depth in range(int(level.max(initial=-1)) + 1)]


def barrier(previous: list[int], current: list[int], lane: list[int]) -> list[tuple[int, int]]:
    """Extra edges by which the first operator of each lane in ``current`` waits for the last one of each lane in ``previous``.

    Both lists are in launch order; lanes keep their own order, so these edges order every pair of the two groups.
    """
    last = {lane[index]: index for index in previous}
    first: dict[int, int] = {}
    for index in current:
        first.setdefault(lane[index], index)
    return [(before, after) for after in first.values() for before in last.values() if lane[before] != lane[after]]


def _wavefront(problem: Problem, context: SearchContext) -> list[Schedule]:
    lanes, times = context.lanes(problem), problem.operator_us()
    order: list[int] = []
    lane = [0] * problem.count
    extra: list[tuple[int, int]] = []
    previous: list[int] = []
    for wave in waves(problem):
        load = [0.0] * lanes
        ordered = sorted(wave, key=lambda index: (-times[index], index))
        for index in ordered:
            chosen = load.index(min(load))
            lane[index] = chosen
            load[chosen] += float(times[index])
        extra += barrier(previous, ordered, lane)
        order += ordered
        previous = ordered
    return [problem.schedule(order, lane, extra_edges=extra)]


WAVEFRONT = Rule("wavefront", _wavefront)
