"""Whether two graphs are one and the same to a schedule, and a schedule of one as a schedule of the other.

A model reaches autosched by two ways, ``torch.export`` and Dynamo. They agree on the operators, but may number inputs and outputs
differently, and leave unused inputs out. What is looked up in a cache of schedules must not depend on that.
"""

from __future__ import annotations

import dataclasses
import hashlib

import msgspec

from autosched.core.errors import IllegalSchedule
from autosched.core.graph import OpGraph, merkle_digests
from autosched.core.schedule import Schedule, require_legal


def structure_key(graph: OpGraph) -> str:
    """sha256 (hex) of what is computed, whatever the inputs and outputs are called and however they are ordered.

    Coarser than ``OpGraph.hash``: equal hashes give equal keys. Two inputs of one shape are not told apart, so equal keys do not prove
    that one graph may run for the other; they say that a schedule of one is worth transferring (:func:`transfer`).
    """
    operators, outputs = merkle_digests(graph, numbered_inputs=False)
    return hashlib.sha256(msgspec.json.encode([sorted(operators), sorted(outputs)])).hexdigest()


def transfer(schedule: Schedule, source: OpGraph, target: OpGraph) -> Schedule:
    """``schedule`` of ``source`` as a schedule of ``target``, which has the same operators, maybe in another order.

    Operators that cannot be told apart (the same call on the same values with weights of the same shape) are matched by what is computed
    from them, and else in the order in which the graphs list them.

    Raises:
        IllegalSchedule: if the graphs differ, or the matching gives a schedule that would not compute what ``target`` says.
    """
    theirs, _ = merkle_digests(source, numbered_inputs=False)
    ours, _ = merkle_digests(target, numbered_inputs=False)
    if sorted(theirs) != sorted(ours):
        raise IllegalSchedule(
            f"a schedule of graph {source.hash[:12]} ({len(source)} operators) does not fit graph {target.hash[:12]} ({len(target)} "
            "operators): they compute different things. Tune this model."
        )
    place = [0] * len(source)
    for there, here in zip(_by_digest(source, theirs), _by_digest(target, ours), strict=True):
        place[there] = here
    back = sorted(range(len(place)), key=place.__getitem__)
    moved = dataclasses.replace(
        schedule,
        graph_hash=target.hash,
        order=tuple(place[index] for index in schedule.order),
        lane=tuple(schedule.lane[index] for index in back),
        width=tuple(schedule.width[index] for index in back),
        priority=tuple(schedule.priority[index] for index in back),
        variant=tuple(schedule.variant[index] for index in back),
        extra_edges=tuple(sorted((place[before], place[after]) for before, after in schedule.extra_edges)),
    )
    require_legal(target, moved)
    return moved


def _by_digest(graph: OpGraph, digests: tuple[str, ...]) -> list[int]:
    uses = list(digests)
    for index in range(len(graph) - 1, -1, -1):
        after = sorted(uses[user] for user in graph.successors[index])
        uses[index] = hashlib.sha256("".join([digests[index], *after]).encode()).hexdigest()
    return sorted(range(len(digests)), key=lambda index: (digests[index], uses[index], index))
