"""RAF's as-soon-as-possible policy: chains along the deepest successors, a stream for each chain, taken over where chains follow.

Each operator has at most one heavy edge in and one out, chosen by depth; heavy edges make chains, every other edge an event wait.

*Source:* Yu et al., "RAF: Holistic Compilation for Deep Learning Model Training", arXiv 2303.04759, and the description of its
``asap`` stream-schedule policy. Rebuilt from the description.
"""

from __future__ import annotations

from autosched.core.schedule import Schedule
from autosched.search.heuristics.streams import chains, depths, fold
from autosched.search.problem import Problem
from autosched.search.strategy import Rule, SearchContext


def heavy_chains(problem: Problem) -> list[int]:
    """Chain of each operator."""
    depth = depths(problem)
    height = [1] * problem.count
    for index in range(problem.count):
        height[index] = 1 + max((height[before] for before in problem.predecessors(index)), default=0)
    chain = [-1] * problem.count
    opened = 0
    taken = [False] * problem.count  # has a heavy edge in
    # Of equally deep operators the one with more behind it chooses first: it is the longer chain.
    for index in sorted(range(problem.count), key=lambda item: (-depth[item], -height[item], item)):
        if chain[index] < 0:
            chain[index] = opened
            opened += 1
        free = [after for after in problem.successors(index) if not taken[after]]
        if free:
            heavy = max(free, key=lambda after: (depth[after], -after))
            taken[heavy] = True
            chain[heavy] = chain[index]
    return chain


def _raf_asap(problem: Problem, context: SearchContext) -> list[Schedule]:
    order = list(range(problem.count))
    return [problem.schedule(order, fold(problem, chains(heavy_chains(problem), order), context.lanes(problem)))]


RAF_ASAP = Rule("raf_asap", _raf_asap)
