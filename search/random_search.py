"""Random launch orders, lanes and widths, the best kept: the ablation that a search must beat with an equal budget.

*Source:* Bergstra and Bengio, "Random Search for Hyper-Parameter Optimization", JMLR 13, 2012.
"""

from __future__ import annotations

import numpy as np

from autosched.core.schedule import Schedule
from autosched.search.problem import Ints, Problem
from autosched.search.simulate import Evaluator
from autosched.search.strategy import Rule, SearchContext


def random_order(problem: Problem, rng: np.random.Generator) -> Ints:
    """A topological order that draws each next operator from all that are ready: int32 ``[n]``."""
    waiting = (problem.pred_ptr[1:] - problem.pred_ptr[:-1]).tolist()
    ready = [index for index, left in enumerate(waiting) if left == 0]
    order: list[int] = []
    draws = rng.random(problem.count)
    while ready:
        place = int(draws[len(order)] * len(ready))
        ready[place], ready[-1] = ready[-1], ready[place]
        index = ready.pop()
        order.append(index)
        for after in problem.successors(index):
            waiting[after] -= 1
            if waiting[after] == 0:
                ready.append(after)
    return np.array(order, dtype=np.int32)


def _random(problem: Problem, context: SearchContext) -> list[Schedule]:
    lanes, widths, rng = context.lanes(problem), context.width_indices(problem), context.rng
    evaluator = Evaluator(problem, lanes)
    best: tuple[float, Ints, Ints, Ints] | None = None
    for trial in range(max(1, context.max_evaluations)):
        order = random_order(problem, rng)
        lane = rng.integers(0, lanes, size=problem.count, dtype=np.int32)
        width_index = widths[rng.integers(0, len(widths), size=problem.count)]
        makespan = evaluator.makespan_us(order, lane, width_index)
        if best is None or makespan < best[0]:
            best = (makespan, order, lane, width_index)
        if trial % 1000 == 0:
            context.progress("random", trial, best[0])
            if context.expired():
                break
    assert best is not None  # at least one trial ran
    return [problem.schedule(best[1], best[2], width_index=best[3])]


RANDOM = Rule("random", _random, is_baseline=False)
