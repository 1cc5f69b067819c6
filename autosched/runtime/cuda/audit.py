"""Static audit: is the captured graph a correct form of the plan? Decided from nodes, edges and addresses, without running anything.

Sound, not heuristic: a graph that passes orders every dependency and every reuse of memory, whatever the device does with the
order that is left open. A violation names the operators. One thing is taken on trust: a kernel that its library launches early
(programmatic dependent launch) waits by itself before it touches memory. The report counts such edges.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from autosched.core.graph import OpGraph
from autosched.core.in_place import others_using, overwriting
from autosched.runtime.cuda.captured import CapturedGraph, NodeKind, StorageSpan
from autosched.runtime.plan import Plan

_MOST_LINES = 20


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What was checked, and everything found wrong, one line each; ``problems`` is empty if the graph is sound."""

    problems: tuple[str, ...]
    orderings_checked: int
    reuses_checked: int
    early_edges: int = 0

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def audit_graph(graph: OpGraph, plan: Plan, captured: CapturedGraph, *, expected_nodes: Sequence[int] | None = None) -> AuditReport:
    """Check a captured graph against the operator graph (safety) and the plan (fidelity).

    1. Every edge of the graph, and every lane order and wait of the plan, is an ordering of the captured nodes (by transitive closure).
    2. Wherever two storages share an address, all users of one come before all users of the other.
    3. Every node belongs to an operator, and every operator has as many nodes as it launches on one stream (``expected_nodes``).
    4. Operators' memory lies in the graph's private pool; nothing was launched beside the capture.
    5. Where an operator overwrites a value, whoever else uses that memory comes before it; who reads the new value comes after it by 1.

    Operators that launch nothing (views) have no nodes: what they depend on must then come before whatever depends on them.

    Args:
        expected_nodes: nodes of each operator in a capture of the same operators on one stream; None to skip that check.
    """
    problems: list[str] = []
    ancestors = _ancestors(captured)
    masks = [0] * len(graph)
    for index, node in enumerate(captured.nodes):
        if node.operator >= 0:
            masks[node.operator] |= 1 << index
    before = [0] * len(graph)
    for operator, mask in enumerate(masks):
        before[operator] = _all_before(mask, ancestors)

    orderings = 0
    for kind, predecessors in (("data", _data_predecessors(graph)), ("planned", _planned_predecessors(graph, plan))):
        effective = _through_nodeless(predecessors, masks, plan)
        for operator, earlier in effective.items():
            for other in sorted(earlier):
                orderings += 1
                if masks[other] & ~before[operator]:
                    problems.append(
                        f"{kind} order is not in the graph: {_name(graph, other)} may still run when {_name(graph, operator)} starts"
                    )
    reuses = _check_memory(graph, captured, masks, before, problems) + _check_overwritten(graph, captured, masks, before, problems)
    _check_nodes(graph, captured, masks, expected_nodes, problems)
    if len(problems) > _MOST_LINES:
        problems = [*problems[:_MOST_LINES], f"and {len(problems) - _MOST_LINES} more"]
    return AuditReport(tuple(problems), orderings, reuses, captured.early_edges)


def node_counts(graph: OpGraph, captured: CapturedGraph) -> tuple[int, ...]:
    """How many nodes each operator launched: the ``expected_nodes`` of other schedules of the same operators."""
    counts = [0] * len(graph)
    for node in captured.nodes:
        if node.operator >= 0:
            counts[node.operator] += 1
    return tuple(counts)


def _ancestors(captured: CapturedGraph) -> list[int]:
    """For each node a bit mask of the nodes that must have ended before it starts."""
    count = len(captured.nodes)
    direct: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for earlier, later in captured.edges:
        direct[later].append(earlier)
        after[earlier].append(later)
    waiting = [len(items) for items in direct]
    ready = [index for index in range(count) if waiting[index] == 0]
    masks = [0] * count
    while ready:
        index = ready.pop()
        for earlier in direct[index]:
            masks[index] |= masks[earlier] | (1 << earlier)
        for later in after[index]:
            waiting[later] -= 1
            if waiting[later] == 0:
                ready.append(later)
    return masks


def _all_before(mask: int, ancestors: Sequence[int]) -> int:
    """Nodes that have ended before *any* node of the set starts (its own nodes count as such)."""
    if mask == 0:
        return -1  # launches nothing, so nothing of it can start too early
    common = -1
    for index in _bits(mask):
        common &= ancestors[index] | mask
    return common


