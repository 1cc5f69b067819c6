"""The device loop: search, measure the candidates, trace the best, correct the model, search again.

Nothing here knows a device: it is given a :class:`Bench`. A run that was killed is given its finished measurements and goes on; with the
same seed it asks the same questions, so it ends where an unbroken run would have ended.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autosched.core.costs import CostTable
from autosched.core.errors import NoFeasibleCandidate
from autosched.core.records import Failure
from autosched.core.schedule import Schedule
from autosched.search.correction import Trace, correct_with_times, correct_with_traces
from autosched.search.halving import Ledger, Ranked, halve
from autosched.search.portfolio import Proposal, proposals
from autosched.search.problem import Problem
from autosched.search.strategy import SearchContext, Strategy

logger = logging.getLogger(__name__)

_TRACED = 4  # schedules, after each round
# A smaller relative gain of the incumbent counts as none.
_LEAST_GAIN = 0.005


class Bench(Protocol):
    """What the loop measures on. Failures are values; an exception ends the loop, so a bench keeps its own journal."""

    def measure(self, schedules: Sequence[Schedule], rounds: int) -> Sequence[Sequence[float] | Failure]:
        """Times in microseconds, ``rounds`` of each schedule, interleaved: every schedule once in each round."""

    def trace(self, schedules: Sequence[Schedule]) -> Sequence[Trace | Failure]:
        """When each operator ran, for one typical run of each schedule; ``Failure`` (``unavailable``) if the device cannot tell."""


@dataclass(frozen=True, slots=True)
class LoopState:
    """What a progress display shows after each step. ``incumbent_us`` and ``baseline_us`` are measured medians (inf before any)."""

    round: int
    rounds: int
    incumbent: str
    incumbent_us: float
    baseline_us: float
    measurements: int
    failures: int


class LoopProgress(Protocol):
    """Told how far the loop is. Must return at once and never raise."""

    def __call__(self, state: LoopState) -> None:
        """Show ``state``."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """How much the loop does. See ``effort`` for the presets.

    Args:
        lanes_matter: as in ``core.schedule.canonical_key``.
        rounds: most rounds of search and measurement.
        candidates: proposals measured in each round.
        first_rounds, finalists: see ``halving.halve``.
        idle: rounds in a row without gain that end the loop.
        correct: whether measurements correct the model (off in an ablation).
        priority_variants: see ``portfolio.proposals``.
    """

    lanes_matter: bool
    rounds: int = 4
    candidates: int = 32
    first_rounds: int = 2
    finalists: int = 4
    idle: int = 2
    correct: bool = True
    priority_variants: int = 0


@dataclass(frozen=True, slots=True)
class LoopResult:
    """What the loop found. Times are medians in microseconds.

    Args:
        best, best_us: the fastest schedule measured.
        baseline, baseline_us: the fastest baseline measured, None and inf if every baseline failed.
        rounds: what was measured in each, best first.
        ledger: every time and failure by canonical key; store it to resume.
        traces: every trace by canonical key; store it to resume.
        costs: the corrected cost table.
    """

    best: Proposal
    best_us: float
    baseline: Proposal | None
    baseline_us: float
    rounds: tuple[tuple[Ranked, ...], ...]
    ledger: Ledger
    traces: dict[str, Trace]
    costs: CostTable

    @property
    def ranking(self) -> tuple[str, ...]:
        """Canonical keys of all that was measured, fastest first.

        A round's ratios are to a reference of its own, so they are put on one scale by what it has in common with the rounds before.
        """
        standing: dict[str, float] = {}
        for measured in self.rounds:
            shared = [standing[item.proposal.key] / item.ratio for item in measured if item.proposal.key in standing]
            scale = statistics.median(shared) if shared else 1.0
            standing |= {item.proposal.key: scale * item.ratio for item in measured}
        return tuple(sorted(standing, key=lambda key: (standing[key], key)))


@dataclass(slots=True)
class _Run:
    original: Problem
    problem: Problem  # with the costs corrected so far
    bench: Bench
    context: SearchContext
    settings: LoopSettings
    ledger: Ledger
    traces: dict[str, Trace]
    strategies: Sequence[Strategy] | None
    progress: LoopProgress | None
    best: Ranked | None = None
    baseline: Ranked | None = None
    rounds: list[tuple[Ranked, ...]] = field(default_factory=list)
    evidence: dict[str, Ranked] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)

    def go(self) -> LoopResult:
        idle = 0
        for number in range(max(1, self.settings.rounds)):
            if number and (idle >= self.settings.idle or self.context.expired()):
                break
            ranked = self._measure(self._candidates(number))
            if not ranked:
                break
            gain = self._update(ranked)
            self.rounds.append(tuple(ranked))
            self._report(number)
            idle = idle + 1 if number and gain < _LEAST_GAIN else 0
            if self.settings.correct and number + 1 < self.settings.rounds:
                self._correct(ranked)
        if self.best is None:
            kinds = sorted({f"{failure.kind}: {failure.detail}" for failure in self.ledger.failures.values()})
            raise NoFeasibleCandidate(
                f"all {len(self.ledger.failures)} candidates failed ({'; '.join(kinds[:3])}); run 'autosched doctor', or lower the load"
            )
        baseline = self.baseline
        return LoopResult(
            self.best.proposal,
            self.best.median_us,
            baseline.proposal if baseline is not None else None,
            baseline.median_us if baseline is not None else float("inf"),
            tuple(self.rounds),
            self.ledger,
            self.traces,
            self.problem.costs,
        )

    def _candidates(self, number: int) -> list[Proposal]:
        """Baselines and finds in the first round; later only what is new, and the incumbent and best baseline to compare with."""
        share = self.context.share(self.context.max_evaluations, seconds_share=0.5)
        found = proposals(
            self.problem, share, lanes_matter=self.settings.lanes_matter, count=self.settings.candidates,
            strategies=self.strategies if number == 0 else (),
            priority_variants=self.settings.priority_variants,
        )  # fmt: skip
        # Not what has failed: a resumed run knows of failures that are still to come.
        fresh = [proposal for proposal in found if proposal.key not in self.asked]
        self.asked.update(proposal.key for proposal in fresh)
        known = {item.proposal.key: item.proposal for item in (self.baseline, self.best) if item is not None}
        return [*known.values(), *fresh] if fresh else []

    def _measure(self, candidates: Sequence[Proposal]) -> list[Ranked]:
        if not candidates:
            return []
        return halve(
            candidates, self.bench.measure, self.ledger, first_rounds=self.settings.first_rounds, finalists=self.settings.finalists,
            stop=self.context.expired,
        )  # fmt: skip

    def _update(self, ranked: Sequence[Ranked]) -> float:
        """Take over the round's winner; returns its relative gain over the incumbent measured beside it."""
        based = [item for item in ranked if item.proposal.is_baseline]
        if based and (self.baseline is None or based[0].proposal.key != self.baseline.proposal.key):
            self.baseline = based[0]
        old = None if self.best is None else next((item for item in ranked if item.proposal.key == self.best.proposal.key), None)
        gain = 1.0 if old is None else 1.0 - ranked[0].ratio / old.ratio
        if self.best is None or old is None or gain > 0.0:
            self.best = ranked[0]
        return gain

    def _correct(self, ranked: Sequence[Ranked]) -> None:
        top = ranked[:_TRACED]
        missing = [item.proposal for item in top if item.proposal.key not in self.traces]
        if missing:
            for proposal, answer in zip(missing, self.bench.trace([proposal.schedule for proposal in missing]), strict=True):
                if isinstance(answer, Trace):
                    self.traces[proposal.key] = answer
                else:
                    logger.info("no trace of %s: %s", "/".join(proposal.strategies), answer.detail)
        for item in top:
            self.evidence[item.proposal.key] = item
        # Always from the original table with everything known: bounds would mean nothing if each round started from the last one's.
        traced = [(item.proposal.schedule, self.traces[key]) for key, item in self.evidence.items() if key in self.traces]
        if traced:
            costs = correct_with_traces(self.original, traced)
        else:
            costs = correct_with_times(self.original, [(item.proposal.schedule, item.median_us) for item in self.evidence.values()])
        self.problem = self.problem.with_costs(costs)

    def _report(self, number: int) -> None:
        if self.progress is not None and self.best is not None:
            baseline_us = self.baseline.median_us if self.baseline is not None else float("inf")
            self.progress(
                LoopState(
                    number + 1, self.settings.rounds, self.best.proposal.strategies[0], self.best.median_us, baseline_us,
                    self.ledger.measured, len(self.ledger.failures),
                )
            )  # fmt: skip


