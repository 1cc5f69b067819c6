from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from autosched.core.costs import CostTable
from autosched.core.errors import UsageError
from autosched.search import exact, synthetic
from autosched.search.bounds import configuration_bound_us, critical_path_bound_us, decomposed_bound_us
from autosched.search.problem import Problem
from autosched.search.simulate import Evaluator, makespan_us
from autosched.search.strategy import STRATEGIES, SearchContext
from tests.conformance.strategy_suite import flat_costs


def test_brute_force_counts_every_order_and_assignment_once() -> None:
    # Two independent operators: 2 orders x (both on one lane, or two lanes) = 4 schedules.
    problem = Problem.from_arrays([[], []], flat_costs([2.0, 3.0]))
    solved = exact.brute_force(problem, 2)
    assert (solved.evaluations, solved.complete, solved.best.makespan_us) == (4, True, 3.0)
    # A chain of three: one order, lanes 1, then 1 or 2, then ...: 1 * 2 * (2 or 3 new ones) = 5 with three lanes.
    chain = Problem.from_arrays([[], [0], [1]], flat_costs([1.0] * 3, max_lanes=3))
    assert exact.brute_force(chain, 3).evaluations == 5


def test_brute_force_finds_what_enumeration_in_python_finds() -> None:
    import itertools

    problem = synthetic.random_problem(11, 6, max_lanes=2)
    evaluator = Evaluator(problem, 2)
    width = np.zeros(6, dtype=np.int32)
    best = min(
        evaluator.makespan_us(np.array(order, dtype=np.int32), np.array(lane, dtype=np.int32), width)
        for order in itertools.permutations(range(6))
        if all(order.index(before) < order.index(index) for index in range(6) for before in problem.predecessors(index))
        for lane in itertools.product(range(2), repeat=6)
    )
    solved = exact.brute_force(problem, 2)
    assert solved.best.makespan_us == pytest.approx(best, rel=1e-12)
    assert makespan_us(problem, solved.best.schedule(problem)) == pytest.approx(best, rel=1e-12)


def test_brute_force_stops_at_its_budget_and_says_so() -> None:
    solved = exact.brute_force(synthetic.random_problem(1, 9, shape="wide", max_lanes=3), 3, max_evaluations=1000)
    assert (solved.evaluations, solved.complete) == (1000, False)


def test_brute_force_refuses_large_graphs() -> None:
    with pytest.raises(UsageError, match="11 operators"):
        exact.brute_force(synthetic.random_problem(1, 11), 2)


@pytest.mark.parametrize("seed", range(3))
def test_the_default_search_equals_brute_force_on_small_graphs(seed: int) -> None:
    problem = synthetic.random_problem(seed, 8, max_lanes=3)
    solved = exact.brute_force(problem, 3)
    found = STRATEGIES.get("portfolio").propose(problem, SearchContext(np.random.default_rng(seed), max_evaluations=20_000))
    assert makespan_us(problem, found[0]) <= solved.best.makespan_us * (1 + 1e-9)  # waits may make it faster still


@pytest.mark.parametrize("seed", [17, 31, 46, 73, 90])
def test_annealing_leaves_the_nearest_optimum_of_a_graph_of_few_operators(seed: int) -> None:
    problem = synthetic.random_problem(seed, 6, max_lanes=3)
    solved = exact.brute_force(problem, 3)
    found = STRATEGIES.get("anneal").propose(problem, SearchContext(np.random.default_rng(0), max_evaluations=5000))
    assert makespan_us(problem, found[0]) <= solved.best.makespan_us * (1 + 1e-9)


@pytest.mark.skipif(not exact.cp_sat_available(), reason="OR-Tools is not installed")
def test_cp_sat_finds_the_optimum_without_interference() -> None:
    problem = Problem.from_arrays([[], [], []], flat_costs([3.0, 3.0, 6.0]))
    solved = exact.cp_sat(problem, 2)
    assert solved is not None
    assert (solved.makespan_us, solved.bound_us) == (6.0, 6.0)
    assert makespan_us(problem, solved.schedule) == 6.0


_INTERRUPTED_AFTERWARDS = """
import os, signal, time
from autosched.search import exact
from autosched.search.problem import Problem
from tests.conformance.strategy_suite import flat_costs
signal.signal(signal.SIGINT, signal.default_int_handler)
assert exact.cp_sat(Problem.from_arrays([[], []], flat_costs([3.0, 6.0])), 2) is not None
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
except KeyboardInterrupt:
    print("cleaned up")
"""


