"""A model that is changed before each of its calls: to bind its schedule every time takes longer than to run it as it came."""

from __future__ import annotations

# New weights that are put in place under traffic come in a few calls.
_PATIENCE = 8
# Calls that are left to the model until its schedule is bound again: at first, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 1024


class Unrest:
    """How often in a row a schedule was bound again, and for how many calls its model is left alone.

    It is bound now and then nevertheless, so that a model that has come to rest runs on its schedule again.
    """

    __slots__ = ("_in_a_row", "_left", "pause")

    def __init__(self) -> None:
        self.calm()

    def calm(self) -> None:
        """It was not changed before a call."""
        self._in_a_row = 0
        self._left = 0
        self.pause = 0

    @property
    def any(self) -> bool:
        """Whether it was changed before the last call."""
        return self._in_a_row > 0

    def leaves(self) -> bool:
        """Whether a call before which it was changed is left to the model; else the schedule is to be bound again."""
        if self._left > 0:
            self._left -= 1
            return True
        self._in_a_row += 1
        if self._in_a_row > _PATIENCE:
            self.pause = self._left = min(2 * self.pause or _FIRST_PAUSE, _LONGEST_PAUSE)
        return False
