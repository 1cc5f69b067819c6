"""Moves that annealing rules out unsimulated: where nothing moves the forecast is the simulation, and what is kept was simulated."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autosched.search import synthetic
from autosched.search.anneal import Annealer
from autosched.search.policies import Decoder, Policy
from autosched.search.problem import Problem
from autosched.search.simulate import Evaluator
from autosched.search.strategy import SearchContext


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_forecast_path_of_a_schedule_as_it_is_is_its_makespan(seed: int) -> None:
    from autosched.search.compiled.forecast import find_tails, path_through

    problem, rng = synthetic.random_problem(seed, 40), np.random.default_rng(seed)
    order, lane = synthetic.random_order(problem, rng), rng.integers(0, 4, size=40).astype(np.int32)
    evaluator = Evaluator(problem, 4)
    makespan_us = evaluator.makespan_us(order, lane, np.zeros(40, dtype=np.int32))
    seen = np.stack([evaluator.starts_us(), evaluator.ends_us(), np.zeros(40)])
    edges = problem.pred_ptr, problem.pred_idx
    find_tails(order, lane, np.full(40, -1, dtype=np.int32), *edges, problem.latency_us, seen, np.zeros(4))
    paths = [
        path_through(item, -1, lane[item], place, order, lane, *edges, problem.succ_ptr, problem.succ_idx, problem.latency_us, seen)
        for place, item in enumerate(order)
    ]
    assert max(paths) + problem.latency_us[2] == pytest.approx(makespan_us, rel=1e-12)


@pytest.mark.parametrize("one_team", [False, True])
@pytest.mark.parametrize("concurrent_gap_us", [0.0, 3.0])
def test_what_annealing_holds_is_what_the_simulator_says_of_it(concurrent_gap_us: float, one_team: bool) -> None:
    plain = synthetic.random_problem(3, 40, widths=(1, 4))
    problem = Problem.make(plain.graph, dataclasses.replace(plain.costs, concurrent_gap_us=concurrent_gap_us, one_team=one_team))
    widths = np.arange(2, dtype=np.int32)
    start = Decoder(problem, 4, widths).decode(Policy())
    annealer, waits = Annealer(problem, 4, widths), 0
    for seed in range(4):
        context = SearchContext(np.random.default_rng(seed), max_evaluations=4000)
        found, spent = annealer.run(start, context, "anneal")
        assert 0 < spent <= 4000
        evaluator = Evaluator(problem, 4)
        for item in found:
            assert evaluator.makespan_us(item.order, item.lane, item.width_index, item.wait) == item.makespan_us
        waits += sum(int((item.wait >= 0).sum()) for item in found)
        again, _ = annealer.run(start, SearchContext(np.random.default_rng(seed), max_evaluations=4000), "anneal")
        assert [item.makespan_us for item in again] == [item.makespan_us for item in found]
    assert one_team or waits > 0  # lanes that are one team need none
