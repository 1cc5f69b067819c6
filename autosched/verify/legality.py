"""An oracle for plans that shares nothing with the code that makes them.

``make_plan`` reasons with vector clocks; this reasons with explicit sets of ancestors over lane order and waits. Where
the two disagree one of them is wrong, and no plan runs that has a line here.
"""

from __future__ import annotations

from collections.abc import Sequence

from autosched.core.graph import OpGraph, ValueRole
from autosched.core.schedule import Schedule, violations
from autosched.runtime.plan import Plan, Step


def plan_violations(graph: OpGraph, schedule: Schedule, plan: Plan) -> list[str]:
    """Everything that makes ``plan`` wrong for ``schedule``, one line each; empty if it is safe.

    Checked are: that every operator is launched once, where and when the schedule says; that every edge of the graph and every
    extra edge is ordered by lane order and waits; and that a storage is dropped once, by the lane that allocated it, after every
    use of it or of a view of it has happened before (the condition under which an allocator that hands memory back to the same lane
    cannot cause a race, and under which no thread finds a value gone).
    """
    found = violations(graph, schedule)
    if found:
        return found
    found = _misplaced(graph, schedule, plan)
    if found:
        return found
    before, waits = _happens_before(graph, plan)
    found += waits
    names = [operator.name for operator in graph.operators]
    required = [(edge.before, edge.after, str(edge.kind)) for edge in graph.edges]
    required += [(first, last, "extra") for first, last in schedule.extra_edges]
    for first, last, kind in required:
        if not before[last] >> first & 1:
            found.append(f"{names[last]} does not wait for {names[first]} ({kind} edge)")
    found += _unsafe_frees(graph, plan, before)
    return found


def _misplaced(graph: OpGraph, schedule: Schedule, plan: Plan) -> list[str]:
    if plan.graph_hash != graph.hash:
        return [f"planned for graph {plan.graph_hash[:12]}, not {graph.hash[:12]}"]
    if [step.operator for step in plan.steps] != list(schedule.order):
        return ["the steps are not the operators in launch order"]
    found: list[str] = []
    for step in plan.steps:
        planned = (step.lane, step.width, step.priority, step.variant)
        index = step.operator
        wanted = (schedule.lane[index], schedule.width[index], schedule.priority[index], schedule.variant[index])
        if planned != wanted:
            found.append(f"{graph.operators[index].name} has lane, width, priority, variant {planned}; the schedule says {wanted}")
        if not 0 <= step.lane < plan.lanes:
            found.append(f"{graph.operators[index].name} is on lane {step.lane} of {plan.lanes}")
    return found


def _happens_before(graph: OpGraph, plan: Plan) -> tuple[list[int], list[str]]:
    """For each operator, a bit mask of everything known to be finished when it starts; and waits that cannot work."""
    found: list[str] = []
    before = [0] * len(graph)
    launched: dict[int, Step] = {}
    last: dict[int, int] = {}
    for step in plan.steps:
        name = graph.operators[step.operator].name
        direct = [last[step.lane]] if step.lane in last else []
        for producer in step.waits:
            earlier = launched.get(producer)
            if earlier is None:
                found.append(f"{name} waits for operator {producer}, which is launched later")
            elif not earlier.records:
                found.append(f"{name} waits for {graph.operators[producer].name}, which records no event")
            elif earlier.lane == step.lane:
                found.append(f"{name} waits for {graph.operators[producer].name} on its own lane")
            else:
                direct.append(producer)
        for producer in direct:
            before[step.operator] |= before[producer] | (1 << producer)
        launched[step.operator] = step
        last[step.lane] = step.operator
    return before, found


def _unsafe_frees(graph: OpGraph, plan: Plan, before: Sequence[int]) -> list[str]:
    found: list[str] = []
    lane_of = {step.operator: step.lane for step in plan.steps}
    kept = {graph.values[value].storage for value in graph.outputs}
    dropped: set[int] = set()
    for step in plan.steps:
        name = graph.operators[step.operator].name
        done = before[step.operator] | (1 << step.operator)
        for value in step.frees:
            storage = graph.values[value].storage
            owner = graph.values[storage]
            uses = graph.storage_uses.get(storage, ())
            if value in dropped:
                found.append(f"value {value} is dropped twice, the second time after {name}")
            dropped.add(value)
            if graph.values[value].role is not ValueRole.INTERMEDIATE or owner.role in (ValueRole.INPUT, ValueRole.CONSTANT):
                found.append(f"value {value} is dropped after {name}, but its memory is not the plan's to give back")
            if storage in kept:
                found.append(f"value {value} is dropped after {name}, but an output lives in its memory")
            if uses and lane_of[uses[0]] != step.lane:
                found.append(f"value {value} is dropped by lane {step.lane} after {name}, but lane {lane_of[uses[0]]} allocated it")
            for user in uses:
                if not done >> user & 1:
                    found.append(f"value {value} is dropped after {name}, which does not follow its user {graph.operators[user].name}")
    rest = {value.index for value in graph.values if value.role is ValueRole.INTERMEDIATE} - dropped
    if rest != set(plan.held):
        found.append(f"values {sorted(rest ^ set(plan.held))[:5]} are neither dropped once nor held to the end")
    return found
