"""Slow, independent looks at what the package derives in one sweep: the edges of a graph, and the partition of its calls into regions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autosched.capture.draft import Draft, Node
from autosched.core.graph import OpGraph, ValueRole
from autosched.core.topological import topological


def unordered_conflicts(graph: OpGraph) -> list[str]:
    """One line for each pair of operators that conflict and that no path of the graph orders; empty if the graph is sound.

    Takes time quadratic in the number of users of a storage.
    """
    found: list[str] = []
    for storage, users in graph.storage_uses.items():
        writers = set(_writers(graph, storage))
        for place, first in enumerate(users):
            for second in users[place + 1 :]:
                if (first in writers or second in writers) and graph.independent(first, second):
                    names = graph.operators[first].name, graph.operators[second].name
                    found.append(f"{names[0]} and {names[1]} both use storage {storage}, one writes it, and nothing orders them")
    return found


def _writers(graph: OpGraph, storage: int) -> Iterator[int]:
    if graph.values[storage].role in (ValueRole.INTERMEDIATE, ValueRole.INTERNAL):
        yield graph.storage_uses[storage][0]
    for operator in graph.operators:
        if any(graph.values[value].storage == storage for value in operator.mutates):
            yield operator.index


def region_faults(draft: Draft, regions: Sequence[Sequence[Node]]) -> list[str]:
    """Everything that makes ``regions`` no legal partition of the draft's calls, one line each.

    Every call in exactly one region, no cycle between regions, and no region of several working calls that writes memory from outside.
    """
    home: dict[int, int] = {}
    found: list[str] = []
    for index, region in enumerate(regions):
        for node in region:
            if id(node) in home:
                found.append(f"{node.name} is in regions {home[id(node)]} and {index}")
            home[id(node)] = index
    found += [f"{node.name} is in no region" for node in draft.nodes if id(node) not in home]
    made = {value: index for index, region in enumerate(regions) for node in region for value in node.outputs if value >= 0}
    before = [
        {made[value] for node in region for value in node.reads() if made.get(value, index) != index}
        for index, region in enumerate(regions)
    ]
    try:
        topological(len(regions), before)
    except Exception as error:
        found.append(str(error))
    for index, region in enumerate(regions):
        if len(region) > 1 and any(node.mutates() for node in region[:-1]):
            found.append(f"region {index} changes memory and does other work after it")
    return found
