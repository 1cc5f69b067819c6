"""Successive halving on a device: measure all candidates a little, the better half more, until few are left.

Candidates are compared by the median of their ratio to a reference measured in the same round, so that a drifting clock changes
nothing. *Source:* Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", AISTATS 2016.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule
from autosched.search.portfolio import Proposal

logger = logging.getLogger(__name__)

_FACTOR = 2

Measure = Callable[[Sequence[Schedule], int], Sequence[Sequence[float] | Failure]]
"""``measure(schedules, rounds)``: for each schedule its times in microseconds, one for each round, all schedules once in each round, or
why there are none."""


@dataclass(slots=True)
class Ledger:
    """Every time measured so far, by canonical key; what a resumed run is given to start from.

    A resumed run asks for the same measurements in the same order; ``take`` answers from what is known as long as it can, and measures
    the rest. ``measured`` counts the runs that were really made.
    """

    known: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    measured: int = 0
    _used: dict[str, int] = field(default_factory=dict)
    _lots: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @staticmethod
    def resume(
        times_us: Mapping[str, Sequence[float]],
        failures: Mapping[str, Failure] | None = None,
        lots: Mapping[str, Sequence[int]] | None = None,
    ) -> Ledger:
        """A ledger that knows what an interrupted run measured; ``lots`` says of each time in which question it was measured."""
        known = {key: list(times) for key, times in times_us.items()}
        return Ledger(known, dict(failures or {}), _lots={key: list(numbers) for key, numbers in (lots or {}).items()})

    def take(self, proposals: Sequence[Proposal], rounds: int, measure: Measure) -> dict[str, list[float]]:
        """The next ``rounds`` times of each proposal that does not fail, microseconds, by key.

        All are of the same rounds: where those known are not, or do not suffice for one of the proposals, all are measured. Times of an
        interrupted run beside times of this one would show what became of the machine in between.
        """
        live = [proposal for proposal in proposals if proposal.key not in self.failures]
        if not self._are_known(live, rounds):
            answers = measure([proposal.schedule for proposal in live], rounds)
            for proposal, answer in zip(live, answers, strict=True):
                if isinstance(answer, Failure):
                    self.failures[proposal.key] = answer
                    logger.warning("%s failed: %s: %s", "/".join(proposal.strategies), answer.kind, answer.detail)
                else:
                    # What is known beyond what was used has no counterpart for the others, and never will have.
                    used = self.known.get(proposal.key, [])[: self._used.get(proposal.key, 0)]
                    self.known[proposal.key] = [*used, *(float(time) for time in answer)]
                    self.measured += len(answer)
        return self.used(proposals, rounds)

    def _are_known(self, proposals: Sequence[Proposal], rounds: int) -> bool:
        """Whether the next ``rounds`` times of all of them are, and of the same rounds. A resumed run may have found other schedules."""
        lots: list[Sequence[int]] = []
        for proposal in proposals:
            begin = self._used.get(proposal.key, 0)
            if len(self.known.get(proposal.key, ())) < begin + rounds:
                return False
            lots.append(self._lots.get(proposal.key, ())[begin : begin + rounds])
        return all(lot == lots[0] for lot in lots)

    def used(self, proposals: Sequence[Proposal], rounds: int) -> dict[str, list[float]]:
        """The next ``rounds`` known times of each, or fewer; they are not given again. Times that can be none are a failure."""
        taken: dict[str, list[float]] = {}
        for proposal in proposals:
            if proposal.key in self.failures or proposal.key not in self.known:
                continue
            begin = self._used.get(proposal.key, 0)
            times = self.known[proposal.key][begin : begin + rounds]
            self._used[proposal.key] = begin + len(times)
            if not all(0.0 < time < math.inf for time in times):
                # As a ratio it would rank first, or make every other one none; a resumed run has it from its diary.
                detail = f"was timed at {times} us; expected finite times above 0"
                self.failures[proposal.key] = Failure(FailureKind.UNSTABLE, detail)
                logger.warning("%s failed: %s", "/".join(proposal.strategies), detail)
                continue
            taken[proposal.key] = times
        return taken


@dataclass(frozen=True, slots=True)
class Ranked:
    """A measured proposal.

    ``ratio`` is the median ratio to the reference (less is faster), ``median_us`` the plain median of ``rounds`` times.
    """

    proposal: Proposal
    ratio: float
    median_us: float
    rounds: int


def halve(
    proposals: Sequence[Proposal],
    measure: Measure,
    ledger: Ledger,
    *,
    first_rounds: int = 2,
    finalists: int = 4,
    stop: Callable[[], bool] = lambda: False,
) -> list[Ranked]:
    """Rank proposals by measurement; the best first, those measured longest before those dropped early.

    The reference is the first baseline (or the first proposal); it and the best baseline are never dropped.

    Args:
        proposals: keys must be unique: a duplicate would be measured twice.
        measure: see :data:`Measure`.
        ledger: what is known; updated.
        first_rounds: rounds in the first rung; each rung has twice as many for half of the candidates.
        finalists: stop when at most so many are left.
        stop: asked before each rung but the first; true ends the halving.

    Returns:
        Every proposal that did not fail; empty if all did.

    Raises:
        ValueError: two proposals of one key.
    """
    if len({proposal.key for proposal in proposals}) != len(proposals):
        raise ValueError("two proposals have one canonical key; merge them before measuring")
    alive, rounds = list(proposals), first_rounds
    reference = ""
    times: dict[str, list[float]] = {proposal.key: [] for proposal in proposals}
    dropped: list[Ranked] = []
    while alive:
        taken = ledger.take(alive, rounds, measure)
        alive = [proposal for proposal in alive if proposal.key in taken]
        if not alive:
            break
        if reference not in taken:  # another one only where it has failed: ratios to two of them would not be comparable
            reference = next((proposal for proposal in alive if proposal.is_baseline), alive[0]).key
        for proposal in alive:
            times[proposal.key] += taken[proposal.key]
        ranked = sorted(
            (_ranked(proposal, times[proposal.key], times[reference]) for proposal in alive),
            key=lambda item: (item.ratio, item.proposal.key),
        )
        if len(alive) <= finalists or stop():
            return ranked + dropped
        kept = ranked[: max(finalists, len(ranked) // _FACTOR)]
        for must in _always_kept(ranked, reference):
            if must not in kept:
                kept.append(must)
        dropped = [item for item in ranked if item not in kept] + dropped
        if len(kept) == len(alive):
            return ranked + dropped
        alive = [item.proposal for item in kept]
        rounds *= _FACTOR
    return dropped


def ratios_to(beside_us: Sequence[float], times_us: Sequence[float]) -> list[float]:
    """Each time over the one of the same round that it is compared with: what slows a whole round down changes nothing."""
    return [time / max(other, 1e-12) for time, other in zip(times_us, beside_us, strict=True)]


def _ranked(proposal: Proposal, times_us: Sequence[float], reference_us: Sequence[float]) -> Ranked:
    return Ranked(proposal, statistics.median(ratios_to(reference_us, times_us)), statistics.median(times_us), len(times_us))


def _always_kept(ranked: Sequence[Ranked], reference: str) -> list[Ranked]:
    """The fastest baseline and the reference."""
    based = [item for item in ranked if item.proposal.is_baseline]
    return [*based[:1], *(item for item in ranked if item.proposal.key == reference)]
