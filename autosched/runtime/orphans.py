"""A process that serves the one that started it: it must not outlive that, and is there for the kernel to take in its place."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_SCORE = Path("/proc/self/oom_score_adj")
# Half of what memory there is: more than any process that could be taken instead has, unless it has nearly all.
_WORSE, _WORST = 500, 1000


def begin_serving(parent: int, answers: int) -> int:
    """What every such process does first: its input and output are kept from libraries, and interrupts are its parent's business.

    Args:
        parent: process id of whoever started this process; 0: it need not end with that.
        answers: the descriptor to answer on, which is kept from processes that this one starts.

    Returns:
        A descriptor of this process's input. Whatever else reads the standard input finds it empty.
    """
    requests = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.set_inheritable(answers, False)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent:
        die_with(parent)
    go_first()
    return requests


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


def go_first() -> None:
    """Where memory runs out, let the kernel end this process, and those that it starts, rather than the one that started it.

    What is lost then is one measurement and not the job.
    """
    with contextlib.suppress(OSError, ValueError):  # not Linux, or not allowed: the kernel then takes whoever has most
        _SCORE.write_text(str(min(_WORST, int(_SCORE.read_text()) + _WORSE)))
