"""What the oracle says of a plan in which one thing is wrong: that thing, and nothing of a plan that is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole
from autosched.core.program import Call, Ref
from autosched.core.schedule import make_schedule
from autosched.runtime.plan import FreeRule, Plan, Step, make_plan
from autosched.verify.legality import plan_violations

_SPEC = TensorSpec((2,), "float32", (1,))


def _operator(index: int, reads: tuple[int, ...], made: int, mutates: tuple[int, ...] = ()) -> Operator:
    call = Call("aten::fake.default", tuple(Ref(value) for value in reads), (), (made,))
    return Operator(index, f"op{index}", (call,), reads, (made,), mutates, 0, 0, 0, "", "")


def _graph() -> OpGraph:
    """Two branches of one operator, joined; beside it a view of the input that nobody reads."""
    roles = [ValueRole.INPUT, *[ValueRole.INTERMEDIATE] * 5, ValueRole.CONSTANT]
    values = [Value(index, _SPEC, role, index) for index, role in enumerate(roles)]
    values[5] = dataclasses.replace(values[5], storage=0)
    operators = (_operator(0, (0,), 1), _operator(1, (1,), 2), _operator(2, (1, 6), 3), _operator(3, (2, 3), 4), _operator(4, (0,), 5))
    graph = OpGraph(operators, tuple(values), (0,), (4,))
    graph.validate()
    return graph


GRAPH = _graph()
SCHEDULE = make_schedule(GRAPH, [0, 1, 2, 3, 4], [0, 0, 1, 0, 0])
PLAN = make_plan(GRAPH, SCHEDULE)


def step(position: int, **changes: object) -> Plan:
    steps = list(PLAN.steps)
    steps[position] = dataclasses.replace(steps[position], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(PLAN, steps=tuple(steps))


def plan(**changes: object) -> Plan:
    return dataclasses.replace(PLAN, **changes)  # type: ignore[arg-type]


def test_the_plan_is_the_one_that_the_cases_change() -> None:
    assert (
        Plan(
            GRAPH.hash,
            2,
            (
                Step(0, 0, 1, 0, 0, (), True, ()),
                Step(1, 0, 1, 0, 0, (), False, ()),
                Step(2, 1, 1, 0, 0, (0,), True, ()),
                Step(3, 0, 1, 0, 0, (2,), False, (1, 2)),
                Step(4, 0, 1, 0, 0, (), False, ()),
            ),
            (3, 4, 5),
        )
        == PLAN
    )
    assert plan_violations(GRAPH, SCHEDULE, PLAN) == []


FAULTS: dict[str, tuple[Callable[[], Plan], list[str]]] = {
    "of another graph": (lambda: plan(graph_hash="0"), ["planned for graph 0"]),
    "a step too few": (lambda: plan(steps=PLAN.steps[:-1]), ["not the operators in launch order"]),
    "a step twice": (lambda: plan(steps=(*PLAN.steps, PLAN.steps[-1])), ["not the operators in launch order"]),
    "in another order": (lambda: plan(steps=(*PLAN.steps[:3], PLAN.steps[4], PLAN.steps[3])), ["not the operators in launch order"]),
    "on another lane": (lambda: step(2, lane=0), ["op2 has lane, width, priority, variant (0, 1, 0, 0)"]),
    "of another width": (lambda: step(2, width=2), ["op2 has lane, width, priority, variant (1, 2, 0, 0)"]),
    "of another priority": (lambda: step(2, priority=2), ["op2 has lane, width, priority, variant (1, 1, 2, 0)"]),
    "of another variant": (lambda: step(2, variant=2), ["op2 has lane, width, priority, variant (1, 1, 0, 2)"]),
    "of too few lanes": (lambda: plan(lanes=1), ["op2 is on lane 1 of 1"]),
    "without the wait of a lane": (lambda: step(2, waits=()), ["op2 does not wait for op0 (data edge)"]),
    "without the wait of the join": (lambda: step(3, waits=()), ["op3 does not wait for op2 (data edge)", "value 1 is dropped after op3"]),
    "waiting for a later one": (lambda: step(2, waits=(0, 4)), ["op2 waits for operator 4, which is launched later"]),
    "waiting for itself": (lambda: step(2, waits=(0, 2)), ["op2 waits for operator 2, which is launched later"]),
    "waiting for nobody's event": (lambda: step(2, waits=(0, 1)), ["op2 waits for op1, which records no event"]),
    "waiting for its own lane": (lambda: step(3, waits=(0, 2)), ["op3 waits for op0 on its own lane"]),
    "an event that is not recorded": (
        lambda: step(0, records=False),
        ["op2 waits for op0, which records no event", "op2 does not wait for op0"],
    ),
    "dropped twice": (lambda: step(4, frees=(2,)), ["value 2 is dropped twice, the second time after op4"]),
    "dropped by another lane": (lambda: step(3, frees=(1, 2, 3)), ["value 3 is dropped by lane 0 after op3, but lane 1 allocated it"]),
    "dropped before a user": (lambda: step(1, frees=(1,)), ["value 1 is dropped after op1, which does not follow its user op2"]),
    "dropped before it is made": (lambda: step(0, frees=(2,)), ["does not follow its user op1", "does not follow its user op3"]),
    "an output dropped": (lambda: step(4, frees=(4,)), ["value 4 is dropped after op4, but an output lives in its memory"]),
    "an input dropped": (lambda: step(4, frees=(0,)), ["value 0 is dropped after op4, but its memory is not the plan's"]),
    "a constant dropped": (lambda: step(2, frees=(6,)), ["value 6 is dropped after op2, but its memory is not the plan's"]),
    "a view of an input dropped": (lambda: step(4, frees=(5,)), ["value 5 is dropped after op4, but its memory is not the plan's"]),
    "neither dropped nor held": (lambda: plan(held=(3, 5)), ["values [4] are neither dropped once nor held"]),
    "dropped and held": (lambda: plan(held=(1, 3, 4, 5)), ["values [1] are neither dropped once nor held"]),
    "an input held": (lambda: plan(held=(0, 3, 4, 5)), ["values [0] are neither dropped once nor held"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_with_a_plan_is_named(name: str) -> None:
    change, words = FAULTS[name]
    found = plan_violations(GRAPH, SCHEDULE, change())
    for wanted in words:
        assert any(wanted in line for line in found), found


def test_a_view_of_a_constant_is_not_dropped() -> None:
    values = list(GRAPH.values)
    values[5] = dataclasses.replace(values[5], storage=6)
    graph = dataclasses.replace(GRAPH, values=tuple(values), operators=(*GRAPH.operators[:4], _operator(4, (6,), 5)))
    graph.validate()
    schedule = make_schedule(graph, SCHEDULE.order, SCHEDULE.lane)
    right = make_plan(graph, schedule)
    assert plan_violations(graph, schedule, right) == []
    steps = (*right.steps[:4], dataclasses.replace(right.steps[4], frees=(5,)))
    dropped = dataclasses.replace(right, steps=steps, held=tuple(value for value in right.held if value != 5))
    assert any("not the plan's to give back" in line for line in plan_violations(graph, schedule, dropped))


def test_an_extra_edge_is_to_be_kept_as_well() -> None:
    extra = dataclasses.replace(SCHEDULE, extra_edges=((1, 2),))
    assert plan_violations(GRAPH, extra, PLAN) == ["op2 does not wait for op1 (extra edge)"]
    assert plan_violations(GRAPH, extra, make_plan(GRAPH, extra)) == []


def test_of_an_illegal_schedule_that_alone_is_said() -> None:
    illegal = dataclasses.replace(SCHEDULE, order=(1, 0, 2, 3, 4))
    assert plan_violations(GRAPH, illegal, PLAN) == ["op1 is launched before op0, which it depends on (data)"]


def test_nothing_need_be_dropped() -> None:
    held = make_plan(GRAPH, SCHEDULE, FreeRule.HOLD_ALL)
    assert held.held == (1, 2, 3, 4, 5)
    assert plan_violations(GRAPH, SCHEDULE, held) == []


def test_what_happened_before_is_known_through_others() -> None:
    """The last operator follows the first by two waits, neither of which is for it."""
    values = tuple(Value(index, _SPEC, ValueRole.INPUT if index == 0 else ValueRole.INTERMEDIATE, index) for index in range(4))
    operators = (_operator(0, (0,), 1), _operator(1, (1,), 2), _operator(2, (1, 2), 3))
    graph = OpGraph(operators, values, (0,), (3,))
    schedule = make_schedule(graph, [0, 1, 2], [0, 1, 2])
    chain = make_plan(graph, schedule)
    assert [each.waits for each in chain.steps] == [(), (0,), (1,)]
    assert plan_violations(graph, schedule, chain) == []
