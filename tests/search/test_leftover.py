from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosched.core.costs import CostTable
from autosched.core.errors import UsageError
from autosched.core.records import MAX_SLOWDOWN
from autosched.search import leftover, synthetic
from autosched.search.block_pairs import pair_costs
from autosched.search.leftover import BlockKernels
from autosched.search.problem import Problem
from autosched.search.synthetic import random_order


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 25), lanes=st.integers(1, 5))
def test_the_compiled_block_simulator_equals_the_reference(seed: int, count: int, lanes: int) -> None:
    rng = np.random.default_rng(seed)
    problem = synthetic.random_problem(seed, count, max_lanes=lanes)
    kernels = synthetic.random_block_kernels(rng, len(problem.solo_us))
    order = random_order(problem, rng)
    extra = []
    for _ in range(3):
        first, second = np.sort(rng.integers(0, count, size=2))
        if first != second:
            extra.append((int(order[first]), int(order[second])))
    schedule = problem.schedule(order, rng.integers(0, lanes, size=count), extra_edges=extra)
    assert leftover.simulate_compiled(problem, kernels, schedule) == leftover.simulate(problem, kernels, schedule)


def device(blocks: list[int], *, capacity: int = 10, block_us: float = 4.0, compute: float = 0.0, stall: float = 1.0) -> BlockKernels:
    count = len(blocks)
    each = np.ones(count)
    return BlockKernels(
        np.array(blocks, dtype=np.int32), np.full(count, capacity, dtype=np.int32), each * block_us, each * compute, each * 0.0,
        each * stall, each * 0.0,
    )  # fmt: skip


def independent(count: int) -> Problem:
    ones = np.ones((count, count))
    kernel = np.arange(count, dtype=np.int32)[:, None]
    return Problem.from_arrays([[] for _ in range(count)], CostTable((1,), kernel, np.ones(count), ones, ones, 0.0, 0.0, 0.0, count))


def test_waves_of_one_kernel_follow_each_other() -> None:
    problem = independent(1)
    assert leftover.simulate(problem, device([25]), problem.schedule([0], [0])).makespan_us == pytest.approx(12.0)


def test_small_kernels_fit_side_by_side_and_a_full_one_holds_the_later_back() -> None:
    problem = independent(2)
    together = leftover.simulate(problem, device([5, 5]), problem.schedule([0, 1], [0, 1]))
    assert together.end_us == pytest.approx((4.0, 4.0))
    # Two full waves of the first occupy everything: the second starts its blocks only when the last wave leaves room.
    crowded = leftover.simulate(problem, device([20, 5]), problem.schedule([0, 1], [0, 1]))
    assert crowded.end_us == pytest.approx((8.0, 12.0))
    assert leftover.simulate(problem, device([20, 5]), problem.schedule([1, 0], [0, 1])).end_us[1] == pytest.approx(4.0)


def test_demand_above_the_device_slows_everybody() -> None:
    # Ten blocks demanding 0.2 each make 2.0: one too much, fully felt, so each block takes twice its time.
    problem = independent(1)
    assert leftover.simulate(problem, device([10], compute=0.2), problem.schedule([0], [0])).makespan_us == pytest.approx(8.0)


def test_pair_costs_recover_order_asymmetry() -> None:
    costs = pair_costs(device([20, 5]), np.array([[0], [1]], dtype=np.int32))
    assert costs.solo_us == pytest.approx([8.0, 4.0])
    assert costs.slowdown_first[0, 1] == pytest.approx(1.0)
    assert costs.slowdown_last[1, 0] == MAX_SLOWDOWN  # it did nothing while the first ran
    assert costs.slowdown_first[1, 0] == pytest.approx(1.0)


def test_a_kernel_without_blocks_is_refused() -> None:
    with pytest.raises(UsageError, match="blocks"):
        device([0])


def test_lanes_that_are_one_team_are_refused() -> None:
    problem, kernels = synthetic.random_block_problem(0, 8)
    team = Problem.make(problem.graph, dataclasses.replace(problem.costs, one_team=True))
    for run in (leftover.simulate, leftover.simulate_compiled):
        with pytest.raises(UsageError, match="one team"):
            run(team, kernels, team.schedule(range(8), [0] * 8))
