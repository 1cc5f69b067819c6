from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autosched.core.errors import InvalidGraph, UnknownName, UsageError
from autosched.search.problem import Problem
from autosched.search.strategy import STRATEGIES, baselines
from autosched.search.synthetic import random_costs
from tests.conformance.strategy_suite import StrategySuite


@pytest.mark.parametrize("name", STRATEGIES.names(), scope="class")
class TestEveryStrategy(StrategySuite):
    @pytest.fixture(autouse=True)
    def _choose(self, name: str) -> None:
        self.strategy = STRATEGIES.get(name)
        self.evaluations = 24 if name == "optuna" else 400  # Optuna's own time, not the simulator's, is what its trials cost

    def test_it_is_registered_under_its_name(self, name: str) -> None:
        assert self.strategy.name == name


def test_an_unknown_strategy_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"critical_path.*sequential"):
        STRATEGIES.get("no_such_strategy")


def test_the_random_ablation_is_no_baseline_and_the_published_ones_are() -> None:
    names = {strategy.name for strategy in baselines()}
    assert {"sequential", "wavefront", "critical_path"} <= names
    assert "random" not in names


def test_a_cycle_is_refused_where_the_problem_is_made() -> None:
    with pytest.raises(InvalidGraph, match="cycle"):
        Problem.from_arrays([[1], [0]], random_costs(np.random.default_rng(0), 2))


def test_costs_for_another_graph_are_refused() -> None:
    with pytest.raises(UsageError, match="3 operators"):
        Problem.from_arrays([[], [0]], random_costs(np.random.default_rng(0), 3))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300, -1.0])
@pytest.mark.parametrize("name", ["launch_gap_us", "cross_lane_us", "fixed_us", "polling_us"])
def test_latencies_that_compiled_code_would_run_wild_on_are_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"{name} is .*from 0 to 1e"):
        dataclasses.replace(random_costs(np.random.default_rng(0), 2), **{name: value})


def test_a_time_beyond_all_measure_is_refused() -> None:
    costs = random_costs(np.random.default_rng(0), 2)
    with pytest.raises(UsageError, match="above 1e"):
        dataclasses.replace(costs, solo_us=costs.solo_us * 1e300)


def test_costs_that_are_not_numbers_are_refused() -> None:
    costs = random_costs(np.random.default_rng(0), 2)
    broken = costs.solo_us.copy()
    broken[0] = np.nan
    with pytest.raises(UsageError, match="not finite"):
        type(costs)((1,), costs.kernel, broken, costs.slowdown_first, costs.slowdown_last, 0.0, 0.0, 0.0, 2)
