from __future__ import annotations

import numpy as np
import pytest

from autosched.search import synthetic
from autosched.search.simulate import Evaluator


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
