"""Topological order by Kahn's algorithm (Communications of the ACM 5, 1962)."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from autosched.core.errors import InvalidGraph


def topological(count: int, predecessors: Sequence[Iterable[int]]) -> tuple[int, ...]:
    """The numbers below ``count``, each after its ``predecessors``; of those that are ready, the smallest first.

    Raises:
        InvalidGraph: the operators that are on a cycle.
    """
    waiting = [len(set(before)) for before in predecessors]
    after: list[list[int]] = [[] for _ in range(count)]
    for index, before in enumerate(predecessors):
        for item in set(before):
            after[item].append(index)
    ready = [index for index in range(count) if waiting[index] == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for item in after[index]:
            waiting[item] -= 1
            if waiting[item] == 0:
                heapq.heappush(ready, item)
    if len(order) != count:
        raise InvalidGraph(f"operators {sorted(set(range(count)) - set(order))} are on a cycle or behind one; expected an acyclic graph")
    return tuple(order)
