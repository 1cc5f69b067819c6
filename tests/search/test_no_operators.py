"""A model that only hands its inputs on has nothing to schedule, which is no reason to warn (warnings are errors in these tests)."""

from __future__ import annotations

import numpy as np
import pytest

from autosched.search.problem import Problem
from autosched.search.strategy import STRATEGIES, SearchContext
from tests.conformance.strategy_suite import flat_costs


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES.names())
def test_a_graph_without_operators_has_the_empty_schedule(name: str, lanes: int) -> None:
    problem = Problem.from_arrays([], flat_costs([], max_lanes=lanes))
    context = SearchContext(rng=np.random.default_rng(0), max_evaluations=200, max_lanes=lanes)
    found = STRATEGIES.get(name).propose(problem, context)
    assert found
    assert all(schedule.lane == () for schedule in found)
