"""Are the graph's edges complete? Every two operators that touch one memory, one of them writing, must be ordered.

``OpGraph.edges`` is derived in one sweep over the operators; this looks at every pair instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from autosched.core.graph import OpGraph, ValueRole


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
