"""What every scheduler of this room is: a name and a way to propose schedules. And the registry of all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from autosched.core.registry import Registry
from autosched.core.schedule import Schedule
from autosched.search.problem import Ints, Problem


class Progress(Protocol):
    """Told now and then how far a search is. Must return at once and never raise."""

    def __call__(self, strategy: str, evaluations: int, best_us: float) -> None:
        """``evaluations`` simulated so far by ``strategy``; ``best_us`` is the best predicted makespan."""


def silent(strategy: str, evaluations: int, best_us: float) -> None:
    """A ``Progress`` that shows nothing."""


@dataclass(frozen=True, slots=True)
class SearchContext:
    """What a strategy may spend and use.

    Args:
        rng: the only source of chance. With no deadline, equal seeds give equal schedules.
        max_evaluations: simulated schedules a strategy may spend; 0 still yields a legal schedule.
        deadline_s: ``time.monotonic()`` after which a strategy returns what it has; None for no limit.
        progress: see :class:`Progress`.
        max_lanes: most lanes to use; None for ``CostTable.max_lanes``.
        widths: widths to use, a subset of ``CostTable.widths``; None for all of them.
        study_path: where ``optuna`` keeps its study (SQLite); None for memory.
    """

    rng: np.random.Generator
    max_evaluations: int = 100_000
    deadline_s: float | None = None
    progress: Progress = silent
    max_lanes: int | None = None
    widths: tuple[int, ...] | None = None
    study_path: str | None = None

    def lanes(self, problem: Problem) -> int:
        """Lanes to use: never more than the limits allow or the operators can fill."""
        limit = problem.costs.max_lanes if self.max_lanes is None else self.max_lanes
        return max(1, min(limit, problem.count))

    def width_indices(self, problem: Problem) -> Ints:
        """Places in ``CostTable.widths`` that may be used, narrowest first: int32, never empty."""
        allowed = [place for place, width in enumerate(problem.costs.widths) if self.widths is None or width in self.widths]
        return np.array(allowed or [0], dtype=np.int32)

    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s

    def share(self, evaluations: int, *, seconds_share: float = 1.0) -> SearchContext:
        """A context for one part of a search: its own stream of chance, ``evaluations``, and a share of the time left."""
        deadline = self.deadline_s
        if deadline is not None:
            now = time.monotonic()
            deadline = now + max(0.0, deadline - now) * seconds_share
        return replace(self, rng=self.rng.spawn(1)[0], max_evaluations=max(0, evaluations), deadline_s=deadline)


class Strategy(Protocol):
    """Proposes schedules.

    ``propose`` returns at least one schedule, best (by its own lights) first, each legal for ``problem.graph``; it never raises for a
    legal problem, never spends more than the context allows, and depends on nothing but its arguments. ``is_baseline`` says whether
    it is a published or trivial scheduler that every comparison must contain.
    """

    @property
    def name(self) -> str:
        """The name it is registered under."""

    @property
    def is_baseline(self) -> bool:
        """Whether every comparison must contain it."""

    def propose(self, problem: Problem, context: SearchContext) -> list[Schedule]:
        """Schedules for ``problem``, best first."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A strategy that is one function without options: what most published heuristics are."""

    name: str
    function: Callable[[Problem, SearchContext], list[Schedule]] = field(repr=False)
    is_baseline: bool = True

    def propose(self, problem: Problem, context: SearchContext) -> list[Schedule]:
        """Schedules for ``problem``, best first."""
        return self.function(problem, context)


STRATEGIES: Registry[Strategy] = Registry("strategy", "autosched.searchers")
_HEURISTICS = {
    "sequential": "sequential:SEQUENTIAL",
    "sequential_wide": "sequential:SEQUENTIAL_WIDE",
    "wavefront": "wavefront:WAVEFRONT",
    "critical_path": "critical_path:CRITICAL_PATH",
    "estf": "estf:ESTF",
    "opara": "opara:OPARA",
    "nimble": "nimble:NIMBLE",
    "raf_asap": "raf_asap:RAF_ASAP",
    "torchsched": "torchsched:TORCHSCHED",
    "trtllm": "trtllm:TRTLLM",
    "linear_clustering": "linear_clustering:LINEAR_CLUSTERING",
}
_SEARCHES = {
    "list_policies": "policies:LIST_POLICIES",
    "beam": "beam:BEAM",
    "pilot_beam": "beam:PILOT_BEAM",
    "anneal": "anneal:ANNEAL",
    "portfolio": "portfolio:PORTFOLIO",
    "optuna": "optuna_search:OPTUNA",
    "exact": "exact:EXACT",
    "random": "random_search:RANDOM",
    # Of a large graph it takes all the time that it is given: what the others leave.
    "ios": "dp:IOS",
}
for _name, _place in _HEURISTICS.items():
    STRATEGIES.add(_name, f"autosched.search.heuristics.{_place}")
for _name, _place in _SEARCHES.items():
    STRATEGIES.add(_name, f"autosched.search.{_place}")


def baselines() -> list[Strategy]:
    """Every registered strategy that a comparison must contain."""
    return [strategy for strategy in map(STRATEGIES.get, STRATEGIES.names()) if strategy.is_baseline]
