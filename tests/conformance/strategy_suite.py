"""What every search strategy must keep. A plug-in's tests subclass ``StrategySuite`` and set ``strategy``.

The rules: at least one schedule; only legal ones; equal seeds give equal schedules; no exception for any legal problem; at most the
lanes and only the widths that the context allows.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from autosched.core.costs import CostTable
from autosched.core.schedule import Schedule, violations
from autosched.search import synthetic
from autosched.search.problem import Problem
from autosched.search.strategy import SearchContext, Strategy


def flat_costs(solo_us: list[float], *, widths: tuple[int, ...] = (1,), max_lanes: int = 2, slowdown: float = 1.0) -> CostTable:
    """Costs without latencies, every pair disturbed alike; a width w divides the time by w."""
    count = len(solo_us)
    kernel = np.arange(count * len(widths), dtype=np.int32).reshape(len(widths), count).T.copy()
    solo = np.concatenate([np.array(solo_us) / width for width in widths])
    matrix = np.full((len(solo), len(solo)), slowdown)
    return CostTable(widths, kernel, solo, matrix, matrix.copy(), 0.0, 0.0, 0.0, max_lanes)


DIAMOND = [[], [0], [0], [1, 2]]
HAND_MADE: dict[str, tuple[list[list[int]], CostTable]] = {
    "one operator": ([[]], flat_costs([3.0])),
    "one operator, many lanes": ([[]], flat_costs([3.0], max_lanes=16)),
    "chain (width 1)": ([[], [0], [1], [2], [3]], flat_costs([1.0, 2.0, 3.0, 4.0, 5.0])),
    "no edges": ([[] for _ in range(6)], flat_costs([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], max_lanes=3)),
    "zero-time operators": ([[], [0], [0], [1, 2], []], flat_costs([0.0] * 5)),
    "some zero-time operators": ([[], [0], [0], [1, 2], []], flat_costs([0.0, 4.0, 0.0, 2.0, 0.0])),
    "more lanes than operators": (DIAMOND, flat_costs([1.0, 2.0, 3.0, 4.0], max_lanes=32)),
    "one lane": (DIAMOND, flat_costs([1.0, 2.0, 3.0, 4.0], max_lanes=1)),
    "harmful pairs": (DIAMOND, flat_costs([1.0, 2.0, 3.0, 4.0], slowdown=4.0)),
    "helpful pairs": (DIAMOND, flat_costs([1.0, 2.0, 3.0, 4.0], slowdown=0.4)),
    "two widths": (DIAMOND, flat_costs([1.0, 2.0, 3.0, 4.0], widths=(1, 2), slowdown=2.0)),
}


class StrategySuite:
    """Subclass, set ``strategy``, and pytest runs the conformance tests."""

    strategy: Strategy
    evaluations = 400

    def propose(self, problem: Problem, **limits: object) -> list[Schedule]:
        settings: dict[str, object] = {"max_evaluations": self.evaluations, **limits}
        context = SearchContext(np.random.default_rng(7), **settings)  # type: ignore[arg-type]
        return self.strategy.propose(problem, context)

    def require_legal(self, problem: Problem, schedules: list[Schedule], lanes: int, widths: tuple[int, ...]) -> None:
        assert schedules
        for schedule in schedules:
            assert violations(problem.graph, schedule) == []
            assert schedule.lane_slots <= lanes
            assert set(schedule.width) <= set(widths)

    @pytest.mark.parametrize("case", HAND_MADE)
    def test_hand_made_graphs_get_legal_schedules(self, case: str) -> None:
        predecessors, costs = HAND_MADE[case]
        problem = Problem.from_arrays(predecessors, costs)
        self.require_legal(problem, self.propose(problem), costs.max_lanes, costs.widths)

    @pytest.mark.parametrize("shape", ["layered", "series_parallel", "wide"])
    def test_random_graphs_get_legal_schedules_and_equal_seeds_equal_ones(self, shape: str) -> None:
        for seed, widths in enumerate([(1,), (1, 2)]):
            problem = synthetic.random_problem(seed, 23, shape=shape, widths=widths, max_lanes=3)
            found = self.propose(problem)
            self.require_legal(problem, found, 3, widths)
            assert self.propose(problem) == found

    @pytest.mark.parametrize("case", ["one operator", "no edges", "two widths"])
    def test_a_budget_of_zero_still_yields_a_legal_schedule(self, case: str) -> None:
        predecessors, costs = HAND_MADE[case]
        problem = Problem.from_arrays(predecessors, costs)
        self.require_legal(problem, self.propose(problem, max_evaluations=0), costs.max_lanes, costs.widths)

    def test_a_deadline_that_has_passed_still_yields_a_legal_schedule(self) -> None:
        problem = synthetic.random_problem(5, 30, max_lanes=4)
        self.require_legal(problem, self.propose(problem, deadline_s=time.monotonic() - 1.0), 4, (1,))

    def test_limits_of_the_context_are_kept(self) -> None:
        problem = synthetic.random_problem(6, 20, widths=(1, 2), max_lanes=8)
        self.require_legal(problem, self.propose(problem, max_lanes=2), 2, (1, 2))
        self.require_legal(problem, self.propose(problem, widths=(2,)), 8, (1, 2))

    def test_it_has_a_name(self) -> None:
        assert self.strategy.name
        assert isinstance(self.strategy.is_baseline, bool)