@pytest.mark.skipif(not exact.cp_sat_available(), reason="OR-Tools is not installed")
def test_an_interrupt_after_cp_sat_still_reaches_python() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_AFTERWARDS], cwd=root, env={**os.environ, "PYTHONSAFEPATH": "", "PYTHONPATH": str(root)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "cleaned up\n"), done.stderr


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("room", [None, 0.5])
def test_bounds_are_below_the_optimum(seed: int, room: float | None) -> None:
    problem = synthetic.random_problem(seed, 7, shape="wide" if room else "layered", max_lanes=3)
    if room is not None:
        problem = Problem.make(problem.graph, dataclasses.replace(problem.costs, room=np.full(len(problem.solo_us), room)))
    optimum = exact.brute_force(problem, 3).best.makespan_us
    pytest.importorskip("scipy")
    assert critical_path_bound_us(problem) <= optimum
    assert critical_path_bound_us(problem) <= configuration_bound_us(problem, 3) <= optimum * (1 + 1e-9)


@pytest.mark.parametrize("faster", [("slowdown_first",), ("slowdown_first", "slowdown_last")])
@pytest.mark.parametrize("widths", [(1,), (1, 2)])
def test_no_bound_is_above_what_pairs_that_speed_each_other_up_make_possible(faster: tuple[str, ...], widths: tuple[int, ...]) -> None:
    costs = flat_costs([4.0, 4.0, 4.0, 4.0], widths=widths)
    costs = dataclasses.replace(costs, **dict.fromkeys(faster, np.full_like(costs.slowdown_first, 0.3)))
    problem = Problem.from_arrays([[], [], [0], [1]], costs)
    found = makespan_us(problem, exact.brute_force(problem, 2).best.schedule(problem))
    assert decomposed_bound_us(problem, 2) <= found * (1 + 1e-9)
    if len(widths) == 1:
        assert configuration_bound_us(problem, 2) <= found * (1 + 1e-9)


def test_the_configuration_bound_is_tight_for_processor_sharing() -> None:
    pytest.importorskip("scipy")
    problem = Problem.from_arrays([[], []], flat_costs([4.0, 4.0], slowdown=2.0))
    assert configuration_bound_us(problem, 2) == pytest.approx(8.0)


def test_the_decomposed_bound_adds_up_over_the_operators_where_a_graph_narrows() -> None:
    # A fork of three, a cut, a fork of two: each part is bounded by itself, and every schedule found keeps above the sum.
    problem = Problem.from_arrays([[], [0], [0], [0], [1, 2, 3], [4], [4], [5, 6]], synthetic.random_costs(np.random.default_rng(3), 8))
    bound = decomposed_bound_us(problem, 4)
    found = exact.brute_force(problem, 4, max_evaluations=10**7)
    assert found.complete
    assert critical_path_bound_us(problem) < bound <= found.best.makespan_us
    assert bound >= configuration_bound_us(problem, 4) * (1 - 1e-9)


def test_the_decomposed_bound_holds_at_a_hundred_operators() -> None:
    problem = synthetic.random_problem(0, 100, shape="series_parallel")
    bound = decomposed_bound_us(problem, 4)
    heft = STRATEGIES.get("critical_path").propose(problem, SearchContext(np.random.default_rng(0)))[0]
    assert critical_path_bound_us(problem) < bound <= makespan_us(problem, heft)


@pytest.mark.parametrize("seed", range(4))
def test_no_bound_is_above_what_other_variants_make_possible(seed: int) -> None:
    # Operators of the fork slow each other down threefold, unless one of them is in another variant.
    count = 6
    solo = np.concatenate([np.full(count, 10.0), np.full(count, 11.0 + seed)])
    slow = np.ones((2 * count, 2 * count))
    slow[:count, :count] = 3.0
    kernel = np.arange(count, dtype=np.int32)
    costs = CostTable(
        (1,), kernel[:, None], solo, slow, slow, 0.0, 0.0, 0.0, 2, variant=np.zeros((count, 1), dtype=np.int32),
        other_kernel=kernel + count, other_variant=np.ones(count, dtype=np.int32),
    )  # fmt: skip
    problem = Problem.from_arrays([[], [0], [0], [0], [0], [1, 2, 3, 4]], costs)
    found = STRATEGIES.get("portfolio").propose(problem, SearchContext(np.random.default_rng(0), max_evaluations=3000))[0]
    assert 1 in found.variant[1:5]
    assert decomposed_bound_us(problem, 2) <= makespan_us(problem, found) * (1 + 1e-9)
