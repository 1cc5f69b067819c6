"""The default search: list policies, then a pilot beam, then annealing; and the candidate set that goes to the device.

A search that trusts its model exploits the model's errors, so what is measured is never only the predicted best: every baseline is in
the set, and the rest must differ from each other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autosched.core.schedule import Schedule, canonical_key
from autosched.search.anneal import Annealer
from autosched.search.beam import PILOT_BEAM
from autosched.search.policies import Candidate, Decoder, best_policies, on_one_lane
from autosched.search.priorities import by_path
from autosched.search.problem import Ints, Problem
from autosched.search.simulate import makespan_us
from autosched.search.strategy import SearchContext, Strategy, baselines

logger = logging.getLogger(__name__)

# Most of the evaluations that the pilot beam gets: it needs about 24 for each operator, and on large graphs they are spent better there
# than on annealing.
_PILOT_SHARE = 0.4
_LEAST_DIFFERENCE = 0.1  # see difference(); less only where the set could not be filled otherwise


@dataclass(frozen=True, slots=True)
class Proposal:
    """A schedule to measure: which strategies proposed it, what the model says, and its canonical key.

    ``predicted_us`` is simulated, in microseconds. ``is_baseline`` is true if any of ``strategies`` is a baseline.
    """

    strategies: tuple[str, ...]
    is_baseline: bool
    schedule: Schedule
    predicted_us: float
    key: str


@dataclass(frozen=True, slots=True)
class Portfolio:
    """List policies -> pilot beam -> annealing.

    The annealing has all that the first two leave and starts from the best so far: one long chain is better than two of half its length,
    in every shape of graph that was tried.
    """

    name: str = "portfolio"
    is_baseline: bool = False

    def propose(self, problem: Problem, context: SearchContext) -> list[Schedule]:
        """Every schedule the three steps ended with, best predicted first."""
        return list(dict.fromkeys(candidate.schedule(problem) for candidate in self.candidates(problem, context)))

    def candidates(self, problem: Problem, context: SearchContext, starts: Sequence[Candidate] = ()) -> list[Candidate]:
        """As :meth:`propose`, as arrays; ``starts`` are more schedules to anneal from."""
        lanes, widths = context.lanes(problem), context.width_indices(problem)
        decoder = Decoder(problem, lanes, widths)
        found = [candidate for candidate, _ in best_policies(problem, context, decoder)] + list(starts)
        alone = on_one_lane(problem, decoder)
        if alone.makespan_us < min(candidate.makespan_us for candidate in found):
            found.append(alone)
        left = context.max_evaluations - decoder.evaluations
        if left > 0 and not context.expired():
            piloted, spent = PILOT_BEAM.run(problem, context.share(int(left * _PILOT_SHARE), seconds_share=0.4))
            found += piloted
            left -= spent
        if left > 0 and not context.expired():
            annealer = Annealer(problem, lanes, widths)
            start = min(found, key=lambda candidate: candidate.makespan_us)
            found += annealer.run(start, context.share(left), self.name)[0]
        return sorted(found, key=lambda candidate: candidate.makespan_us)


def difference(first: Schedule, second: Schedule) -> float:
    """Share (0 to 1) of operators that follow another operator on their lane, or have another width or variant, in the second schedule."""
    return _changed_share(_followed(first), _followed(second))


def _changed_share(first: Ints, second: Ints) -> float:
    return float(np.mean((first != second).any(axis=0))) if first.shape[1] else 0.0


def _followed(schedule: Schedule) -> Ints:
    """Each operator's predecessor on its lane (-1 none), its width and its variant: int32 ``[3, n]``."""
    last: dict[int, int] = {}
    followed = [-1] * len(schedule.order)
    for index in schedule.order:
        lane = schedule.lane[index]
        followed[index] = last.get(lane, -1)
        last[lane] = index
    return np.array([followed, schedule.width, schedule.variant], dtype=np.int32)


def proposals(
    problem: Problem,
    context: SearchContext,
    *,
    lanes_matter: bool,
    count: int = 32,
    strategies: Sequence[Strategy] | None = None,
    priority_variants: int = 0,
) -> list[Proposal]:
    """The candidate set for the device: every baseline, and a diverse choice of what :class:`Portfolio` found, best predicted first.

    Args:
        problem: what to schedule.
        context: the budget of the search; baselines get a share of it where they need one.
        lanes_matter: as in ``core.schedule.canonical_key``; schedules with one key are one proposal.
        count: most proposals; all baselines are kept even beyond it.
        strategies: what must be in the set; default every registered baseline.
        priority_variants: so many of the best finds come a second time with node priorities (``priorities.by_path``); CUDA only. They
            take the places of the last finds.
    """
    required = list(baselines() if strategies is None else strategies)
    merged: dict[str, Proposal] = {}
    for strategy in required:
        share = context.share(context.max_evaluations // 10, seconds_share=0.1)
        schedules = strategy.propose(problem, share)
        # A baseline is what its authors would run: its first proposal, or each of its documented variants.
        for schedule in schedules if strategy.is_baseline else schedules[:1]:
            _merge(problem, merged, strategy.name, strategy.is_baseline, schedule, lanes_matter)
    must = list(merged)
    places = max(0, count - len(must))
    finder = Portfolio()
    pool: dict[str, Proposal] = {}
    # Of a large graph it takes seconds, which where it has no place are lost.
    for schedule in finder.propose(problem, context) if places else ():
        _merge(problem, pool, finder.name, False, schedule, lanes_matter)
    for key in must:
        if key in pool:
            merged[key] = replace(merged[key], strategies=(*merged[key].strategies, *pool.pop(key).strategies))
    kept = _diverse(sorted(pool.values(), key=lambda proposal: proposal.predicted_us), places)
    if variants := [_with_priorities(problem, proposal, lanes_matter) for proposal in kept[:priority_variants]]:
        kept = kept[: max(1, places - len(variants))] + variants
    logger.info("%d candidates: %d baselines, %d of %d found by %s", len(must) + len(kept), len(must), len(kept), len(pool), finder.name)
    return sorted([*merged.values(), *kept], key=lambda proposal: proposal.predicted_us)


def _with_priorities(problem: Problem, proposal: Proposal, lanes_matter: bool) -> Proposal:
    schedule = by_path(problem, proposal.schedule)
    key = canonical_key(problem.graph, schedule, lanes_matter=lanes_matter)
    return replace(proposal, strategies=(f"{proposal.strategies[0]}+priority",), schedule=schedule, key=key)


def _merge(problem: Problem, into: dict[str, Proposal], name: str, is_baseline: bool, schedule: Schedule, lanes_matter: bool) -> None:
    key = canonical_key(problem.graph, schedule, lanes_matter=lanes_matter)
    known = into.get(key)
    if known is None:
        into[key] = Proposal((name,), is_baseline, schedule, makespan_us(problem, schedule), key)
    elif name not in known.strategies:
        into[key] = replace(known, strategies=(*known.strategies, name), is_baseline=known.is_baseline or is_baseline)


def _diverse(ranked: Sequence[Proposal], count: int) -> list[Proposal]:
    kept: list[Proposal] = []
    passed_over: list[Proposal] = []
    forms: list[Ints] = []
    for proposal in ranked:
        if len(kept) == count:
            break
        form = _followed(proposal.schedule)
        if all(_changed_share(form, other) >= _LEAST_DIFFERENCE for other in forms):
            kept.append(proposal)
            forms.append(form)
        else:
            passed_over.append(proposal)
    return kept + passed_over[: count - len(kept)]


PORTFOLIO = Portfolio()
