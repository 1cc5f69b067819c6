"""The legality oracle, and when two schedules are the same program."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from autosched.core.errors import IllegalSchedule
from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole
from autosched.core.program import Call, Ref
from autosched.core.schedule import Schedule, canonical_key, make_schedule, ordering_edges, sequential, violations


def fork(branches: int = 2) -> OpGraph:
    """One operator, then ``branches`` that read it."""
    spec = TensorSpec((2,), "float32", (1,))
    roles = [ValueRole.INPUT] + [ValueRole.INTERMEDIATE] * (branches + 1)
    values = tuple(Value(index, spec, role, index) for index, role in enumerate(roles))

    def unary(index: int, source: int) -> Operator:
        call = Call("aten::relu.default", (Ref(source),), (), (index + 1,))
        return Operator(index, f"op{index}", (call,), (source,), (index + 1,), (), 2, 8, 8, "relu", "")

    operators = (unary(0, 0), *(unary(index, 1) for index in range(1, branches + 1)))
    return OpGraph(operators, values, (0,), tuple(range(2, branches + 2)))


def test_a_legal_schedule_has_no_violations_and_survives_json() -> None:
    graph = fork()
    schedule = make_schedule(graph, [0, 2, 1], [0, 1, 0], extra_edges=[(2, 1)])
    assert violations(graph, schedule) == []
    assert msgspec.json.decode(schedule.to_json(), type=Schedule) == schedule


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": (1, 0, 2)}, "launched before"),
        ({"order": (0, 1, 1)}, "no permutation"),
        ({"lane": (0, 0)}, "2 entries for 3"),
        ({"lane": (0, 0, 7)}, "lane 7"),
        ({"width": (0, 1, 1)}, "width 0"),
        ({"priority": (9, 0, 0)}, "priority 9"),
        ({"extra_edges": ((2, 1),)}, "backwards"),
        ({"extra_edges": ((0, 9),)}, "no operator"),
        ({"graph_hash": "x"}, "made for graph x"),
    ],
)
def test_every_kind_of_violation_is_named(change: dict[str, object], message: str) -> None:
    graph = fork()
    schedule = dataclasses.replace(sequential(graph), **change)
    assert any(message in line for line in violations(graph, schedule))


def test_making_an_illegal_schedule_raises() -> None:
    with pytest.raises(IllegalSchedule, match="launched before"):
        make_schedule(fork(), [1, 0, 2], [0, 0, 0])


def test_in_a_cuda_graph_lane_numbers_mean_nothing_but_launch_order_does() -> None:
    graph = fork()
    one = make_schedule(graph, [0, 1, 2], [0, 0, 1])
    renamed = dataclasses.replace(one, lane=(1, 1, 0))
    moved = make_schedule(graph, [0, 1, 2], [0, 1, 0])  # the other branch shares the lane: the same edges
    reordered = make_schedule(graph, [0, 2, 1], [0, 0, 1])
    keys = {canonical_key(graph, item, lanes_matter=False) for item in (one, renamed, moved)}
    assert len(keys) == 1
    assert canonical_key(graph, reordered, lanes_matter=False) not in keys


def test_on_threads_lanes_mean_something_but_the_order_between_them_does_not() -> None:
    graph = fork()
    one = make_schedule(graph, [0, 1, 2], [0, 0, 1])
    reordered = make_schedule(graph, [0, 2, 1], [0, 0, 1])
    moved = make_schedule(graph, [0, 1, 2], [0, 1, 0])
    assert canonical_key(graph, one, lanes_matter=True) == canonical_key(graph, reordered, lanes_matter=True)
    assert canonical_key(graph, one, lanes_matter=True) != canonical_key(graph, moved, lanes_matter=True)


def test_on_threads_it_matters_which_side_of_a_wide_operator_another_lane_is_launched() -> None:
    graph = fork(4)
    one = make_schedule(graph, [0, 1, 2, 3, 4], [0, 0, 1, 1, 0], width=[1, 2, 1, 1, 1])
    same = make_schedule(graph, [0, 1, 2, 4, 3], [0, 0, 1, 1, 0], width=[1, 2, 1, 1, 1])
    before = make_schedule(graph, [0, 2, 1, 3, 4], [0, 0, 1, 1, 0], width=[1, 2, 1, 1, 1])
    assert canonical_key(graph, one, lanes_matter=True) == canonical_key(graph, same, lanes_matter=True)
    assert canonical_key(graph, one, lanes_matter=True) != canonical_key(graph, before, lanes_matter=True)


def test_ordering_edges_are_reduced() -> None:
    graph = fork(3)
    schedule = sequential(graph)
    assert ordering_edges(graph, schedule) == ((0, 1), (1, 2), (2, 3))
    spread = make_schedule(graph, [0, 1, 2, 3], [0, 0, 1, 2], extra_edges=[(1, 2)])
    assert ordering_edges(graph, spread) == ((0, 1), (0, 3), (1, 2))