def _bits(mask: int) -> list[int]:
    found: list[int] = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _data_predecessors(graph: OpGraph) -> list[set[int]]:
    return [set(items) for items in graph.predecessors]


def _planned_predecessors(graph: OpGraph, plan: Plan) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in range(len(graph))]
    last: dict[int, int] = {}
    for step in plan.steps:
        found[step.operator].update(step.waits)
        if step.lane in last:
            found[step.operator].add(last[step.lane])
        last[step.lane] = step.operator
    return found


def _through_nodeless(predecessors: list[set[int]], masks: Sequence[int], plan: Plan) -> dict[int, set[int]]:
    """Predecessors with nodes, reached directly or through operators that have none."""
    effective: dict[int, set[int]] = {}
    for step in plan.steps:
        reached: set[int] = set()
        for earlier in predecessors[step.operator]:
            if masks[earlier]:
                reached.add(earlier)
            else:
                reached |= effective.get(earlier, set())
        effective[step.operator] = reached
    return {operator: reached for operator, reached in effective.items() if masks[operator]}


def _check_memory(graph: OpGraph, captured: CapturedGraph, masks: Sequence[int], before: Sequence[int], problems: list[str]) -> int:
    checked = 0
    live: list[StorageSpan] = []
    for item in sorted(captured.spans, key=lambda entry: entry.span.start):
        live = [other for other in live if other.span.end > item.span.start]
        for other in live:
            if other.span.overlaps(item.span):
                checked += 1
                first, second = graph.storage_uses.get(other.storage, ()), graph.storage_uses.get(item.storage, ())
                if not (_all_ordered(first, second, masks, before) or _all_ordered(second, first, masks, before)):
                    problems.append(
                        f"memory is used again too early: values {other.storage} ({_names(graph, first)}) and {item.storage} "
                        f"({_names(graph, second)}) share address {item.span.start:#x}, and nothing orders their users"
                    )
        live.append(item)
    if captured.pool:
        for item in captured.spans:
            if item.span.bytes and not any(segment.start <= item.span.start and item.span.end <= segment.end for segment in captured.pool):
                users = _names(graph, graph.storage_uses.get(item.storage, ()))
                problems.append(
                    f"value {item.storage} ({users}) is outside the graph's private pool: its stream had not joined the capture"
                )
    return checked


def _check_overwritten(graph: OpGraph, captured: CapturedGraph, masks: Sequence[int], before: Sequence[int], problems: list[str]) -> int:
    checked = 0
    for link in captured.overwritten:
        for writer, other in itertools.product(overwriting(graph, link), others_using(graph, link)):
            checked += 1
            if masks[other] & ~before[writer]:
                problems.append(
                    f"memory is overwritten too early: {_name(graph, writer)} makes value {link.after} in that of {link.before}, "
                    f"which {_name(graph, other)} may still read"
                )
    return checked


def _all_ordered(earlier: Sequence[int], later: Sequence[int], masks: Sequence[int], before: Sequence[int]) -> bool:
    needed = 0
    for operator in earlier:
        if masks[operator] and operator in later:
            return False  # it needs both at the same time
        needed |= masks[operator]
    return all(not needed & ~before[operator] for operator in later)


def _check_nodes(
    graph: OpGraph, captured: CapturedGraph, masks: Sequence[int], expected: Sequence[int] | None, problems: list[str]
) -> None:
    foreign = sum(1 for node in captured.nodes if node.operator < 0 and node.kind not in (NodeKind.EVENT, NodeKind.EMPTY))
    if foreign:
        problems.append(f"{foreign} nodes belong to no operator")
    if captured.stray_launches > 0:
        problems.append(f"{captured.stray_launches} kernels were launched on a stream outside the capture and are missing from the graph")
    if expected is None:
        return
    for operator, count in enumerate(expected):
        found = masks[operator].bit_count()
        if found != count:
            problems.append(f"{_name(graph, operator)} has {found} nodes; expected {count}, as on one stream")


def _name(graph: OpGraph, operator: int) -> str:
    return graph.operators[operator].name


def _names(graph: OpGraph, operators: Sequence[int]) -> str:
    return ", ".join(_name(graph, operator) for operator in operators[:4]) + (", ..." if len(operators) > 4 else "")
