"""How many lanes of its own this machine has for a program, and at which widths its operators are worth measuring."""

from __future__ import annotations

import math
import os
from pathlib import Path

from autosched.runtime.cores import usable_cores

_CPU = Path("/sys/devices/system/cpu")


def physical_cores() -> int:
    """Physical cores this process may use, at least 1: by affinity and container quota, two threads of one core counted once."""
    affinity = getattr(os, "sched_getaffinity", None)
    usable = affinity(0) if affinity is not None else range(os.cpu_count() or 1)
    return max(1, min(usable_cores(), len({_siblings(index) for index in usable})))


def widths_within(cores: int) -> tuple[int, ...]:
    """Powers of two up to ``cores``, and all of them.

    >>> widths_within(12)
    (1, 2, 4, 8, 12)
    """
    return tuple(sorted({1 << power for power in range(cores.bit_length())} | {cores}))


def whole_widths(cores: int) -> tuple[int, ...]:
    """Widths for code that Inductor writes for the whole model, once more for each: one thread, all, and one number between them.

    Whoever loads the file elsewhere waits for the compiler as often as the schedule has widths.

    >>> whole_widths(2), whole_widths(8), whole_widths(96)
    ((1, 2), (1, 4, 8), (1, 16, 96))
    """
    between = 1 << math.ceil(math.log2(cores) / 2)
    return tuple(sorted({1, min(between, cores), cores}))


def _siblings(index: int) -> str:
    try:
        return (_CPU / f"cpu{index}" / "topology" / "thread_siblings_list").read_text(encoding="ascii").strip()
    except OSError:
        return str(index)
