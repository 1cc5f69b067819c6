"""Plans that drop too early, and the completeness of the edges that a schedule is made from."""

from __future__ import annotations

import dataclasses
import random

from hypothesis import given, settings

from autosched.core.graph import OpGraph
from autosched.runtime.plan import FreeRule, make_plan
from autosched.verify.legality import plan_violations
from tests.conformance.graphs import op_graphs, random_placement, random_program
from tests.conformance.oracles import unordered_conflicts


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
