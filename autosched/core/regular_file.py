"""Opening what should be a file. Whoever opens a pipe waits for its other end, for ever if there is none: a job must not, whatever lies
where its file should be."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Literal


def open_regular(path: Path, mode: Literal["rb", "ab", "r+b"] = "rb") -> BinaryIO:
    """As ``open``, for regular files alone, and links to them.

    Raises:
        OSError: as ``open``; and if it is something else.
    """
    return open(path, mode, opener=_opened)


def read_regular(path: Path) -> bytes:
    """All of a regular file.

    Raises:
        OSError: as :func:`open_regular`.
    """
    with open_regular(path) as file:
        return file.read()


def _opened(path: str, flags: int) -> int:
    # Without waiting; of a file itself, this changes nothing.
    handle = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return handle
