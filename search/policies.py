"""List scheduling as a small space: a policy says which ready operator goes next, when one is held back, and how wide it runs.

``list_policies`` decodes a fixed portfolio of 24 policies (times a few width rules where operators have widths); ``optuna`` samples
the same space; the pilot beam completes its prefixes with the best of them.

*Source:* priority rules after Kolisch and Hartmann, "Heuristic algorithms for the resource-constrained project scheduling problem", in
Węglarz (ed.), Project Scheduling, Kluwer 1999; the interference terms are this project's.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from autosched.core.schedule import Schedule
from autosched.search.compiled import layout
from autosched.search.problem import Floats, Ints, Problem, one_wide_lane
from autosched.search.simulate import Evaluator
from autosched.search.strategy import Rule, SearchContext

NEVER = -1.0
ALWAYS = 1e9
"""Of ``Policy.wide_below``: no operator runs wide, and all of them do."""

_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Policy:
    """A point of the list-policy space. Weights and ``alpha`` are ratios; times they multiply are in microseconds.

    Args:
        bottom: weight of the longest path to the end.
        duration: weight of the operator's own time.
        successors: weight of the number of direct successors, in mean operator times.
        pressure: weight of the time the operator costs an average neighbour.
        alpha: weight of the interference with what runs now, subtracted.
        gate: an operator whose interference exceeds this many times its own time is held back.
        wide_below: the fastest width is chosen when at most this many other operators are ready or running.
        lanes_share: share (0 to 1] of the lanes used.
    """

    bottom: float = 1.0
    duration: float = 0.0
    successors: float = 0.0
    pressure: float = 0.0
    alpha: float = 0.0
    gate: float = math.inf
    wide_below: float = NEVER
    lanes_share: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """Decisions as arrays, int32 ``[n]`` each, and their predicted makespan."""

    makespan_us: float
    order: Ints
    lane: Ints
    width_index: Ints
    wait: Ints

    def schedule(self, problem: Problem) -> Schedule:
        """The schedule these decisions are.

        Raises:
            IllegalSchedule: never, unless a compiled kernel has a fault.
        """
        return problem.schedule(self.order, self.lane, width_index=self.width_index, wait=self.wait)


def portfolio(width_indices: Ints) -> list[Policy]:
    """The fixed policies: 4 priorities x 2 interference weights x 3 gates; with width rules for several ``width_indices`` (``[w]``)."""
    priorities = (Policy(), Policy(duration=1.0), Policy(bottom=0.0, duration=1.0), Policy(successors=1.0, pressure=-0.5))
    wide = (NEVER, 0.0, 1.0, ALWAYS) if len(width_indices) > 1 else (NEVER,)
    return [
        replace(base, alpha=alpha, gate=gate, wide_below=wide_below)
        for wide_below, base, alpha, gate in itertools.product(wide, priorities, (0.0, 1.0), (math.inf, 2.0, 1.0))
    ]


def mean_excess(excess: Floats, kernels: Ints) -> Floats:
    """How much each of some operators slows all of them down, in the mean: float64 ``[n]``.

    Args:
        excess: float64 ``[n_kernels, n_kernels]``, ``[a, b]`` is a's beside b.
        kernels: int32 ``[n]``: each operator's.
    """
    different, place = np.unique(kernels, return_inverse=True)
    means = np.zeros(len(different))
    # Some columns at a time: all operators beside all others are gigabytes where there are tens of thousands.
    for begin in range(0, len(different), _COLUMNS):
        some = different[begin : begin + _COLUMNS]
        # One column alone would be added up in another order, and have other last bits.
        means[begin : begin + len(some)] = excess[:, np.resize(some, max(2, len(some)))][kernels].mean(axis=0)[: len(some)]
    found: Floats = means[place]
    return found


class Decoder:
    """List scheduling of one problem under any policy. Not thread-safe; counts ``evaluations``."""

    def __init__(self, problem: Problem, lanes: int, width_indices: Ints) -> None:
        from autosched.search.compiled import policies as compiled

        self._compiled = compiled
        self.problem, self.lanes = problem, lanes
        self.evaluations = 0
        count = problem.count
        times = np.stack([problem.operator_us(int(place)) for place in width_indices])
        self.fastest: Ints = width_indices[np.argmin(times, axis=0)].astype(np.int32)
        self.narrow = int(width_indices[0])
        self._bottom = problem.bottom_levels_us(self.narrow)
        self._duration = problem.operator_us(self.narrow)
        self._successors = (problem.succ_ptr[1:] - problem.succ_ptr[:-1]) * float(self._duration.mean() if count else 0.0)
        rows = problem.kernel[:, self.narrow]
        self._pressure: Floats = mean_excess(problem.excess_first, rows) * self._duration
        self.floats = np.zeros(layout.float_row(count, lanes))
        self.ints = np.zeros(layout.int_row(count, lanes), dtype=np.int32)

    def priority(self, policy: Policy) -> Floats:
        """Priority of each operator: float64 ``[n]``, microseconds."""
        combined: Floats = (
            policy.bottom * self._bottom
            + policy.duration * self._duration
            + policy.successors * self._successors
            + policy.pressure * self._pressure
        )
        return combined

    def vector(self, policy: Policy) -> Floats:
        """The policy as the compiled list scheduler takes it: float64 ``[4]``."""
        used = max(1, math.ceil(policy.lanes_share * self.lanes))
        return np.array([policy.alpha, min(policy.gate, 1e300), policy.wide_below, used])

    def decode(self, policy: Policy) -> Candidate:
        """Schedule the whole graph under ``policy``."""
        problem = self.problem
        self.evaluations += 1
        layout.reset_state(self.floats, self.ints, self.lanes, problem.count, problem.pred_ptr)
        makespan_us = self.complete(self.floats, self.ints, self.priority(policy), self.vector(policy))
        return on_one_wide_lane(problem, self.lanes, read_candidate(self.ints, self.lanes, problem.count, makespan_us))

    def complete(self, floats: Floats, ints: Ints, priority: Floats, vector: Floats) -> float:
        """Schedule what a state leaves open, in place; the makespan in microseconds.

        Args:
            floats, ints: a state's rows (:mod:`autosched.search.compiled.layout`).
            priority, vector: as :meth:`priority` and :meth:`vector` give them.
        """
        return float(
            self._compiled.list_finish(*self.problem.arrays, floats, ints, self.lanes, priority, vector, self.fastest, self.narrow)
        )


def on_one_wide_lane(problem: Problem, lanes: int, candidate: Candidate) -> Candidate:
    """The same decisions with every wide operator on lane 0, as ``Problem.schedule`` exports them, and the makespan of that."""
    lane = one_wide_lane(candidate.lane, candidate.width_index, len(problem.costs.widths))
    if np.array_equal(lane, candidate.lane):
        return candidate
    makespan_us = Evaluator(problem, lanes).makespan_us(candidate.order, lane, candidate.width_index, candidate.wait)
    return replace(candidate, makespan_us=makespan_us, lane=lane)


def read_candidate(ints: Ints, lanes: int, count: int, makespan_us: float) -> Candidate:
    """The decisions held by the int row of a complete state (int32, laid out as in :mod:`autosched.search.compiled.layout`)."""
    base = layout.HEADER + 4 * lanes
    part = [ints[base + place * count : base + (place + 1) * count].copy() for place in range(1, 5)]
    return Candidate(makespan_us, order=part[3], lane=part[0], width_index=part[1], wait=part[2])


def on_one_lane(problem: Problem, decoder: Decoder) -> Candidate:
    """The program's own order on one lane, each operator at its fastest width: no policy is this, and where waits cost more than operators
    take, every policy of several lanes is slower."""
    order = np.arange(problem.count, dtype=np.int32)
    lane, wait = np.zeros(problem.count, dtype=np.int32), np.full(problem.count, -1, dtype=np.int32)
    makespan_us = Evaluator(problem, decoder.lanes).makespan_us(order, lane, decoder.fastest, wait)
    return Candidate(makespan_us, order, lane, decoder.fastest, wait)


def best_policies(problem: Problem, context: SearchContext, decoder: Decoder) -> list[tuple[Candidate, Policy]]:
    """Every policy of the portfolio that the context pays for (at least one), best first."""
    found: list[tuple[Candidate, Policy]] = []
    for policy in portfolio(context.width_indices(problem)):
        if found and (len(found) >= context.max_evaluations or context.expired()):
            break
        found.append((decoder.decode(policy), policy))
    return sorted(found, key=lambda item: item[0].makespan_us)


def _list_policies(problem: Problem, context: SearchContext) -> list[Schedule]:
    decoder = Decoder(problem, context.lanes(problem), context.width_indices(problem))
    found = best_policies(problem, context, decoder)
    context.progress("list_policies", decoder.evaluations, found[0][0].makespan_us)
    return list(dict.fromkeys(candidate.schedule(problem) for candidate, _ in found))


LIST_POLICIES = Rule("list_policies", _list_policies, is_baseline=False)
