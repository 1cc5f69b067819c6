"""Opara: streams along first predecessors, and a launch order that alternates compute- and memory-bound operators, least demand first.

*Source:* Chen et al., "Opara: Exploiting Operator Parallelism for Expediting DNN Inference on GPUs", IEEE Transactions on Computers 2025
(arXiv 2312.10351), algorithms 1 and 2; the single list without alternation is the order of its CCFSys 2023 version. Both orders are
proposed, the journal's first. Resource demand and class come from ``Problem.demand`` and ``Problem.memory_bound``: measured where the
device tells, else estimated from bytes and FLOPs. More streams than lanes are folded (``streams.fold``).
"""

from __future__ import annotations

import heapq

from autosched.core.schedule import Schedule
from autosched.search.heuristics.streams import chains, fold
from autosched.search.problem import Problem
from autosched.search.strategy import Rule, SearchContext


def allocate_streams(problem: Problem) -> list[int]:
    """Stream of each operator: its first predecessor's that has not passed its stream on yet, else a new one."""
    stream = [-1] * problem.count
    passed_on: set[int] = set()
    opened = 0
    for index in range(problem.count):
        for before in problem.predecessors(index):
            if before not in passed_on:
                passed_on.add(before)
                stream[index] = stream[before]
                break
        else:
            stream[index] = opened
            opened += 1
    return stream


def launch_order(problem: Problem, *, alternate: bool) -> list[int]:
    """Ready operators by least demand; with ``alternate``, taken in turns from the memory-bound and the compute-bound ones."""
    waiting = [len(problem.predecessors(index)) for index in range(problem.count)]
    ready: tuple[list[tuple[float, int, int]], ...] = ([], [])
    arrived = 0

    def release(index: int) -> None:
        nonlocal arrived
        side = int(not problem.memory_bound[index]) if alternate else 0
        heapq.heappush(ready[side], (float(problem.demand[index]), arrived, index))  # first come, first served among equals
        arrived += 1

    for index in range(problem.count):
        if waiting[index] == 0:
            release(index)
    order: list[int] = []
    side = 0
    while len(order) < problem.count:
        source = ready[side] or ready[1 - side]
        _, _, index = heapq.heappop(source)
        order.append(index)
        side = 1 - side if alternate else 0
        for after in problem.successors(index):
            waiting[after] -= 1
            if waiting[after] == 0:
                release(after)
    return order


def _opara(problem: Problem, context: SearchContext) -> list[Schedule]:
    stream = allocate_streams(problem)
    found = []
    for alternate in (True, False):
        order = launch_order(problem, alternate=alternate)
        found.append(problem.schedule(order, fold(problem, chains(stream, order), context.lanes(problem))))
    return list(dict.fromkeys(found))


OPARA = Rule("opara", _opara)
