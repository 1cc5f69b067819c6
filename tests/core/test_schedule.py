"""The legality oracle, and when two schedules are the same program."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any

import msgspec
import pytest

from autosched.core.errors import IllegalSchedule
from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole
from autosched.core.program import Call, Ref
from autosched.core.schedule import Schedule, canonical_key, make_schedule, ordering_edges, require_legal, sequential, violations
from tests.conformance.graphs import random_placement, random_program


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
        ({"order": (1, 0, 2)}, "op1 is launched before op0, which it depends on (data)"),
        ({"order": (0, 1, 1)}, "no permutation"),
        ({"order": (0, 1)}, "no permutation"),
        ({"order": (0, 1, 2, 3)}, "no permutation"),
        ({"lane": (0, 0)}, "lane has 2 entries for 3"),
        ({"width": (1,) * 4}, "width has 4 entries for 3"),
        ({"priority": ()}, "priority has 0 entries for 3"),
        ({"variant": (0,) * 4}, "variant has 4 entries for 3"),
        ({"lane": (0, 0, 3)}, "lane 3 is outside 0 to 2"),
        ({"lane": (0, 0, -1)}, "lane -1"),
        ({"width": (0, 1, 1)}, "width 0"),
        ({"width": (1, 1, 1025)}, "width 1025"),
        ({"priority": (4, 0, 0)}, "priority 4"),
        ({"priority": (0, -1, 0)}, "priority -1"),
        ({"variant": (0, 256, 0)}, "variant 256"),
        ({"variant": (0, -1, 0)}, "variant -1"),
        ({"extra_edges": ((2, 1),)}, "backwards"),
        ({"extra_edges": ((1, 1),)}, "backwards"),
        ({"extra_edges": ((1, 2), (2, 1))}, "extra edge (2, 1) points backwards"),
        ({"extra_edges": ((0, 3),)}, "no operator"),
        ({"extra_edges": ((-1, 0),)}, "no operator"),
        ({"graph_hash": "x"}, "made for graph x"),
    ],
)
def test_every_kind_of_violation_is_named(change: dict[str, object], message: str) -> None:
    graph = fork()
    schedule = dataclasses.replace(sequential(graph), **change)
    assert any(message in line for line in violations(graph, schedule))
    with pytest.raises(IllegalSchedule, match=re.escape(message)):
        require_legal(graph, schedule)


def test_the_largest_of_everything_is_legal() -> None:
    graph = fork()
    schedule = dataclasses.replace(sequential(graph), lane=(0, 1, 2), width=(1, 1, 1024), priority=(3, 0, 0), variant=(0, 0, 255))
    assert violations(graph, schedule) == []
    assert (schedule.lanes, schedule.lane_slots) == (3, 3)


def test_an_operator_may_not_be_launched_before_one_that_it_depends_on_whatever_lies_between() -> None:
    graph = fork(4)
    schedule = dataclasses.replace(sequential(graph), order=(1, 2, 0, 3, 4))
    assert len(violations(graph, schedule)) == 2


def test_of_many_violations_three_are_named_and_the_others_counted() -> None:
    graph = fork(5)
    for order, counted in (((1, 2, 3, 0, 4, 5), False), ((1, 2, 3, 4, 5, 0), True)):
        with pytest.raises(IllegalSchedule) as caught:
            require_legal(graph, dataclasses.replace(sequential(graph), order=order))
        assert str(caught.value).count("launched before") == 3
        assert ("(and 2 more)" in str(caught.value)) is counted
        assert ("more)" in str(caught.value)) is counted


def test_a_graph_of_nothing_has_a_schedule() -> None:
    empty = OpGraph((), (), (), ())
    schedule = make_schedule(empty, [], [])
    assert violations(empty, schedule) == []
    assert (schedule.lanes, schedule.lane_slots) == (0, 0)
    assert ordering_edges(empty, schedule) == ()
    assert canonical_key(empty, schedule, lanes_matter=True)


def test_a_schedule_is_made_in_one_form() -> None:
    graph = fork()
    schedule = make_schedule(
        graph, [0, 2, 1], [7, 3, 5], width=[1, 2, 3], priority=[3, 2, 1], variant=[0, 1, 2], extra_edges=[(2, 1), (0, 1), (2, 1)]
    )
    assert schedule == Schedule(graph.hash, (0, 2, 1), (0, 2, 1), (1, 2, 3), (3, 2, 1), (0, 1, 2), ((0, 1), (2, 1)))
    assert sequential(graph, width=3, order=[0, 2, 1]) == Schedule(graph.hash, (0, 2, 1), (0,) * 3, (3,) * 3, (0,) * 3, (0,) * 3)


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


def test_on_threads_it_matters_on_which_side_of_the_first_of_two_wide_operators_another_lane_is_launched() -> None:
    graph = fork(5)
    lanes, widths = [0, 0, 1, 1, 0, 1], [1, 2, 1, 1, 2, 1]
    one, other = (make_schedule(graph, order, lanes, width=widths) for order in ([0, 1, 2, 3, 4, 5], [0, 2, 1, 3, 4, 5]))
    assert canonical_key(graph, one, lanes_matter=True) != canonical_key(graph, other, lanes_matter=True)


def test_ordering_edges_are_reduced() -> None:
    graph = fork(3)
    schedule = sequential(graph)
    assert ordering_edges(graph, schedule) == ((0, 1), (1, 2), (2, 3))
    spread = make_schedule(graph, [0, 1, 2, 3], [0, 0, 1, 2], extra_edges=[(1, 2)])
    assert ordering_edges(graph, spread) == ((0, 1), (0, 3), (1, 2))


@pytest.mark.parametrize("lanes_matter", [False, True])
@pytest.mark.parametrize(
    "change",
    [{"width": (1, 2, 1)}, {"priority": (0, 1, 0)}, {"variant": (0, 1, 0)}, {"graph_hash": "x"}, {"extra_edges": ((1, 2),)}],
    ids=str,
)
def test_what_changes_the_program_on_the_device_changes_its_key(change: dict[str, Any], lanes_matter: bool) -> None:
    graph = fork()
    one = make_schedule(graph, [0, 1, 2], [0, 0, 1])
    other = dataclasses.replace(one, **change)
    assert canonical_key(graph, one, lanes_matter=lanes_matter) != canonical_key(graph, other, lanes_matter=lanes_matter)


def test_an_edge_that_the_graph_has_anyway_is_no_other_program_in_a_cuda_graph() -> None:
    graph = fork()
    one, other = (make_schedule(graph, [0, 1, 2], [0, 0, 1], extra_edges=extra) for extra in ((), [(0, 2)]))
    assert canonical_key(graph, one, lanes_matter=False) == canonical_key(graph, other, lanes_matter=False)


def test_on_threads_the_numbers_of_lanes_mean_nothing() -> None:
    graph = fork()
    one = make_schedule(graph, [0, 1, 2], [0, 0, 1])
    renamed = dataclasses.replace(one, lane=(1, 1, 0))
    assert canonical_key(graph, one, lanes_matter=True) == canonical_key(graph, renamed, lanes_matter=True)


def test_on_one_thread_lane_a_wide_operator_needs_no_others_beside_it() -> None:
    """What lies between wide operators is a matter of several lanes: on one, the sequence has said it."""
    graph = fork()
    key = canonical_key(graph, sequential(graph, width=2), lanes_matter=True)
    assert key != canonical_key(graph, sequential(graph, width=2, order=[0, 2, 1]), lanes_matter=True)


def _orderings(graph: OpGraph, schedule: Schedule) -> set[tuple[int, int]]:
    """All pairs that something orders: the graph, an extra edge, or a lane; found step by step."""
    found = {(edge.before, edge.after) for edge in graph.edges} | set(schedule.extra_edges)
    for place, first in enumerate(schedule.order):
        found |= {(first, later) for later in schedule.order[place + 1 :] if schedule.lane[later] == schedule.lane[first]}
    return _closed(found)


def _closed(pairs: set[tuple[int, int]]) -> set[tuple[int, int]]:
    while more := {(a, d) for a, b in pairs for c, d in pairs if b == c} - pairs:
        pairs = pairs | more
    return pairs


def test_ordering_edges_say_all_that_is_ordered_and_nothing_twice() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        graph = random_program(rng, 9)[0].graph
        schedule = random_placement(rng, graph, 3, extra_edges=2)
        edges = ordering_edges(graph, schedule)
        assert list(edges) == sorted(set(edges))
        assert _closed(set(edges)) == _orderings(graph, schedule)
        for edge in edges:
            assert edge not in _closed(set(edges) - {edge})
