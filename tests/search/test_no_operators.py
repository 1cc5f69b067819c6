"""A model that only hands its inputs on has nothing to schedule, which is no reason to warn (warnings are errors in these tests)."""

from __future__ import annotations

import numpy as np
import pytest

from autosched.search.policies import LIST_POLICIES
from autosched.search.problem import Problem
from autosched.search.strategy import SearchContext
from tests.conformance.strategy_suite import flat_costs


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_graph_without_operators_has_the_empty_schedule(lanes: int) -> None:
    problem = Problem.from_arrays([], flat_costs([], max_lanes=lanes))
    context = SearchContext(rng=np.random.default_rng(0), max_lanes=lanes)
    assert all(schedule.lane == () for schedule in LIST_POLICIES.propose(problem, context))
