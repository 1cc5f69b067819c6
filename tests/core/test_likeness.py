"""Two captures of one computation, numbered differently, share a key and a schedule."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from autosched.core.errors import IllegalSchedule
from autosched.core.graph import Operator, OpGraph
from autosched.core.likeness import structure_key, transfer
from autosched.core.schedule import Schedule, make_schedule, violations
from tests.conformance.graphs import Recorder, op_graphs, placements, random_order

_SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def reordered(graph: OpGraph, order: list[int]) -> OpGraph:
    """The same operators, listed in another topological order."""
    operators: list[Operator] = [dataclasses.replace(graph.operators[index], index=place) for place, index in enumerate(order)]
    return OpGraph(tuple(operators), graph.values, graph.inputs, graph.outputs)


def other_way_round(graph: OpGraph) -> OpGraph:
    return OpGraph(graph.operators, graph.values, tuple(reversed(graph.inputs)), tuple(reversed(graph.outputs)))


@given(st.data(), st.integers(0, 2**16))
@_SETTINGS
def test_a_transferred_schedule_is_legal_and_says_the_same(data: st.DataObject, seed: int) -> None:
    graph = data.draw(op_graphs())
    schedule: Schedule = data.draw(placements(graph))
    target = other_way_round(reordered(graph, random_order(random.Random(seed), graph)))
    target.validate()
    assert structure_key(target) == structure_key(graph)
    try:
        moved = transfer(schedule, graph, target)
    except IllegalSchedule:
        # Operators that cannot be told apart may be matched crosswise; then it must say so. Not often: reject() keeps count.
        reject()
    assert violations(target, moved) == []
    assert sorted(moved.width) == sorted(schedule.width)
    assert moved.lanes == schedule.lanes
    assert len(moved.extra_edges) == len(schedule.extra_edges)


@given(st.data())
@_SETTINGS
def test_to_the_graph_itself_nothing_changes(data: st.DataObject) -> None:
    graph = data.draw(op_graphs())
    schedule: Schedule = data.draw(placements(graph))
    assert transfer(schedule, graph, graph) == schedule


def test_operators_that_begin_alike_are_told_apart_by_what_comes_of_them() -> None:
    recorder = Recorder()
    x, y = (recorder.input(torch.randn(4)) for _ in range(2))
    begun = recorder.run("aten::sin.default", x), recorder.run("aten::sin.default", y)
    ends = recorder.run("aten::relu.default", begun[0]), recorder.run("aten::tanh.default", begun[1])
    graph = recorder.build(list(ends), result=list(ends)).graph
    # A lane for each chain; the other graph lists the second chain first.
    moved = transfer(make_schedule(graph, range(4), [0, 1, 0, 1]), graph, reordered(graph, [1, 3, 0, 2]))
    assert moved.lane == (1, 1, 0, 0)
    assert moved.order == (2, 0, 3, 1)


@given(st.data())
@_SETTINGS
def test_another_graph_is_refused(data: st.DataObject) -> None:
    one, other = data.draw(op_graphs()), data.draw(op_graphs())
    schedule: Schedule = data.draw(placements(one))
    if structure_key(one) == structure_key(other):
        return
    if one.hash == other.hash:
        pytest.fail("equal hashes, different keys")
    if len(one) != len(other):
        with pytest.raises(IllegalSchedule, match="compute different things"):
            transfer(schedule, one, other)
