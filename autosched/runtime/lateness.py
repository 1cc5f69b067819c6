"""Who walks the lanes of the next run, going by how often the team of threads came late, and by what was faster without it.

A thread that spins for its next operator has used up its share of a core; where another process wants the core, the thread is without it
for milliseconds at a time, and the whole team waits. A thread that slept until it was called is let in at once, and the caller alone waits
for nobody. So while a machine is busy the team is left alone, and tried again now and then. One late run is no busy machine: the team is
left alone only as long as its runs, late ones included, take longer than those of the others.
"""

from __future__ import annotations

import enum

_FIRST_RUNS = 8
_MOST_RUNS = 256
_IN_TIME = 32
_TRIALS = 2
# The weight of the newest run in what a run of the team takes: two or three late ones in a row count as much as all before them.
_NEWEST = 0.25
# Late runs that are put up with before the others are tried again: what they took last is no longer known to be true.
_MOST_BORNE = 16


class Walkers(enum.Enum):
    """Who walks the lanes of a run."""

    TEAM = "team"
    ALONE = "alone"  # the calling thread, all of them
    THREADS = "threads"  # one for each, that sleep until they are called


class Lateness:
    """After a late run the others try each other a few times. If they are no faster than the team has become, it has the next run.

    Else it is left alone, for twice as many runs each time, until it has been in time for long; the fastest of the others has these runs.
    """

    __slots__ = ("_borne", "_in_time", "_left", "_next", "_others_ns", "_team_ns", "_took_ns", "_warm")

    def __init__(self) -> None:
        self._left = 0
        self._next = _FIRST_RUNS
        self._in_time = 0
        self._borne = 0
        self._warm = False
        self._team_ns = 0.0
        self._others_ns = 0.0
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
        if len(self._took_ns[who]) == _TRIALS:
            return
        self._took_ns[who].append(time_ns)
        if all(len(trials) == _TRIALS for trials in self._took_ns.values()):
            self._others_ns = min(map(sum, self._took_ns.values())) / _TRIALS
            if self._others_ns >= self._team_ns:
                self._left, self._next = 0, _FIRST_RUNS

    def came(self, time_ns: int, *, late: bool) -> None:
        """What became of a run of the team, and how long it was."""
        if not self._warm:
            # The first run is no measure: it wakes what sleeps, and fills caches.
            self._warm = True
            return
        self._team_ns += (time_ns - self._team_ns) * (_NEWEST if self._team_ns else 1.0)
        if not late:
            self._in_time += 1
            if self._in_time >= _IN_TIME:
                self._next = _FIRST_RUNS
            return
        self._in_time = 0
        self._borne += 1
        if self._team_ns > self._others_ns or self._borne > _MOST_BORNE:
            self._borne = 0
            self._left = self._next
            self._next = min(2 * self._next, _MOST_RUNS)
            self._took_ns = {Walkers.ALONE: [], Walkers.THREADS: []}
