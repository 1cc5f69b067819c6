"""What else the machine was doing while a sample was taken: stored with the sample, so that a bad one can be told later."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from autosched.core.records import Contamination
from autosched.runtime.cpu_quota import quota_group, used_seconds

# The kernel counts processor time in ticks of 10 ms: a shorter window would be mostly rounding.
_SHORTEST_WINDOW_S = 0.1


@dataclass(frozen=True, slots=True)
class LoadMark:
    """Busy time of all cores that this process may run on, and its own, seconds since some fixed moment; ``busy_s`` is -1 if unreadable.

    ``quota`` is how many cores' worth of time a control group leaves it, and ``shared_s`` the time of all processes that count for that
    quota; -1 if unknown.
    """

    wall_s: float
    busy_s: float
    own_s: float
    cores: int
    quota: float = math.inf
    shared_s: float = -1.0


def mark_load() -> LoadMark:
    """Read the counters now."""
    ended = os.times()
    busy_s, cores = _busy_seconds()
    # Its own time not from there, where it is cut off to ticks: a group's is not.
    own_s = time.process_time() + ended.children_user + ended.children_system
    found = quota_group()
    if found is None:
        return LoadMark(time.monotonic(), busy_s, own_s, cores)
    quota, group = found
    return LoadMark(time.monotonic(), busy_s, own_s, cores, quota, used_seconds(group))


def mark_job() -> LoadMark:
    """As :func:`mark_load`; what the processes that this one has started take is its own, too."""
    mark = mark_load()
    return replace(mark, own_s=mark.own_s + _descendants_seconds())


def foreign_load(before: LoadMark, after: LoadMark) -> float:
    """Share (0 to 1) of the usable cores' time between two marks that other processes took; -1 if unknown or too short to say.

    A CPU quota leaves a process fewer cores than it may run on. Others take from it what does not fit on the cores that are left over, and
    what they use of the quota itself.
    """
    elapsed_s = after.wall_s - before.wall_s
    if before.busy_s < 0 or after.busy_s < 0 or before.cores != after.cores or elapsed_s < _SHORTEST_WINDOW_S:
        return -1.0
    own_s = after.own_s - before.own_s
    usable = after.cores if after.cores <= after.quota else max(1, int(after.quota))
    foreign_s = after.busy_s - before.busy_s - own_s - elapsed_s * (after.cores - usable)
    if usable < after.cores and before.shared_s >= 0 and after.shared_s >= 0:
        foreign_s = max(foreign_s, after.shared_s - before.shared_s - own_s - elapsed_s * max(0.0, after.quota - usable))
    return min(1.0, max(0.0, foreign_s / (elapsed_s * usable)))


class LoadMeter:
    """Load over windows long enough to mean something.

    A window shorter than a tenth of a second is stretched back to an earlier mark: neighbours come and go slowly.
    """

    def __init__(self) -> None:
        self._marks = [mark_load()]

    def start(self) -> LoadMark:
        """Begin a window."""
        mark = mark_load()
        self._marks = [*self._marks, mark][-64:]
        return mark

    def read(self, start: LoadMark) -> Contamination:
        """The load since ``start``, a mark that :meth:`start` returned."""
        now = mark_load()
        if now.wall_s - start.wall_s < _SHORTEST_WINDOW_S:
            older = [mark for mark in self._marks if now.wall_s - mark.wall_s >= _SHORTEST_WINDOW_S]
            start = older[-1] if older else start
        return Contamination(foreign_load=foreign_load(start, now), clock_mhz=clock_mhz())


def clock_mhz() -> float:
    """Mean clock of the usable cores in MHz, or 0 where the system does not tell."""
    total, count = 0.0, 0
    for core in _usable():
        try:
            with open(f"/sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq", encoding="ascii") as file:
                total += float(file.read()) / 1000.0
                count += 1
        except (OSError, ValueError):
            return 0.0
    return total / count if count else 0.0


def _usable() -> list[int]:
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity is not None else list(range(os.cpu_count() or 1))


def _busy_seconds() -> tuple[float, int]:
    usable = {f"cpu{core}" for core in _usable()}
    try:
        with open("/proc/stat", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("cpu")]
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        # user nice system idle iowait irq softirq steal: stolen time is another machine's, and just as foreign.
        busy = [sum(int(item) for item in fields[1:4] + fields[6:9]) for fields in lines if fields[0] in usable]
    except (OSError, ValueError, AttributeError):
        return -1.0, 0
    return (sum(busy) / ticks_per_s, len(busy)) if busy else (-1.0, 0)


def _descendants_seconds() -> float:
    """Processor time of all living descendants of this process, and of theirs that have ended; 0 where nobody tells."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which is in parentheses and may hold anything: the state, the parent, and as the twelfth to the fifteenth the
            # times of user and system, then the same of children that have ended.
            fields = path.read_bytes().rpartition(b")")[2].split()
            process, parent, taken = int(path.parent.name), int(fields[1]), sum(map(int, fields[11:15]))
        except (OSError, ValueError, IndexError):
            continue  # it has just ended
        ticks[process] = taken
        children.setdefault(parent, []).append(process)
    total, left = 0, list(children.get(os.getpid(), ()))
    while left:
        process = left.pop()
        total += ticks[process]
        left += children.get(process, ())
    return total / os.sysconf("SC_CLK_TCK") if total else 0.0
