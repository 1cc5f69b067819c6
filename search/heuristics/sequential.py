"""Everything on one lane: what any program does without a scheduler, and what every other strategy must beat.

On a CPU the wide form is the honest baseline: the same operators in the same order, each on all threads. *Source:* none needed.
"""

from __future__ import annotations

from autosched.core.schedule import Schedule
from autosched.search.problem import Problem
from autosched.search.strategy import Rule, SearchContext


def _narrow(problem: Problem, context: SearchContext) -> list[Schedule]:
    return [problem.schedule(range(problem.count), [0] * problem.count)]


def _wide(problem: Problem, context: SearchContext) -> list[Schedule]:
    widest = int(context.width_indices(problem)[-1])
    return [problem.schedule(range(problem.count), [0] * problem.count, width_index=[widest] * problem.count)]


SEQUENTIAL = Rule("sequential", _narrow)
SEQUENTIAL_WIDE = Rule("sequential_wide", _wide)
