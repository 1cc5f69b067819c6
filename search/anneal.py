"""Simulated annealing on the direct encoding: a launch order, a lane for each operator, its width or variant, and at most one extra wait.

The temperature is low (0.3 % of the makespan at first, a sixtieth of that at the end): near a good schedule most moves cost several per
cent, and hotter runs only lose what the start had. Where operators are few, each is a large part of the makespan, so every move costs more
than that and nothing would leave the nearest optimum: from a list policy, with n below 28, the first temperature is (28 / n)^2 times as
high.

*Source:* Kirkpatrick, Gelatt and Vecchi, "Optimization by Simulated Annealing", Science 220, 1983.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from autosched.core.schedule import Schedule
from autosched.search.compiled import layout
from autosched.search.policies import Candidate, Decoder, best_policies, on_one_lane, on_one_wide_lane
from autosched.search.problem import Floats, Ints, Problem
from autosched.search.simulate import Evaluator
from autosched.search.strategy import SearchContext

_CHUNK = 2000  # schedules between two that are kept
_LOOK = 2_000_000  # operators simulated between two looks at the clock, at most
_MARKS = 11  # states that an evaluation leaves for later ones to go on from
_HOT, _COLD = 0.003, 0.00005  # first and last temperature, share of the makespan
_FEW = 28  # operators; with fewer, annealing from a list policy begins hotter


@dataclass(frozen=True, slots=True)
class MoveWeights:
    """How often each kind of move is drawn; zero switches it off (which is what the ablations do).

    ``exchange``: two operators change places and lanes; ``tails``: from some place on, two lanes change names. Single moves hardly
    improve a wide graph, where every lane is full: what helps is another operator in the same place.

    ``width_run``: up to 16 operators that follow each other in the launch order get one width, where lanes are one team: a wide operator
    between one-thread ones makes all lanes wait twice, so the first step towards a good schedule is often a bad one.

    ``near`` is the share of order moves that stay within a few places, ``critical`` the share of moves of operators on the chain that
    decides the makespan.
    """

    lane: float = 0.20
    order: float = 0.25
    lane_and_order: float = 0.20
    width: float = 0.10
    width_run: float = 0.50
    wait: float = 0.20
    exchange: float = 1.00
    tails: float = 0.10
    near: float = 0.5
    critical: float = 0.4

    def cumulative(self, *, lanes: int, widths: int, choices: int, one_team: bool) -> Floats:
        """Chances up to and including each kind, then ``near`` and ``critical``: float64 ``[10]``; kinds without effect get none."""
        several = lanes > 1
        weights = np.array(
            [
                self.lane * several, self.order, self.lane_and_order * several, self.exchange, self.tails * several,
                self.width * (choices > 1), self.width_run * (widths > 1 and one_team), self.wait * several,
            ]
        )  # fmt: skip
        total = float(weights.sum())
        share = np.cumsum(weights / total) if total > 0 else np.array([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
        result: Floats = np.append(share, [self.near, self.critical])
        return result


class Annealer:
    """One annealing run on one problem: give it a start, ask it to spend evaluations. Deterministic for a seed."""

    def __init__(self, problem: Problem, lanes: int, widths: Ints, *, moves: MoveWeights | None = None, hot: float = _HOT) -> None:
        from autosched.search.compiled import anneal as compiled

        self._compiled = compiled
        self.problem, self.lanes, self.widths = problem, lanes, widths
        # Other variants are as wide as the first width.
        others = range(len(problem.costs.widths), problem.kernel.shape[1]) if 0 in widths else ()
        self._choices: Ints = np.append(widths, np.array(others, dtype=np.int32))
        self._moves = (moves or MoveWeights()).cumulative(
            lanes=lanes, widths=len(widths), choices=len(self._choices), one_team=problem.costs.one_team
        )
        self._hot = hot
        self._space = layout.workspace(problem.count, lanes, marks=min(_MARKS, problem.count // 4))
        self._bound = least_time_to_end_us(problem, self._choices, lanes)

    def run(self, start: Candidate, context: SearchContext, name: str) -> tuple[list[Candidate], int]:
        """Anneal from ``start``.

        Returns:
            The start and each chunk's improvement, best first, and the number of simulated schedules.
        """
        # Compiled code checks no bounds: it would draw one of no operators.
        total = most = context.max_evaluations if self.problem.count else 0
        start = on_one_wide_lane(self.problem, self.lanes, start)
        scale_us = max(start.makespan_us, 1e-9)
        position = np.empty_like(start.order)
        position[start.order] = np.arange(self.problem.count, dtype=np.int32)
        current: Ints = np.stack([start.order, position, start.lane, start.width_index, start.wait]).astype(np.int32)
        best = current.copy()
        values = np.array([start.makespan_us, start.makespan_us])
        temperatures = np.array([self._hot, _COLD]) * scale_us
        seen = np.zeros((3, self.problem.count))
        known = np.zeros((3, self.problem.count + 1), dtype=np.uint32)
        random_state = context.rng.integers(0, 2**63, size=1, dtype=np.uint64)
        found, spent, step, begin_s = [start], 0, 0, time.monotonic()

        def keep() -> None:
            if values[1] < found[0].makespan_us:
                found.insert(0, Candidate(float(values[1]), best[0].copy(), best[2].copy(), best[3].copy(), best[4].copy()))

        look = max(1, _LOOK // max(1, self.problem.count))
        while step < total and not context.expired():
            steps = min(_CHUNK - step % _CHUNK, look, total - step)
            spent += self._compiled.anneal_steps(
                *self.problem.arrays, self.lanes, current, best, values, self._bound, self.widths, self._choices, self._moves,
                temperatures, step, steps, total, random_state, seen, known, *self._space,
            )  # fmt: skip
            step += steps
            if context.deadline_s is not None:
                # It has to be cold when the time is up: while it is hot, it finds nothing better than it began with.
                now_s = time.monotonic()
                total = min(most, step + int(step * (context.deadline_s - now_s) / max(now_s - begin_s, 1e-9)))
            if step % _CHUNK == 0:
                keep()
            context.progress(name, spent, float(values[1]))
        keep()
        found[0] = self._without_needless_waits(found[0])
        return found, spent

    def _without_needless_waits(self, candidate: Candidate) -> Candidate:
        """Drop every extra wait that the schedule is no slower without: each one is a real edge for the device to honour."""
        evaluator = Evaluator(self.problem, self.lanes)
        wait, best_us = candidate.wait.copy(), candidate.makespan_us
        for index in np.flatnonzero(wait >= 0).tolist():
            kept = int(wait[index])
            wait[index] = -1
            without_us = evaluator.makespan_us(candidate.order, candidate.lane, candidate.width_index, wait)
            if without_us <= best_us:
                best_us = without_us
            else:
                wait[index] = kept
        return replace(candidate, makespan_us=best_us, wait=wait)


def least_time_to_end_us(problem: Problem, widths: Ints, lanes: int) -> Floats:
    """A bound that lets an evaluation stop early: float64 ``[n]``, least time from an operator's start to the end of the run.

    The longest path at each operator's fastest width, shortened where some pair of operators speeds up together.
    """
    bound = problem.paths_to_end_us(problem.fastest_us(widths))
    helpful = min(0.0, float(problem.excess_first.min(initial=0.0)), float(problem.excess_last.min(initial=0.0)))
    scale = max(layout.MIN_SLOWDOWN, 1.0 + (lanes - 1) * helpful)
    result: Floats = bound * scale * (1.0 - 1e-12)
    return result


@dataclass(frozen=True, slots=True)
class Anneal:
    """Annealing from the best list policy (or sequential, if that is better)."""

    name: str = "anneal"
    is_baseline: bool = False

    def propose(self, problem: Problem, context: SearchContext) -> list[Schedule]:
        """The best schedule found, then what it improved on."""
        lanes, widths = context.lanes(problem), context.width_indices(problem)
        decoder = Decoder(problem, lanes, widths)
        policy = best_policies(problem, context, decoder)[0][0]
        start = min(policy, on_one_lane(problem, decoder), key=lambda candidate: candidate.makespan_us)
        hotter = max(1.0, _FEW / max(1, problem.count)) ** 2
        annealer = Annealer(problem, lanes, widths, hot=_HOT * hotter)
        found, _ = annealer.run(start, context.share(context.max_evaluations - decoder.evaluations), self.name)
        return list(dict.fromkeys(candidate.schedule(problem) for candidate in found))


ANNEAL = Anneal()
