"""What the published stream allocators share: depths, chains of operators, and folding chains onto the lanes there are.

Inside a CUDA Graph a stream only draws edges, so an allocator may ask for far more streams than a device has queues. Folding keeps
each chain whole and gives it a lane whose earlier work it depends on anyway, where there is one: then the fold adds no ordering.
"""

from __future__ import annotations

from collections.abc import Sequence

from autosched.search.problem import Problem


def depths(problem: Problem) -> list[int]:
    """For each operator, how many are on the longest path (in operators) from it to the end, itself included."""
    depth = [1] * problem.count
    for index in range(problem.count - 1, -1, -1):
        depth[index] = 1 + max((depth[after] for after in problem.successors(index)), default=0)
    return depth


def chains(stream: Sequence[int], order: Sequence[int]) -> list[list[int]]:
    """Operators of each stream in launch order, streams by first launch."""
    found: dict[int, list[int]] = {}
    for index in order:
        found.setdefault(stream[index], []).append(index)
    return list(found.values())


def fold(problem: Problem, groups: Sequence[Sequence[int]], lanes: int) -> list[int]:
    """Lane of each operator: chains onto at most ``lanes`` lanes.

    Args:
        problem: whose graph says which chains follow each other.
        groups: chains, in launch order of their first operators.
        lanes: how many there are.
    """
    reachable = problem.graph.reachable
    times = problem.operator_us()
    lane = [0] * problem.count
    last: list[int] = [-1] * lanes  # last operator of each lane, -1 while it is empty
    load = [0.0] * lanes
    for group in groups:
        free = [place for place in range(lanes) if last[place] >= 0 and reachable[last[place]] >> group[0] & 1]
        empty = [place for place in range(lanes) if last[place] < 0]
        if free:
            chosen = min(free, key=lambda place: (load[place], place))
        elif empty:
            chosen = empty[0]
        else:
            chosen = min(range(lanes), key=lambda place: (load[place], place))
        for index in group:
            lane[index] = chosen
            load[chosen] += float(times[index])
        last[chosen] = group[-1]
    return lane