def search_on_device(
    problem: Problem,
    bench: Bench,
    context: SearchContext,
    settings: LoopSettings,
    *,
    known_times_us: Mapping[str, Sequence[float]] | None = None,
    known_lots: Mapping[str, Sequence[int]] | None = None,
    known_failures: Mapping[str, Failure] | None = None,
    known_traces: Mapping[str, Trace] | None = None,
    strategies: Sequence[Strategy] | None = None,
    progress: LoopProgress | None = None,
) -> LoopResult:
    """Find the fastest schedule by search and measurement in turns.

    Args:
        problem: graph and (uncorrected) costs.
        bench: what to measure on.
        context: budget of each round's search; its deadline ends the whole loop.
        settings: how much to measure.
        known_times_us, known_failures, known_traces: what an interrupted run measured, by canonical key (``LoopResult.ledger``).
        known_lots: as for ``Ledger.resume``.
        strategies: as in ``portfolio.proposals``.
        progress: told after each round.

    Raises:
        NoFeasibleCandidate: if nothing could be measured.
    """
    run = _Run(
        problem, problem, bench, dataclasses.replace(context), settings, Ledger.resume(known_times_us or {}, known_failures, known_lots),
        dict(known_traces or {}), strategies, progress,
    )  # fmt: skip
    return run.go()
