"""How much work a tuning job does: one source of the numbers behind ``--effort``."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from autosched.search.loop import LoopSettings


class Effort(enum.StrEnum):
    """What a user asks for."""

    QUICK = "quick"
    BALANCED = "balanced"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class EffortProfile:
    """What one effort means: simulated schedules for each round of search, and the device loop's measurements.

    ``trials`` are policies that Optuna tries on the device after the loop; ``idle_climbs`` batches of small changes in a row that come to
    nothing end what follows that (``climb``), if there is time for it.
    """

    evaluations: int
    rounds: int
    candidates: int
    first_rounds: int
    finalists: int
    trials: int = 0
    idle_climbs: int = 0

    def loop(self, *, lanes_matter: bool, priority_variants: int = 0) -> LoopSettings:
        """The device loop's settings."""
        return LoopSettings(
            lanes_matter=lanes_matter,
            rounds=self.rounds,
            candidates=self.candidates,
            first_rounds=self.first_rounds,
            finalists=self.finalists,
            priority_variants=priority_variants,
        )


PROFILES = {
    Effort.QUICK: EffortProfile(evaluations=20_000, rounds=1, candidates=12, first_rounds=2, finalists=4),
    Effort.BALANCED: EffortProfile(evaluations=100_000, rounds=3, candidates=32, first_rounds=2, finalists=4, trials=12, idle_climbs=12),
    Effort.FULL: EffortProfile(evaluations=400_000, rounds=6, candidates=48, first_rounds=4, finalists=6, trials=40, idle_climbs=24),
}
"""Source: budgets from the selection experiments (halving over 32 candidates, 30 to 100 thousand evaluations); simulated."""
