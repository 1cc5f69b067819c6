"""How a long job says where it is."""

from __future__ import annotations

import math
from typing import Protocol

from autosched.core.errors import UsageError

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


def require_progress(progress: object) -> None:
    """Find out before a job begins that what was given cannot be told of it.

    Raises:
        UsageError: if it is neither ``None`` nor has both methods.
    """
    if progress is not None and not all(callable(getattr(progress, name, None)) for name in ("stage", "update")):
        raise UsageError(f"progress is a {type(progress).__name__}; expected an object with the methods stage and update, or None")


class Silent:
    """Says nothing."""

    def stage(self, name: str, left_s: float | None = None) -> None:
        """Ignore."""

    def update(
        self, *, done: int, total: int, incumbent: str = "", measured: int = 0, failed: int = 0, left_s: float | None = None
    ) -> None:
        """Ignore."""
