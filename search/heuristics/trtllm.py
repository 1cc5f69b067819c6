"""TensorRT-LLM's automatic streams: list scheduling in which an operator's time is one of four constants.

Constants: 20 for a mixture of experts, 10 for a matrix product (convolutions and attention count as such here), 0 for views, 1 for the
rest. Priority is the distance to the exit; a free operator stays with its producer; three streams at most, the first preferred. The
launch order goes round the streams, as far along each as its waits allow.

*Source:* NVIDIA TensorRT-LLM, ``auto_multi_stream`` (pull request 5847, 2025), as documented. Rebuilt from the description.
"""

from __future__ import annotations

import heapq

from autosched.core.schedule import Schedule
from autosched.search.problem import Problem
from autosched.search.strategy import Rule, SearchContext

STREAMS = 3
"""At most. *Source:* as above."""

_PRODUCTS = ("mm", "linear", "conv", "attention", "matmul", "einsum")
_VIEWS = ("view", "reshape", "getitem", "empty", "permute", "transpose", "expand", "squeeze", "select", "slice", "sym_")


def constant_cost(kind: str) -> int:
    """The constant that stands for the time of an operator called ``kind``."""
    if "moe" in kind:
        return 20
    if any(word in kind for word in _PRODUCTS):
        return 10
    return 0 if any(word in kind for word in _VIEWS) else 1


def assign(problem: Problem, costs: list[int], streams: int) -> list[int]:
    """Stream of each operator."""
    level = list(costs)
    for index in range(problem.count - 1, -1, -1):
        level[index] += max((level[after] for after in problem.successors(index)), default=0)
    waiting = [len(problem.predecessors(index)) for index in range(problem.count)]
    ready = [(-level[index], index) for index in range(problem.count) if waiting[index] == 0]
    heapq.heapify(ready)
    free, stream, end = [0] * streams, [0] * problem.count, [0] * problem.count
    while ready:
        _, index = heapq.heappop(ready)
        before = problem.predecessors(index)
        at = max((end[item] for item in before), default=0)
        if costs[index] == 0 and before:
            stream[index] = stream[max(before, key=lambda item: end[item])]
            end[index] = at
        else:
            idle = [place for place in range(streams) if free[place] <= at]
            stream[index] = idle[0] if idle else free.index(min(free))
            end[index] = max(at, free[stream[index]]) + costs[index]
            free[stream[index]] = end[index]
        for after in problem.successors(index):
            waiting[after] -= 1
            if waiting[after] == 0:
                heapq.heappush(ready, (-level[after], after))
    return stream


def emit(problem: Problem, stream: list[int], streams: int) -> list[int]:
    """Launch order: round the streams, each as far as its operators' predecessors are out."""
    queues: list[list[int]] = [[] for _ in range(streams)]
    for index in range(problem.count - 1, -1, -1):
        queues[stream[index]].append(index)
    out: set[int] = set()
    order: list[int] = []
    while len(order) < problem.count:
        for queue in queues:
            while queue and all(before in out for before in problem.predecessors(queue[-1])):
                index = queue.pop()
                out.add(index)
                order.append(index)
    return order


def _trtllm(problem: Problem, context: SearchContext) -> list[Schedule]:
    streams = min(STREAMS, context.lanes(problem))
    stream = assign(problem, [constant_cost(operator.kind) for operator in problem.graph.operators], streams)
    return [problem.schedule(emit(problem, stream, streams), stream)]


TRTLLM = Rule("trtllm", _trtllm)
