"""Nimble: as many streams as can be busy at once, and the fewest synchronisations among them.

The transitive reduction of the graph (minimum equivalent graph) is matched as a bipartite graph; matched edges chain operators, and
the number of synchronisations that remain is the number of its edges less the matched ones, which a maximum matching makes least.
A second matching over chains lets a chain that follows another one take its stream. Launch order is the graph's own.

*Source:* Kwon et al., "Nimble: Lightweight and Parallel GPU Task Scheduling for Deep Learning", NeurIPS 2020, section 4.2, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from autosched.core.schedule import Schedule
from autosched.search.heuristics.streams import chains, fold
from autosched.search.problem import Problem
from autosched.search.strategy import Rule, SearchContext


def minimum_equivalent_graph(problem: Problem) -> list[list[int]]:
    """Successors of each operator that no longer path leads to, ascending."""
    reachable = problem.graph.reachable
    kept: list[list[int]] = []
    for index in range(problem.count):
        after = problem.successors(index)
        behind = 0
        for item in after:
            behind |= reachable[item]
        kept.append([item for item in after if not behind >> item & 1])
    return kept


def maximum_matching(options: Sequence[Sequence[int]], right: int) -> list[int]:
    """For each left node its partner among ``right`` right nodes, or -1; the most pairs (augmenting paths, without recursion)."""
    partner = [-1] * len(options)
    owner = [-1] * right
    for root in range(len(options)):
        seen: set[int] = set()
        path: list[tuple[int, int]] = []  # (left node, place of the option being tried)
        stack = [(root, 0)]
        while stack:
            left, place = stack.pop()
            del path[len(stack) :]
            while place < len(options[left]) and options[left][place] in seen:
                place += 1
            if place == len(options[left]):
                continue
            target = options[left][place]
            seen.add(target)
            stack.append((left, place + 1))
            path.append((left, target))
            if owner[target] < 0:
                for mine, taken in path:
                    partner[mine] = taken
                    owner[taken] = mine
                break
            stack.append((owner[target], 0))
    return partner


def allocate_streams(problem: Problem) -> list[int]:
    """Stream of each operator."""
    follower = maximum_matching(minimum_equivalent_graph(problem), problem.count)
    stream = list(range(problem.count))
    for index in range(problem.count):  # a follower always has a higher index, so one pass is enough
        if follower[index] >= 0:
            stream[follower[index]] = stream[index]
    groups = chains(stream, range(problem.count))
    reachable = problem.graph.reachable
    options = [[place for place, other in enumerate(groups) if reachable[group[-1]] >> other[0] & 1] for group in groups]
    next_group = maximum_matching(options, len(groups))
    name = list(range(len(groups)))
    for place in range(len(groups)):
        if next_group[place] >= 0:
            name[next_group[place]] = name[place]
    for place, group in enumerate(groups):
        for index in group:
            stream[index] = name[place]
    return stream


def _nimble(problem: Problem, context: SearchContext) -> list[Schedule]:
    stream = allocate_streams(problem)
    order = list(range(problem.count))
    return [problem.schedule(order, fold(problem, chains(stream, order), context.lanes(problem)))]


NIMBLE = Rule("nimble", _nimble)
