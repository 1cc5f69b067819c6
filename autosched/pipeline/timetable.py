"""When a job must be through with what, so that its verdict is in before its budget ends.

A verdict has a price that no job may go below: the sequential schedules and at least one other in ``LEAST_ROUNDS`` rounds with the
baselines, the duel, the winner's trace and everybody's peak memory. Everything before it (search, proofs, the device loop) gets what is
left, and where that is little, fewer candidates are proved, tried and compared; none is judged on fewer rounds. What things take is
learnt on the way: one proof and one turn of a schedule in a round.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from autosched.pipeline.judge import LEAST_DUEL, LEAST_ROUNDS

# A baseline outside (the model as it came) is timed by itself, after a run that is not counted, and is slower than a schedule.
_OUTSIDE_TURNS = 2
# The winner's trace is ten runs in two requests; two turns are for what requests themselves take.
_TRACE_TURNS = 12
# What halving makes of one candidate on average: two turns in each of its rungs, and its first run, which is checked.
_LOOP_TURNS = 9
_SEARCH_SHARE = 0.3
_PROOF_SHARE = 0.5
_FINAL_SHARE = 0.25
_LEAST_LOOP = 3

LEAST_ROWS = 4
"""Schedules that the least final comparison has: the sequential ones and two others."""


@dataclass(slots=True)
class Pace:
    """Means of what was seen so far in this job, in seconds; 0 before anything was."""

    proofs: int = 0
    proofs_s: float = 0.0
    turns: int = 0
    turns_s: float = 0.0

    @property
    def proof_s(self) -> float:
        """One proof of a schedule: every input set, twice."""
        return self.proofs_s / self.proofs if self.proofs else 0.0

    @property
    def turn_s(self) -> float:
        """One schedule timed once in a round, with the run before it that is not counted."""
        return self.turns_s / self.turns if self.turns else 0.0

    def proved(self, seconds: float) -> None:
        """One proof took ``seconds``."""
        self.proofs += 1
        self.proofs_s += seconds

    def timed(self, seconds: float, turns: int) -> None:
        """``turns`` turns together took ``seconds``."""
        self.turns += turns
        self.turns_s += seconds


@dataclass(slots=True)
class Timetable:
    """A job's time. All times are those of ``time.monotonic``.

    Args:
        begin_s: when the budget began.
        total_s: seconds of it.
        end_s: when it ends.
        outside: baselines that are no schedules, in every round of the final comparison.
        unbounded: leave nothing out, whatever it takes; for a table of everything.
    """

    begin_s: float
    total_s: float
    end_s: float
    outside: int = 2
    unbounded: bool = False
    pace: Pace = field(default_factory=Pace)

    @staticmethod
    def starting(total_s: float, *, unbounded: bool = False) -> Timetable:
        """One that begins now."""
        now = time.monotonic()
        return Timetable(now, total_s, now + total_s, unbounded=unbounded)

    def left_s(self) -> float:
        """Seconds to the end; none after it."""
        return max(self.end_s - time.monotonic(), 0.0)

    def free_s(self, rows: int) -> float:
        """Seconds that are left besides the least verdict on ``rows`` schedules; negative if they are too few for it."""
        return self.end_s - time.monotonic() - self.verdict_s(rows)

    def verdict_s(self, rows: int) -> float:
        """What the final comparison of ``rows`` schedules takes at the least, with all that follows it."""
        return self._verdict_s(rows, LEAST_ROUNDS)

    def after_comparison_s(self, rows: int) -> float:
        """What follows the rounds of the final comparison, at the least: the duel, the trace, and a run of each for its peak memory."""
        return self.pace.turn_s * 3 * LEAST_DUEL + self.after_duel_s(rows)

    def after_duel_s(self, rows: int) -> float:
        """What follows the duel."""
        return self.pace.turn_s * (_TRACE_TURNS + rows)

    def rows(self, least: int, most: int) -> int:
        """How many schedules the final comparison has the time for, between ``least`` and ``most``."""
        if self.unbounded or self.pace.turn_s <= 0.0:
            return most
        return max(least, min(most, math.floor((self.left_s() - self.verdict_s(0)) / self._row_s())))

    def search_until_s(self, least_rows: int) -> float:
        """When the search must be over: it gets a share of what is free."""
        return time.monotonic() + _SEARCH_SHARE * max(self.free_s(least_rows), 0.0)

    def prove_until_s(self, least_rows: int, *, refine: bool) -> float:
        """When the last proof of a proposal must begin; what is free after it is the device loop's, if there is one."""
        if self.unbounded:
            return math.inf
        return time.monotonic() + (_PROOF_SHARE if refine else 1.0) * max(self.free_s(least_rows), 0.0)

    def loop_until_s(self, rows: int, final_rounds: int) -> float:
        """When the device loop must be over: a quarter of the budget is the final comparison's, but no more than all its rounds need."""
        wanted_s = _FINAL_SHARE * self.total_s
        if self.pace.turns:
            wanted_s = min(wanted_s, self._verdict_s(rows, final_rounds))
        return self.end_s - max(self.verdict_s(min(rows, LEAST_ROWS)), wanted_s)

    def loop_candidates(self, seconds: float, most: int) -> int:
        """How many candidates the device loop can prove and halve in ``seconds``, at most ``most``; 0 if too few to be worth it."""
        each_s = self._candidate_s()
        found = most if each_s <= 0.0 else min(most, math.floor(max(seconds, 0.0) / each_s))
        return found if found >= _LEAST_LOOP else 0

    def variants(self, seconds: float, most: int) -> int:
        """How many changes of variants can be tried in ``seconds``: a proof and eight rounds of each, the best in sixteen more."""
        each_s = self.pace.proof_s + 8 * self.pace.turn_s
        after_s = self.pace.proof_s + (8 + 3 * 16) * self.pace.turn_s
        return most if each_s <= 0.0 else max(0, min(most, math.floor((seconds - after_s) / each_s)))

    def work_s(self, proofs: int, turns: int) -> float:
        """What so many proofs and turns take."""
        return proofs * self.pace.proof_s + turns * self.pace.turn_s

    def more_proofs_s(self, unproved: int, rows: int, *, refine: bool) -> float:
        """What the budget is short of for so many more proofs, and for all those ``rows`` in the final comparison."""
        return max(unproved * self.pace.proof_s / (_PROOF_SHARE if refine else 1.0), self.more_rows_s(rows, refine=refine))

    def more_rows_s(self, rows: int, *, refine: bool) -> float:
        """What it is short of for so many in the final comparison."""
        wanted_s = self.verdict_s(rows)
        # The device loop takes all but a share.
        return max(0.0, wanted_s / _FINAL_SHARE - self.total_s if refine else wanted_s - self.left_s())

    def more_loop_s(self, seconds: float, candidates: int) -> float:
        """What it is short of for a device loop of so many candidates, which has ``seconds``; proofs share what is added."""
        return max(0.0, max(candidates, _LEAST_LOOP) * self._candidate_s() - seconds) / _PROOF_SHARE

    def extend(self, seconds: float) -> None:
        """Put the end off by ``seconds`` that are not the budget's."""
        self.end_s += seconds

    def _row_s(self) -> float:
        return self.pace.turn_s * (LEAST_ROUNDS + 1)

    def _candidate_s(self) -> float:
        return self.pace.proof_s + _LOOP_TURNS * self.pace.turn_s

    def _verdict_s(self, rows: int, rounds: int) -> float:
        # The anchor stands twice in every round.
        return self.pace.turn_s * rounds * (rows + 1 + _OUTSIDE_TURNS * self.outside) + self.after_comparison_s(rows)
