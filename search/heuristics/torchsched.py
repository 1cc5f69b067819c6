"""torchsched: the deepest path stays on the main lane, every other operator goes round robin over the side lanes.

Depth counts operators, not time, and even a chain off the deepest path is dealt out operator by operator. At most seven side lanes.

*Source:* NVIDIA apex, ``apex.contrib.torchsched`` (2025), as documented. Rebuilt from the description.
"""

from __future__ import annotations

from autosched.core.schedule import Schedule
from autosched.search.heuristics.streams import depths
from autosched.search.problem import Problem
from autosched.search.strategy import Rule, SearchContext

SIDE_LANES = 7
"""Beside the main lane, at most. *Source:* as above."""


def deepest_path(problem: Problem) -> list[int]:
    """The path with the most operators; the lowest indices among equals."""
    depth = depths(problem)
    path: list[int] = []
    options = [index for index in range(problem.count) if not problem.predecessors(index)]
    while options:
        path.append(max(options, key=lambda index: (depth[index], -index)))
        options = problem.successors(path[-1])
    return path


def _torchsched(problem: Problem, context: SearchContext) -> list[Schedule]:
    main = set(deepest_path(problem))
    side_lanes = min(SIDE_LANES, context.lanes(problem) - 1)
    lane = [0] * problem.count
    dealt = 0
    if side_lanes > 0:
        for index in range(problem.count):
            if index not in main:
                lane[index] = 1 + dealt % side_lanes
                dealt += 1
    return [problem.schedule(range(problem.count), lane)]


TORCHSCHED = Rule("torchsched", _torchsched)
