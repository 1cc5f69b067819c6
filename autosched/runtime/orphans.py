"""A process that must not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """From now on the kernel kills this process when the thread that started it ends; where it cannot, nothing happens.

    Args:
        parent: process id of whoever started this process. If it is already gone, this process ends here.
    """
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return  # not Linux: the end of our input says the same, a little later
    if os.getppid() != parent:
        os._exit(1)  # it died before we asked
