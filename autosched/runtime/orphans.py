"""A process that serves the one that started it: it must not outlive that, and is there for the kernel to take in its place."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import signal
import subprocess
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autosched.core.forks import outlive_forks

_PR_SET_PDEATHSIG = 1
_SCORE = Path("/proc/self/oom_score_adj")
# Half of what memory there is: more than any process that could be taken instead has, unless it has nearly all.
_WORSE, _WORST = 500, 1000


class _Tie:
    """The end of a pipe that only this process has, so that the kernel closes it when this process ends."""

    def __init__(self, end: int) -> None:
        self._end = end
        outlive_forks(self)

    def let_go(self) -> None:
        """Close it. May be called twice."""
        end, self._end = self._end, -1
        if end >= 0:
            os.close(end)

    def after_fork(self) -> None:
        """The new process may outlive this one."""
        self.let_go()


def start_tied(command: Sequence[str], *, pass_fds: Sequence[int] = (), **options: Any) -> subprocess.Popen[bytes]:
    """``subprocess.Popen`` in a session of its own, all of which the kernel kills when this process ends, however that ends.

    Also what it starts itself, as a compiler does. A parent-death signal is for one process alone, which is then gone before it can end
    what it has started; and it comes when the *thread* ends that started it. Here the session has one end of a pipe that nobody writes to,
    and a signal to its group is asked for when the other end is closed. Where there is no such signal (not Linux), a process has to notice
    by itself.

    Raises:
        OSError: as ``Popen``, or if there are no more descriptors.
    """
    theirs, ours = os.pipe()
    tie = _Tie(ours)
    try:
        process = subprocess.Popen(command, pass_fds=(*pass_fds, theirs), start_new_session=True, **options)
        weakref.finalize(process, tie.let_go)
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(theirs, fcntl.F_SETOWN, -process.pid)
            fcntl.fcntl(theirs, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(theirs, fcntl.F_SETFL, os.O_ASYNC)
    except BaseException:
        tie.let_go()
        raise
    finally:
        os.close(theirs)
    return process


def begin_serving(answers: int) -> int:
    """What every such process does first: its input and output are kept from libraries, and interrupts are its parent's business.

    Args:
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
