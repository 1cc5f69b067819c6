"""Hill climbing on the device: what time is left after the loop goes to small changes of its best schedule, judged by the device alone.

A batch of neighbours is measured in interleaved rounds beside the incumbent, the best few in more rounds, and the best of them takes its
place only if it wins fresh rounds: that it was the luckiest of many says nothing there. The model only leaves out what it takes for the
same run, or for much slower; among the rest it is no good judge, for they differ by less than its error. What else of a batch seemed
faster is tried again on the new incumbent.

*Source:* local search with a race (Maron and Moore, "Hoeffding Races", NIPS 1993); here the race is three heats of paired rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autosched.core.schedule import Schedule, canonical_key
from autosched.search.halving import Ledger, ratios_to
from autosched.search.loop import Bench
from autosched.search.neighbours import Move, Neighbours
from autosched.search.portfolio import Proposal
from autosched.search.problem import Problem
from autosched.search.simulate import simulate
from autosched.search.strategy import SearchContext

NAME = "climb"

# Of neighbours that the model makes 1 to 2 % slower, 4 in 100 were faster, beyond that 1 or fewer; of those nearer, 6 to 12 (simulated).
_MOST_SLOWER = 0.01
_PREFERRED = 0.001  # of those that it makes so much faster, 17
_DRAWS = 6  # neighbours drawn for each one measured
_ATTEMPTS = 40  # moves drawn for each one measured, at most: most are not legal in a narrow graph


@dataclass(frozen=True, slots=True)
class ClimbSettings:
    """How much is measured.

    Args:
        batch: neighbours measured together.
        rounds: of all of a batch; of the best ``finalists``; of the best one, fresh.
        finalists: see ``rounds``.
        wins: share of the fresh rounds that the new incumbent must win.
        idle: batches in a row that change nothing, after which the search ends.
        batches: most batches.
        most_noise: where the ratio of two runs varies by more from round to round (median absolute deviation), the search ends with its
            first batch: nothing that these rounds could tell apart would be worth the time.
    """

    batch: int = 16
    rounds: tuple[int, int, int] = (2, 6, 16)
    finalists: int = 4
    wins: float = 0.75
    idle: int = 12
    batches: int = 1000
    most_noise: float = 0.015

    @property
    def turns(self) -> int:
        """Runs of schedules in one batch at most, and in the last comparison with where it all began."""
        screening, more, fresh = self.rounds
        return (self.batch + 1) * screening + (self.finalists + 1) * more + 2 * fresh + 2 * fresh


@dataclass(frozen=True, slots=True)
class ClimbResult:
    """Where the search ended: ``best`` is the incumbent it began with unless another one won; how many batches, and how many of them
    changed the incumbent."""

    best: Proposal
    batches: int
    changes: int


@dataclass(slots=True)
class _Climb:
    problem: Problem
    bench: Bench
    context: SearchContext
    ledger: Ledger
    lanes_matter: bool
    settings: ClimbSettings
    incumbent: Proposal
    neighbours: Neighbours
    seen: set[str]
    again: list[Move] = field(default_factory=list)
    moves: dict[str, Move] = field(default_factory=dict)
    noise: float = 0.0

    def go(self) -> ClimbResult:
        settings, first, idle, number, changes = self.settings, self.incumbent, 0, 0, 0
        while idle < settings.idle and number < settings.batches and self.noise <= settings.most_noise and not self.context.expired():
            batch = self._batch()
            if not batch:
                break
            number += 1
            won = self._race(batch)
            idle = 0 if won else idle + 1
            changes += won
            self.context.progress(NAME, number, self.incumbent.predicted_us)
        # Many small wins, each with some luck: together they must still be one.
        best = self.incumbent
        if changes > 1 and not self._wins(best, first):
            best = first
        return ClimbResult(best, number, changes)

    def _batch(self) -> list[Proposal]:
        """Neighbours that were never measured: those to try again, those that the model likes, the others by chance."""
        size = self.settings.batch
        old = simulate(self.problem, self.incumbent.schedule)
        liked: list[Proposal] = []
        others: list[Proposal] = []
        batch: list[Proposal] = []
        again, self.again, self.moves = self.again, [], {}
        for attempt in range(_ATTEMPTS * size):
            if len(liked) + len(others) >= _DRAWS * size or (attempt % size == 0 and self.context.expired()):
                break
            tried_before = bool(again)
            move = again.pop() if again else self.neighbours.draw(self.incumbent.schedule)
            schedule = self.neighbours.make(self.incumbent.schedule, move)
            if schedule is None:
                continue
            new = simulate(self.problem, schedule)
            slower = new.makespan_us / old.makespan_us - 1.0
            if slower > _MOST_SLOWER or (new.start_us == old.start_us and new.end_us == old.end_us):
                continue
            proposal = self._proposal(schedule, new.makespan_us)
            if proposal.key in self.seen or proposal.key in self.moves:
                continue
            self.moves[proposal.key] = move
            (batch if tried_before else liked if slower < -_PREFERRED else others).append(proposal)
        liked.sort(key=lambda proposal: (proposal.predicted_us, proposal.key))
        batch = [*batch, *liked[: size // 2], *others][:size]
        self.seen |= {proposal.key for proposal in batch}
        return batch

    def _race(self, batch: Sequence[Proposal]) -> bool:
        """Whether one of ``batch`` is the new incumbent."""
        screening, more, _ = self.settings.rounds
        ratios = self._ratios(batch, screening)
        best = self._fastest(batch, ratios)[: self.settings.finalists]
        longer = self._ratios(best, more)
        ratios = {key: [*ratios[key], *found] for key, found in longer.items()}
        spreads = [_spread(ratios[item.key]) for item in best if item.key in ratios]
        self.noise = statistics.median(spreads) if spreads else 0.0
        faster = [item for item in self._fastest(best, ratios) if statistics.median(ratios[item.key]) < 1.0]
        if not faster or not self._wins(faster[0], self.incumbent):
            return False
        self.incumbent = faster[0]
        self.again = [self.moves[item.key] for item in reversed(faster[1:])]
        return True

    def _ratios(self, proposals: Sequence[Proposal], rounds: int) -> dict[str, list[float]]:
        """Ratios to the incumbent in the same rounds, by key; nothing of what fails, and nothing at all where the incumbent does."""
        taken = self.ledger.take([self.incumbent, *proposals], rounds, self.bench.measure) if proposals else {}
        beside = taken.get(self.incumbent.key)
        if beside is None:
            return {}
        return {item.key: ratios_to(beside, taken[item.key]) for item in proposals if item.key in taken}

    def _fastest(self, proposals: Sequence[Proposal], ratios: Mapping[str, Sequence[float]]) -> list[Proposal]:
        live = [item for item in proposals if item.key in ratios]
        return sorted(live, key=lambda item: (statistics.median(ratios[item.key]), item.key))

    def _wins(self, challenger: Proposal, defender: Proposal) -> bool:
        """Whether ``challenger`` is faster in rounds that neither was chosen by."""
        rounds = self.settings.rounds[2]
        taken = self.ledger.take([defender, challenger], rounds, self.bench.measure)
        if challenger.key not in taken or defender.key not in taken:
            return False
        ratios = ratios_to(taken[defender.key], taken[challenger.key])
        return statistics.median(ratios) < 1.0 and sum(ratio < 1.0 for ratio in ratios) >= self.settings.wins * rounds

    def _proposal(self, schedule: Schedule, predicted_us: float) -> Proposal:
        key = canonical_key(self.problem.graph, schedule, lanes_matter=self.lanes_matter)
        return Proposal((NAME,), False, schedule, predicted_us, key)


def _spread(values: Sequence[float]) -> float:
    """Median absolute deviation."""
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)


def climb(
    problem: Problem,
    bench: Bench,
    context: SearchContext,
    ledger: Ledger,
    *,
    incumbent: Proposal,
    lanes_matter: bool,
    settings: ClimbSettings | None = None,
) -> ClimbResult:
    """Look for something faster near ``incumbent`` until nothing has come of several batches, or the time is up.

    Args:
        problem: graph and costs, corrected as far as is known.
        bench: what to measure on.
        context: chance, lanes and deadline.
        ledger: times known so far, which are not measured again; updated.
        incumbent: where to begin; measured before.
        lanes_matter: as in ``core.schedule.canonical_key``.
        settings: how much to measure.
    """
    neighbours = Neighbours(problem, context.lanes(problem), context.rng)
    # Not what has failed: a resumed run knows of failures that are still to come, and would draw others in their place.
    seen = {incumbent.key}
    run = _Climb(problem, bench, context, ledger, lanes_matter, settings or ClimbSettings(), incumbent, neighbours, seen)
    return run.go()
