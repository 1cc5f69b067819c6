"""How many cores there are for this process to run on."""

from __future__ import annotations

import os

from autosched.runtime.cpu_quota import quota_cores


def usable_cores() -> int:
    """Cores this process may really use: the smaller of its affinity mask and its container's quota, at least 1."""
    cores = cores_of_thread()
    quota = quota_cores()
    return max(1, cores if quota is None else min(cores, int(quota)))


def cores_of_thread() -> int:
    """Cores that the calling thread, and so each that it starts, may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
