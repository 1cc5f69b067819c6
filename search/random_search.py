"""Random launch orders, lanes and widths, the best kept: the ablation that a search must beat with an equal budget.

*Source:* Bergstra and Bengio, "Random Search for Hyper-Parameter Optimization", JMLR 13, 2012.
"""

from __future__ import annotations

import numpy as np

from autosched.core.schedule import Schedule
from autosched.search.compiled import layout
from autosched.search.problem import Problem
from autosched.search.strategy import Rule, SearchContext

_CHUNK = 1_000_000  # operators simulated between two looks at the clock


def _random(problem: Problem, context: SearchContext) -> list[Schedule]:
    from autosched.search.compiled import random_search as compiled

    lanes, widths = context.lanes(problem), context.width_indices(problem)
    current, best = np.zeros((5, problem.count), dtype=np.int32), np.zeros((5, problem.count), dtype=np.int32)
    value = np.array([layout.UNREACHED])
    random_state = context.rng.integers(0, 2**63, size=1, dtype=np.uint64)
    space = layout.workspace(problem.count, lanes)
    spent, total = 0, max(1, context.max_evaluations)
    chunk = max(1, _CHUNK // max(1, problem.count))
    while spent < total:
        trials = 1 if spent == 0 else min(chunk, total - spent)
        compiled.random_schedules(*problem.arrays, lanes, current, best, value, widths, trials, random_state, *space)
        spent += trials
        context.progress("random", spent, float(value[0]))
        if context.expired():
            break
    return [problem.schedule(best[0], best[2], width_index=best[3])]


RANDOM = Rule("random", _random, is_baseline=False)
