"""Who walks the lanes of the next run, going by how often the team of threads came late, and by what was faster without it.

A thread that spins for its next operator has used up its share of a core; where another process wants the core, the thread is without it
for milliseconds at a time, and the whole team waits. A thread that slept until it was called is let in at once, and the caller alone waits
for nobody. So while a machine is busy the team is left alone, and tried again now and then.
"""

from __future__ import annotations

import enum

_FIRST_RUNS = 8
_MOST_RUNS = 256
_IN_TIME = 32
_TRIALS = 2


class Walkers(enum.Enum):
    """Who walks the lanes of a run."""

    TEAM = "team"
    ALONE = "alone"  # the calling thread, all of them
    THREADS = "threads"  # one for each, that sleep until they are called


class Lateness:
    """After a run for which it came late the team is left alone: for twice as many runs each time, until it has been in time for long.

    In these, the others try each other a few times, and the faster one has the rest.
    """

    __slots__ = ("_in_time", "_left", "_next", "_took_ns")

    def __init__(self) -> None:
        self._left = 0
        self._next = _FIRST_RUNS
        self._in_time = 0
        self._took_ns: dict[Walkers, list[int]] = {}

    def walkers(self) -> Walkers:
        """Whose the run is that begins now."""
        if self._left == 0:
            return Walkers.TEAM
        self._left -= 1
        # The one tried less often; else the faster one.
        return min(self._took_ns, key=lambda who: (len(self._took_ns[who]), sum(self._took_ns[who])))

    def took(self, who: Walkers, time_ns: int) -> None:
        """How long a run without the team was."""
        if len(self._took_ns[who]) < _TRIALS:
            self._took_ns[who].append(time_ns)

    def came(self, *, late: bool) -> None:
        """What became of a run of the team."""
        if late:
            self._in_time = 0
            self._left = self._next
            self._next = min(2 * self._next, _MOST_RUNS)
            self._took_ns = {Walkers.ALONE: [], Walkers.THREADS: []}
        else:
            self._in_time += 1
            if self._in_time >= _IN_TIME:
                self._next = _FIRST_RUNS
