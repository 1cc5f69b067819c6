"""Nimble: as many streams as can be busy at once, and the fewest synchronisations among them.

The transitive reduction of the graph (minimum equivalent graph) is matched as a bipartite graph; matched edges chain operators, and
the number of synchronisations that remain is the number of its edges less the matched ones, which a maximum matching makes least.
A second matching over chains lets a chain that follows another one take its stream. Launch order is the graph's own.

*Source:* Kwon et al., "Nimble: Lightweight and Parallel GPU Task Scheduling for Deep Learning", NeurIPS 2020, section 4.2, algorithm 1.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np

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


def maximum_matching(options: Sequence[Sequence[int]], right: int, expired: Callable[[], bool] = lambda: False) -> list[int]:
    """For each left node its partner among ``right`` right nodes, or -1; the most pairs (augmenting paths, without recursion).

    Once the time has ``expired``, the most pairs of the left nodes so far.
    """
    partner = [-1] * len(options)
    owner = [-1] * right
    for root in range(len(options)):
        if expired():
            break
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


def allocate_streams(problem: Problem, expired: Callable[[], bool] = lambda: False) -> list[int]:
    """Stream of each operator; more of them than it takes once the time has ``expired``."""
    follower = maximum_matching(minimum_equivalent_graph(problem), problem.count, expired)
    stream = list(range(problem.count))
    for index in range(problem.count):  # a follower always has a higher index, so one pass is enough
        if follower[index] >= 0:
            stream[follower[index]] = stream[index]
    groups = chains(stream, range(problem.count))
    next_group = maximum_matching(_later_chains(problem, groups), len(groups), expired)
    name = list(range(len(groups)))
    for place in range(len(groups)):
        if next_group[place] >= 0:
            name[next_group[place]] = name[place]
    for place, group in enumerate(groups):
        for index in group:
            stream[index] = name[place]
    return stream


def _later_chains(problem: Problem, groups: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """For each chain those that begin behind its end, ascending."""
    reachable, size = problem.graph.reachable, problem.count // 8 + 1
    heads = np.array([group[0] for group in groups], dtype=np.int64)
    found: list[Sequence[int]] = []
    for group in groups:
        # All bits of a mask at once: to ask for one takes as long, and a large graph has thousands of chains.
        behind = np.unpackbits(np.frombuffer(reachable[group[-1]].to_bytes(size, "little"), np.uint8), bitorder="little")
        found.append(array("i", np.flatnonzero(behind[heads]).astype(np.int32).tobytes()))
    return found


def _nimble(problem: Problem, context: SearchContext) -> list[Schedule]:
    stream = allocate_streams(problem, context.expired)
    order = list(range(problem.count))
    return [problem.schedule(order, fold(problem, chains(stream, order), context.lanes(problem)))]


NIMBLE = Rule("nimble", _nimble)
