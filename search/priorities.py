"""Node priorities: on CUDA a ready node of higher priority is dispatched first. No simulator knows them, so they are only ever measured.

*Source:* CUDA driver API, graph kernel node attribute ``PRIORITY``. That the longest remaining path deserves it is the rule of list
scheduling (Kohler, "A preliminary evaluation of the critical path method", IEEE Transactions on Computers C-24, 1975).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autosched.core.schedule import Schedule
from autosched.search.problem import Problem

LEVELS = 4
"""Priorities, 0 to 3."""


def by_path(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule with priorities 0 to 3 by quarters of the slack: operators on the longest path get 3."""
    times = problem.solo_us[problem.kernel[np.arange(problem.count), problem.width_indices(schedule)]]
    after = problem.paths_to_end_us(times)
    before = np.zeros(problem.count)  # longest path up to each operator's start
    for index in range(problem.count):
        before[index] = max((before[item] + times[item] for item in problem.predecessors(index)), default=0.0)
    slack = (before + after).max(initial=0.0) - (before + after)
    share = slack / max(float(slack.max(initial=0.0)), 1e-12)
    levels = np.clip(LEVELS - 1 - np.floor(share * LEVELS), 0, LEVELS - 1)
    return replace(schedule, priority=tuple(int(level) for level in levels))
