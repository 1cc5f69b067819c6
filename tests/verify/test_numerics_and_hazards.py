"""Verification of one schedule: its numbers, and the completeness of the edges it was made from."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import torch
from hypothesis import given, settings

from autosched.core.graph import OpGraph
from autosched.core.records import Failure, FailureKind
from autosched.device.base import Comparison
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.plan import FreeRule, make_plan
from autosched.verify.legality import plan_violations
from autosched.verify.numerics import verify_numerics
from tests.conformance.graphs import op_graphs, random_placement, random_program
from tests.conformance.oracles import unordered_conflicts


def test_a_sound_schedule_is_bitwise_equal_to_its_operators_in_order() -> None:
    program, constants = random_program(random.Random(3), 16)
    bound = bind(program, constants)
    inputs = [random_inputs(program, seed) for seed in range(3)]
    references = [bound.run(given) for given in inputs]
    runner = LaneExecutor(bound, make_plan(program.graph, random_placement(random.Random(3), program.graph, 2)))
    assert verify_numerics(runner.run, bound.run, inputs, references) == Comparison(True, 0.0, True)


def test_a_run_that_ignores_its_inputs_is_a_mismatch() -> None:
    program, constants = random_program(random.Random(4), 16)
    bound = bind(program, constants)
    inputs = [random_inputs(program, seed) for seed in range(3)]
    references = [bound.run(given) for given in inputs]
    failure = verify_numerics(lambda given: references[0], bound.run, inputs, references)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.MISMATCH
    assert failure.detail.startswith("input set 1")


def test_a_value_that_is_no_number_is_named_so() -> None:
    def broken(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.full_like(given[0], float("nan"))]

    inputs = [[torch.ones(3)]]
    failure = verify_numerics(broken, list, inputs, inputs)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.NONFINITE


def test_a_plan_that_drops_too_early_is_refused() -> None:
    refused = 0
    for seed in range(10):
        graph = random_program(random.Random(seed), 20)[0].graph
        schedule = random_placement(random.Random(seed), graph, 3)
        assert plan_violations(graph, schedule, make_plan(graph, schedule)) == []
        found = plan_violations(graph, schedule, make_plan(graph, schedule, FreeRule.LAST_LAUNCH))
        assert all("dropped" in violation for violation in found)
        refused += bool(found)
    assert refused >= 8


@settings(max_examples=150, deadline=None, derandomize=True)
@given(op_graphs())
def test_the_edges_of_a_graph_order_every_conflict(graph: OpGraph) -> None:
    assert unordered_conflicts(graph) == []


def test_a_conflict_without_an_edge_is_found() -> None:
    graph = random_program(random.Random(2), 20)[0].graph
    assert unordered_conflicts(graph) == []
    unordered = dataclasses.replace(graph)
    # What a wrong derivation of edges would leave behind.
    unordered.__dict__["reachable"] = (0,) * len(graph)
    assert len(unordered_conflicts(unordered)) > 3
