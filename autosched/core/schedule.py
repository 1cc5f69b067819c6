"""A schedule: where and when each operator runs. And the one oracle that says whether it is legal.

A schedule places every operator on a lane (a CUDA stream, or a worker thread), gives it a place in the
launch order, a width, a priority and a variant, and may add ordering edges on purpose. What a lane runs is
its operators in launch order; between lanes only the graph's edges and the extra edges order anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from autosched.core.errors import IllegalSchedule
from autosched.core.graph import OpGraph


@dataclass(frozen=True, slots=True)
class Schedule:
    """One decision for every operator of a graph.

    Args:
        graph_hash: ``OpGraph.hash`` of the graph it was made for.
        order: operator indices in launch order; a topological order of the graph with the extra edges.
        lane: lane of each operator, by operator index, from 0.
        width: CPU: threads the operator may use (1 = only its lane's). CUDA: 1.
        priority: CUDA: node priority, 0 (lowest) to 3. CPU: 0.
        variant: which implementation of the operator, 0 the default.
        extra_edges: ``(before, after)`` pairs the graph does not have: a wait that pays.
    """

    graph_hash: str
    order: tuple[int, ...]
    lane: tuple[int, ...]
    width: tuple[int, ...]
    priority: tuple[int, ...]
    variant: tuple[int, ...]
    extra_edges: tuple[tuple[int, int], ...] = ()

    @property
    def lanes(self) -> int:
        """Number of lanes that hold at least one operator."""
        return len(set(self.lane))

    @property
    def lane_slots(self) -> int:
        """One more than the highest lane used."""
        return max(self.lane, default=-1) + 1

    def to_json(self) -> bytes:
        """Canonical bytes."""
        return msgspec.json.encode(self, order="sorted")


def sequential(graph: OpGraph, *, width: int = 1, order: Sequence[int] | None = None) -> Schedule:
    """All operators on lane 0, in ``order`` (default: the graph's own), each ``width`` wide."""
    count = len(graph)
    chosen = tuple(order) if order is not None else tuple(range(count))
    return Schedule(graph.hash, chosen, (0,) * count, (width,) * count, (0,) * count, (0,) * count)


def make_schedule(
    graph: OpGraph,
    order: Sequence[int],
    lane: Sequence[int],
    *,
    width: Sequence[int] | None = None,
    priority: Sequence[int] | None = None,
    variant: Sequence[int] | None = None,
    extra_edges: Sequence[tuple[int, int]] = (),
) -> Schedule:
    """A schedule from plain sequences, lanes renumbered by first use in launch order.

    Raises:
        IllegalSchedule: if it would not compute what the graph says.
    """
    count = len(graph)
    names: dict[int, int] = {}
    for index in order:
        names.setdefault(int(lane[index]), len(names))
    schedule = Schedule(
        graph.hash,
        tuple(int(index) for index in order),
        tuple(names[int(item)] for item in lane),
        tuple(int(item) for item in width) if width is not None else (1,) * count,
        tuple(int(item) for item in priority) if priority is not None else (0,) * count,
        tuple(int(item) for item in variant) if variant is not None else (0,) * count,
        tuple(sorted({(int(before), int(after)) for before, after in extra_edges})),
    )
    require_legal(graph, schedule)
    return schedule


def violations(graph: OpGraph, schedule: Schedule) -> list[str]:
    """Everything that makes ``schedule`` illegal for ``graph``, one line each; empty if it is legal."""
    count = len(graph)
    found: list[str] = []
    if schedule.graph_hash != graph.hash:
        found.append(f"made for graph {schedule.graph_hash[:12]}, not {graph.hash[:12]}")
    for name in ("lane", "width", "priority", "variant"):
        if len(getattr(schedule, name)) != count:
            found.append(f"{name} has {len(getattr(schedule, name))} entries for {count} operators")
    if sorted(schedule.order) != list(range(count)):
        found.append(f"the launch order is no permutation of {count} operators")
    if found:
        return found
    for name, low, high in (("lane", 0, count - 1), ("width", 1, 1024), ("priority", 0, 3), ("variant", 0, 255)):
        bad = [item for item in getattr(schedule, name) if not low <= item <= high]
        if bad:
            found.append(f"{name} {bad[0]} is outside {low} to {high}")
    place = [0] * count
    for position, index in enumerate(schedule.order):
        place[index] = position
    for edge in graph.edges:
        if place[edge.before] >= place[edge.after]:
            names = graph.operators[edge.before].name, graph.operators[edge.after].name
            found.append(f"{names[1]} is launched before {names[0]}, which it depends on ({edge.kind})")
    for before, after in schedule.extra_edges:
        if not (0 <= before < count and 0 <= after < count):
            found.append(f"extra edge ({before}, {after}) names no operator")
        elif place[before] >= place[after]:
            found.append(f"extra edge ({before}, {after}) points backwards in the launch order")
    return found


def require_legal(graph: OpGraph, schedule: Schedule) -> None:
    """Raise if the schedule would not compute what the graph says.

    Raises:
        IllegalSchedule: with the first violations.
    """
    found = violations(graph, schedule)
    if found:
        more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
        raise IllegalSchedule(f"the schedule is illegal: {'; '.join(found[:3])}{more}. Make it again with 'autosched tune'.")


def ordering_edges(graph: OpGraph, schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """The transitive reduction of all orderings: graph edges, lane order and extra edges. Sorted."""
    count = len(graph)
    direct: list[set[int]] = [set(before) for before in graph.predecessors]
    for before, after in schedule.extra_edges:
        direct[after].add(before)
    last_on_lane: dict[int, int] = {}
    for index in schedule.order:
        lane = schedule.lane[index]
        if lane in last_on_lane:
            direct[index].add(last_on_lane[lane])
        last_on_lane[lane] = index
    ancestors = [0] * count
    place = {index: position for position, index in enumerate(schedule.order)}
    kept: list[tuple[int, int]] = []
    for index in schedule.order:
        mask = 0
        # Latest first: an earlier predecessor already reached through a later one is redundant.
        for before in sorted(direct[index], key=lambda item: -place[item]):
            if not mask >> before & 1:
                kept.append((before, index))
                mask |= ancestors[before] | (1 << before)
        ancestors[index] = mask
    return tuple(sorted(kept))


def _between_wide(schedule: Schedule) -> list[list[int]]:
    """Each operator of several threads, and before, between and after them the one-thread operators, in any order."""
    found: list[list[int]] = [[]]
    for index in schedule.order:
        if schedule.width[index] > 1:
            found += [[index], []]
        else:
            found[-1].append(index)
    return [sorted(items) for items in found]


def canonical_key(graph: OpGraph, schedule: Schedule, *, lanes_matter: bool) -> str:
    """Digest that is equal for schedules that are the same program on the device.

    Inside a CUDA Graph lanes only draw edges, so the key holds the reduced ordering edges, the launch order,
    priorities and variants (``lanes_matter=False``). On CPU threads a dependency costs more across lanes than within
    one, and the launch order between lanes means nothing but for this: where operators of several threads run alone, what was launched
    before one of them runs before it, and the rest after it. The key holds each lane's sequence, and which operators lie between two of
    those (``lanes_matter=True``).
    """
    body: list[object] = [schedule.graph_hash, schedule.width, schedule.priority, schedule.variant]
    if lanes_matter:
        sequences: dict[int, list[int]] = {}
        for index in schedule.order:
            sequences.setdefault(schedule.lane[index], []).append(index)
        body += [sorted(sequences.values()), sorted(schedule.extra_edges)]
        if len(sequences) > 1 and max(schedule.width) > 1:
            body.append(_between_wide(schedule))
    else:
        body += [ordering_edges(graph, schedule), schedule.order]
    return hashlib.sha256(msgspec.json.encode(body)).hexdigest()
