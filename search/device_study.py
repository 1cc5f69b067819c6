"""Optuna on the device: trials are list policies, values are measured medians, the study lies in SQLite where its dashboard opens it.

Each trial is measured in rounds beside the incumbent, so that drift does not decide. A policy whose schedule was measured already (by
canonical form) is told the known median and costs nothing. A study that was interrupted goes on: finished trials are kept, each
trial's sampler is seeded by its number, so the trials to come are those an unbroken run would have made.

*Source:* as ``optuna_search``.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace

from autosched.core.schedule import canonical_key
from autosched.search.halving import Ledger
from autosched.search.loop import Bench
from autosched.search.optuna_search import open_study, policy_of, sampler_of
from autosched.search.policies import Decoder
from autosched.search.portfolio import Proposal
from autosched.search.problem import Problem
from autosched.search.strategy import SearchContext


@dataclass(frozen=True, slots=True)
class StudyResult:
    """The fastest policy schedule measured and its median in microseconds; None and inf if every trial failed."""

    best: Proposal | None
    best_us: float
    trials: int


def study_on_device(
    problem: Problem,
    bench: Bench,
    context: SearchContext,
    ledger: Ledger,
    *,
    incumbent: Proposal,
    lanes_matter: bool,
    trials: int = 40,
    rounds: int = 5,
    name: str = "",
) -> StudyResult:
    """Let Optuna choose list policies by what the device measures.

    Args:
        problem: graph and costs; the policies decide by them, the device judges.
        bench: what to measure on.
        context: chance, lanes, widths, deadline, and ``study_path`` for the SQLite file.
        ledger: times known so far; updated.
        incumbent: measured beside every trial.
        lanes_matter: as in ``core.schedule.canonical_key``.
        trials: trials of the finished study.
        rounds: measurements of each trial.
        name: of the study within its file; a run that goes on must give the same. Default: by graph and seed.
    """
    import optuna

    widths = context.width_indices(problem)
    decoder = Decoder(problem, context.lanes(problem), widths)
    seed = int(context.rng.integers(0, 2**31 - 1))
    medians = _Medians(ledger, incumbent, rounds)
    best = StudyResult(None, float("inf"), 0)
    finished = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    number = 0
    with open_study(context.study_path, f"device-{problem.graph.hash[:16]}-{name or seed}") as study:
        past = [trial for trial in study.get_trials(deepcopy=False) if trial.state in finished]
        while number < trials and (number < len(past) or not context.expired()):
            known = past[number] if number < len(past) else None
            if known is None:
                study.sampler = sampler_of(seed + number)
                trial = study.ask()
            policy = policy_of(optuna.trial.FixedTrial(known.params) if known is not None else trial, several_widths=len(widths) > 1)
            candidate = decoder.decode(policy)
            schedule = candidate.schedule(problem)
            key = canonical_key(problem.graph, schedule, lanes_matter=lanes_matter)
            proposal = Proposal(("optuna",), False, schedule, candidate.makespan_us, key)
            if known is not None:
                median_us = medians.remember(proposal, known.value)
            else:
                median_us = medians.measure(proposal, bench)
                # Not FAIL, which a resumed study takes for an interrupted trial: such a policy was tried, and its schedule failed.
                study.tell(trial, median_us, state=None if median_us is not None else optuna.trial.TrialState.PRUNED)
            number += 1
            if median_us is not None and median_us < best.best_us:
                best = StudyResult(proposal, median_us, number)
                context.progress("optuna", number, median_us)
    return replace(best, trials=number)


@dataclass(slots=True)
class _Medians:
    """Medians of proposals by canonical key, microseconds; the rounds that each is made of are taken from the ledger once."""

    ledger: Ledger
    incumbent: Proposal
    rounds: int
    found: dict[str, float] = field(default_factory=dict)

    def remember(self, proposal: Proposal, median_us: float | None) -> float | None:
        """Take over what a finished trial was told; None if its schedule failed."""
        if median_us is not None:
            if proposal.key not in self.found:
                self.ledger.used(self._beside(proposal), self.rounds)
            self.found[proposal.key] = median_us
        return self.found.get(proposal.key)

    def measure(self, proposal: Proposal, bench: Bench) -> float | None:
        """The median, measured beside the incumbent if it is not known; None if the schedule fails."""
        if proposal.key not in self.found and proposal.key not in self.ledger.failures:
            taken = self.ledger.take(self._beside(proposal), self.rounds, bench.measure)
            if proposal.key in taken:
                self.found[proposal.key] = statistics.median(taken[proposal.key])
        return self.found.get(proposal.key)

    def _beside(self, proposal: Proposal) -> list[Proposal]:
        return [proposal] if proposal.key == self.incumbent.key else [self.incumbent, proposal]
