"""Of several processes that lack the same code, one compiles it at a time: the others then find what it has kept."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_S = 0.02
_MOST_S = 60.0
"""Several times what the longest function takes: whoever holds the turn for longer was stopped, and nobody waits for it."""


@contextlib.contextmanager
def turn(file: Path, most_s: float = _MOST_S) -> Iterator[None]:
    """Hold the lock on ``file``, once whoever has it lets go of it or ``most_s`` seconds are over.

    The lock ends with its process, and where there can be none, everybody compiles for himself. The file stays: whoever removed it would
    let in a second one beside the one that waits for it.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield
        return
    try:
        _take(descriptor, time.monotonic() + most_s)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, until_s: float) -> None:
    while time.monotonic() < until_s:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_S)
        except OSError:
            return  # a file system without locks
        else:
            return
