"""Optuna on the device: trials are list policies, values are measured times, the study lies in SQLite where its dashboard opens it.

Each trial is measured in rounds beside the incumbent, and its value is the median of its ratio to the incumbent there, so that drift
does not decide. A policy whose schedule was measured already (by canonical form) is told the known value and costs nothing. A study that
was interrupted goes on: finished trials are kept, each trial's sampler is seeded by its number, so the trials to come are those an
unbroken run would have made.

*Source:* as ``optuna_search``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autosched.core.schedule import canonical_key
from autosched.search.halving import Ledger, ratios_to
from autosched.search.loop import Bench
from autosched.search.optuna_search import in_study, policy_of, sampler_of
from autosched.search.policies import Decoder
from autosched.search.portfolio import Proposal
from autosched.search.problem import Problem
from autosched.search.strategy import SearchContext


@dataclass(frozen=True, slots=True)
class StudyResult:
    """The fastest policy schedule measured and its value in microseconds; None and inf if every trial failed."""

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
    values = _Values(ledger, incumbent, rounds)
    best, finished = StudyResult(None, float("inf"), 0), (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)

    def go_on(study: optuna.Study) -> StudyResult:
        nonlocal best
        number, past = 0, study.get_trials(deepcopy=False, states=finished)
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
                value_us = values.remember(proposal, known.value)
            else:
                value_us = values.measure(proposal, bench)
                # Not FAIL, which a resumed study takes for an interrupted trial: such a policy was tried, and its schedule failed.
                study.tell(trial, value_us, state=None if value_us is not None else optuna.trial.TrialState.PRUNED)
            number += 1
            if value_us is not None and value_us < best.best_us:
                best = StudyResult(proposal, value_us, number)
                context.progress("optuna", number, value_us)
        return replace(best, trials=number)

    return in_study(context.study_path, f"device-{problem.graph.hash[:16]}-{name or seed}", go_on)


@dataclass(slots=True)
class _Values:
    """Values of proposals by canonical key; the rounds that each is made of are taken from the ledger once.

    A value is the median ratio to the incumbent, times ``incumbent_us``: its median in the first rounds, the same for all of a study, so
    that a value reads as microseconds.
    """

    ledger: Ledger
    incumbent: Proposal
    rounds: int
    found: dict[str, float] = field(default_factory=dict)
    incumbent_us: float | None = None

    def remember(self, proposal: Proposal, value_us: float | None) -> float | None:
        """Take over what a finished trial was told; None if its schedule failed."""
        if value_us is not None:
            if proposal.key not in self.found:
                self._scale_by(self.ledger.used(self._beside(proposal), self.rounds))
            self.found[proposal.key] = value_us
        return self.found.get(proposal.key)

    def measure(self, proposal: Proposal, bench: Bench) -> float | None:
        """The value, measured beside the incumbent if it is not known; None if the schedule fails."""
        if proposal.key not in self.found and proposal.key not in self.ledger.failures:
            taken = self.ledger.take(self._beside(proposal), self.rounds, bench.measure)
            self._scale_by(taken)
            if proposal.key in taken:
                self.found[proposal.key] = self._value_us(taken[proposal.key], taken.get(self.incumbent.key))
        return self.found.get(proposal.key)

    def _value_us(self, own_us: Sequence[float], beside_us: Sequence[float] | None) -> float:
        if beside_us is None or self.incumbent_us is None:  # the incumbent runs no more
            return statistics.median(own_us)
        return self.incumbent_us * statistics.median(ratios_to(beside_us, own_us))

    def _scale_by(self, taken: Mapping[str, Sequence[float]]) -> None:
        if self.incumbent_us is None and taken.get(self.incumbent.key):
            self.incumbent_us = statistics.median(taken[self.incumbent.key])

    def _beside(self, proposal: Proposal) -> list[Proposal]:
        return [proposal] if proposal.key == self.incumbent.key else [self.incumbent, proposal]
