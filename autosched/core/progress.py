"""How a long job says where it is."""

from __future__ import annotations

import math
from typing import Protocol

OUTSIDE = math.inf
"""What remains of the budget in a stage that takes nothing from it."""


class Progress(Protocol):
    """Told about a job as it runs. Implementations must be quick and must not raise."""

    def stage(self, name: str, left_s: float | None = None) -> None:
        """A new stage has begun; ``left_s`` seconds remain of the budget.

        ``OUTSIDE``: it and what follows are not in the budget, until a stage says again how much is left.
        """

    def update(
        self, *, done: int, total: int, incumbent: str = "", measured: int = 0, failed: int = 0, left_s: float | None = None
    ) -> None:
        """``done`` of ``total`` of the stage are finished; ``incumbent`` describes the best so far."""


class Silent:
    """Says nothing."""

    def stage(self, name: str, left_s: float | None = None) -> None:
        """Ignore."""

    def update(
        self, *, done: int, total: int, incumbent: str = "", measured: int = 0, failed: int = 0, left_s: float | None = None
    ) -> None:
        """Ignore."""
