"""What a fork takes away of OpenMP's, beside what ``core.forks`` sees to. A forked process runs what was loaded before.

GNU's OpenMP, which PyTorch brings on Linux, keeps the threads of one parallel region for the next, and a forked process waits forever for
those that it does not have. It lets them go if it is asked to before the fork (OpenMP 5.0, section 3.2.44); the next region starts new
ones within about a tenth of a millisecond. Other OpenMPs see to that themselves.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from autosched.core import forks

_MAPS = Path("/proc/self/maps")
_SOFT = 1  # omp_pause_soft: threads go, the values of their variables may stay


def outlive_forks(thing: forks.OutlivesFork) -> None:
    """From now on ``thing`` is told of forks, for as long as it lives, and OpenMP is told before them."""
    _register()
    forks.outlive_forks(thing)


@lru_cache(maxsize=1)
def _register() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=rest_openmp)


def rest_openmp() -> None:
    """Let the threads of the calling thread's team go, where OpenMP is GNU's."""
    for pause in _openmp_pauses():
        # Within a parallel region it declines, and nothing can be done.
        pause(_SOFT)


@lru_cache(maxsize=1)
def _openmp_pauses() -> tuple[Callable[[int], int], ...]:
    """``omp_pause_resource_all`` of every GNU OpenMP in this process."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return ()  # not Linux
    found: list[Callable[[int], int]] = []
    for path in sorted({line.split(maxsplit=5)[5] for line in lines if "libgomp" in line}):
        try:
            found.append(ctypes.CDLL(path).omp_pause_resource_all)
        except (OSError, AttributeError):
            continue  # older than OpenMP 5.0
    return tuple(found)
