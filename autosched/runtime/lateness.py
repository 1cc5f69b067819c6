"""Whether lanes are the threads of a team in the next run, going by how often one of those came late.

A thread that spins for its next operator has used up its share of a core; where another process wants the core, the thread is without it
for milliseconds at a time, and the whole team waits. A thread that slept until it was called is let in at once. So while a machine is busy,
lanes are better off with threads of their own, and a team is tried again now and then.
"""

from __future__ import annotations

_FIRST_RUNS = 8
_MOST_RUNS = 256
_IN_TIME = 32


class Lateness:
    """After a run for which it came late the team is left alone: for twice as many runs each time, until it has been in time for long."""

    __slots__ = ("_in_time", "_left", "_next")

    def __init__(self) -> None:
        self._left = 0
        self._next = _FIRST_RUNS
        self._in_time = 0

    def team(self) -> bool:
        """Whether the run that begins now has the team."""
        if self._left == 0:
            return True
        self._left -= 1
        return False

    def came(self, *, late: bool) -> None:
        """What became of a run of the team."""
        if late:
            self._in_time = 0
            self._left = self._next
            self._next = min(2 * self._next, _MOST_RUNS)
        else:
            self._in_time += 1
            if self._in_time >= _IN_TIME:
                self._next = _FIRST_RUNS
