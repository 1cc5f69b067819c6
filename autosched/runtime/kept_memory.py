"""Whether freed memory stays with the process: glibc's setting, which a process may change for itself and for those that it starts.

By default glibc maps every tensor beyond a size of at most 32 MiB by itself and unmaps it when it is freed, and the operating system
clears its pages anew for the next call. Runtimes that plan memory (ONNX Runtime's arena, OpenVINO, TVM) keep theirs between calls.
"""

from __future__ import annotations

import ctypes
import platform
import sys

from autosched.config import keep_memory_in_new_processes, memory_kept_since_start

# Of ``malloc.h``. No single mappings; and no trimming of the heap, which -1 turns off (``mallopt(3)``).
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_SETTINGS = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1))


def keep_memory() -> bool:
    """Keep what is freed with this process from now on, and in the processes that it starts from now on.

    A process then holds what its calls need at their peak and never gives it back. Call it before tuning and, where a file that was tuned
    so is served, before loading. Nothing undoes it.

    Returns:
        Whether it is so: false, and nothing changes, with any C library but glibc.
    """
    if not _is_glibc():
        return False
    libc = ctypes.CDLL(None)
    if not all(libc.mallopt(setting, value) for setting, value in _SETTINGS):
        return False
    keep_memory_in_new_processes()
    return True


def memory_kept() -> bool:
    """Whether this process keeps what is freed, by :func:`keep_memory` or by the environment it was started with."""
    return memory_kept_since_start() and _is_glibc()


def _is_glibc() -> bool:
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
