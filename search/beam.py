"""Beam search over prefixes of a schedule: each level places one more operator, simulated prefixes are extended, never repeated.

``beam`` ranks prefixes by a bound (longest path, evenly shared work); ``pilot_beam`` ranks each child by completing it with the
best list policy, which costs more for each decision and decides far better.

*Source:* Lowerre, "The Harpy Speech Recognition System", CMU 1976 (beam search); Voss, Fink and Duin, "Looking Ahead with the Pilot
Method", Annals of Operations Research 136, 2005 (completing partial solutions).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autosched.core.schedule import Schedule
from autosched.search.compiled import layout
from autosched.search.policies import Candidate, Decoder, Policy, best_policies, on_one_wide_lane, read_candidate
from autosched.search.problem import Floats, Ints, Problem
from autosched.search.strategy import SearchContext


@dataclass(frozen=True, slots=True)
class Beam:
    """Beam search. ``width`` prefixes survive each level; ``branch`` operators are tried for each of them."""

    name: str
    width: int
    branch: int
    pilot: bool
    is_baseline: bool = False

    def propose(self, problem: Problem, context: SearchContext) -> list[Schedule]:
        """The schedules of the last level, best first, and the best list policy's."""
        return list(dict.fromkeys(candidate.schedule(problem) for candidate in self.run(problem, context)[0]))

    def run(self, problem: Problem, context: SearchContext) -> tuple[list[Candidate], int]:
        """As :meth:`propose`, as arrays with predicted makespans; and the evaluations spent."""
        search = _Search(self, problem, context)
        search.run()
        return search.results(), search.spent


class _Search:
    def __init__(self, beam: Beam, problem: Problem, context: SearchContext) -> None:
        from autosched.search.compiled import beam as compiled

        self.compiled = compiled
        self.beam, self.problem, self.context = beam, problem, context
        self.lanes = context.lanes(problem)
        self.widths = context.width_indices(problem)
        self.decoder = Decoder(problem, self.lanes, self.widths)
        ranked = best_policies(problem, context, self.decoder)
        self.finished: list[Candidate] = [ranked[0][0]]
        self.policy: Policy = ranked[0][1]
        self.spent = self.decoder.evaluations
        self.bottom = problem.bottom_levels_us(int(self.widths[0]))
        # The order in which operators are tried is always by path length; the policy's own priority completes prefixes.
        self.priority = self.decoder.priority(self.policy) if beam.pilot else self.bottom
        self.policy_vector = self.decoder.vector(self.policy)
        count = problem.count
        self.words = np.random.default_rng(1).integers(1, 2**62, size=count, dtype=np.int64)
        shape = layout.float_row(count, self.lanes), layout.int_row(count, self.lanes)
        self.rows: tuple[Floats, Ints] = np.zeros((beam.width, shape[0])), np.zeros((beam.width, shape[1]), dtype=np.int32)
        self.next_rows: tuple[Floats, Ints] = np.zeros_like(self.rows[0]), np.zeros_like(self.rows[1])
        self.trial: tuple[Floats, Ints] = np.zeros(shape[0]), np.zeros(shape[1], dtype=np.int32)
        capacity = beam.width * beam.branch * len(self.widths) * 2
        self.children = np.zeros((capacity, 5), dtype=np.int64)
        self.scores = np.zeros(capacity)
        self.states = 1

    def run(self) -> None:
        """Place operators level by level while the budget lasts."""
        problem, context = self.problem, self.context
        layout.reset_state(self.rows[0][0], self.rows[1][0], self.lanes, problem.count, problem.pred_ptr)
        for level in range(problem.count):
            if self.spent >= context.max_evaluations or context.expired():
                self._complete()
                return
            found = self._expand()
            self.spent += found
            self._keep(found)
            if level % 16 == 0:
                context.progress(self.beam.name, self.spent, min(candidate.makespan_us for candidate in self.finished))
        self._complete()

    def results(self) -> list[Candidate]:
        """Complete schedules, best first."""
        return sorted(self.finished, key=lambda candidate: candidate.makespan_us)

    def _expand(self) -> int:
        if self.beam.pilot:
            return self._expand_by_pilot()
        from autosched.search.compiled.beam_level import expand_level

        return int(
            expand_level(
                *self.problem.arrays, *self.rows, self.states, self.lanes, self.lanes, self.bottom, self.priority, self.widths,
                self.beam.branch, self.words, self.children, self.scores, *self.trial,
            )
        )  # fmt: skip

    def _expand_by_pilot(self) -> int:
        """As ``expand_level``, each child scored by completing it.

        From here, not from compiled code: a completion takes longer than the calls, and compiling both into one function takes seconds.
        """
        compiled, problem = self.compiled, self.problem
        floats, ints = self.trial
        options = np.zeros(6 * self.beam.branch * len(self.widths) + 6, dtype=np.int32)
        found = 0
        for state in range(self.states):
            count = compiled.branches(
                *problem.arrays, self.rows[0][state], self.rows[1][state], self.lanes, self.lanes, self.priority, self.widths, options,
                self.beam.branch,
            )  # fmt: skip
            for operator, width, hold in options[: 3 * count].reshape(-1, 3).tolist():
                # Where thousands of operators are ready at once, a completion takes a second, and a level dozens of them.
                if found and self.context.expired():
                    return found
                floats[:] = self.rows[0][state]
                ints[:] = self.rows[1][state]
                key = compiled.extend(*problem.arrays, floats, ints, self.lanes, self.lanes, operator, width, hold, self.words)
                self.children[found] = (state, operator, width, hold, key)
                self.scores[found] = self._finish(floats, ints)
                found += 1
        return found

    def _keep(self, found: int) -> None:
        seen: set[int] = set()
        kept = 0
        for child in np.argsort(self.scores[:found], kind="stable").tolist():
            parent, operator, width, hold, key = self.children[child].tolist()
            if key in seen:
                continue
            seen.add(key)
            floats, ints = self.next_rows[0][kept], self.next_rows[1][kept]
            floats[:] = self.rows[0][parent]
            ints[:] = self.rows[1][parent]
            self.compiled.extend(*self.problem.arrays, floats, ints, self.lanes, self.lanes, operator, width, hold, self.words)
            if self.beam.pilot and kept == 0:
                self._remember(floats, ints)
            kept += 1
            if kept == self.beam.width:
                break
        self.rows, self.next_rows = self.next_rows, self.rows
        self.states = kept

    def _remember(self, floats: Floats, ints: Ints) -> None:
        """Keep the completion of a prefix if it is the best schedule so far."""
        candidate = self._completed(floats, ints)
        if candidate.makespan_us < min(known.makespan_us for known in self.finished):
            self.finished.append(candidate)

    def _completed(self, floats: Floats, ints: Ints) -> Candidate:
        trial_floats, trial_ints = self.trial
        trial_floats[:] = floats
        trial_ints[:] = ints
        makespan = self._finish(trial_floats, trial_ints)
        return on_one_wide_lane(self.problem, self.lanes, read_candidate(trial_ints, self.lanes, self.problem.count, makespan))

    def _finish(self, floats: Floats, ints: Ints) -> float:
        return self.decoder.complete(floats, ints, self.priority, self.policy_vector)

    def _complete(self) -> None:
        for state in range(self.states):
            if state and self.context.expired():
                return
            self.finished.append(self._completed(self.rows[0][state], self.rows[1][state]))


BEAM = Beam("beam", width=32, branch=8, pilot=False)
PILOT_BEAM = Beam("pilot_beam", width=4, branch=6, pilot=True)
