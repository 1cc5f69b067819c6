"""How many lanes of its own this machine has for a program."""

from __future__ import annotations

import os
from pathlib import Path

from autosched.runtime.host_key import usable_cores

_CPU = Path("/sys/devices/system/cpu")


def physical_cores() -> int:
    """Physical cores this process may use, at least 1: by affinity and container quota, two threads of one core counted once."""
    affinity = getattr(os, "sched_getaffinity", None)
    usable = affinity(0) if affinity is not None else range(os.cpu_count() or 1)
    return max(1, min(usable_cores(), len({_siblings(index) for index in usable})))


def _siblings(index: int) -> str:
    try:
        return (_CPU / f"cpu{index}" / "topology" / "thread_siblings_list").read_text(encoding="ascii").strip()
    except OSError:
        return str(index)
