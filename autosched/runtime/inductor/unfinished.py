"""Shared libraries in Inductor's cache that are not whole, because whoever wrote them was killed.

PyTorch writes a library where it will be looked for, and takes what is there for finished. A compiling process that is ended at its
limit may leave the beginning of one, and from then on everything that needs that kernel fails on this machine ("file too short"), the
user's own ``torch.compile`` among it; some beginnings even end the process that loads them (SIGBUS). So it is removed: before anything is
loaded, after such an end, and where compiling has failed.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from autosched.runtime.compiler_files import inductor_folder

_HEADER = struct.Struct("<4s36xQ10xHHH")  # of a 64-bit ELF file: magic, offset of the section headers, their size and number


def remove_unfinished(*, idle_s: float = 0.0) -> list[Path]:
    """Remove libraries that are not whole and that no process of this user has open; returns those. On Linux only, elsewhere nothing.

    Args:
        idle_s: only those that nobody has written to for so long: other users' processes, and other machines', are not seen from here.
    """
    folder = inductor_folder()
    if folder is None or not sys.platform.startswith("linux"):
        return []
    broken = [path for path in folder.glob("*/*.so") if not is_whole(path)]
    removed = []
    for path in sorted(set(broken) - _open_files(broken)):
        with contextlib.suppress(OSError):
            # Once more: it may have been finished since. What was written in the future was written before the clock was set back.
            if not is_whole(path) and abs(time.time() - path.stat().st_mtime) >= idle_s:
                path.unlink()
                removed.append(path)
    return removed


def is_whole(path: Path) -> bool:
    """Whether a library's end is there: an ELF file ends with its section headers. A file that cannot be read is left to others."""
    try:
        # Thousands of files are looked at, most of whose time Python's own way to open one would be.
        # Without waiting for a writer, if it is a pipe.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            start, bytes_there = os.read(file, 64), os.fstat(file).st_size
        finally:
            os.close(file)
    except OSError:
        return True
    if len(start) < 64:
        return False
    magic, offset, each, count, _ = _HEADER.unpack_from(start)
    return bool(magic == b"\x7fELF" and offset + each * count <= bytes_there)


def _open_files(paths: Iterable[Path]) -> set[Path]:
    """Those of ``paths`` that some process of this user has open now."""
    wanted = {os.path.realpath(path): path for path in paths}
    if not wanted:
        return set()
    found = set()
    for process in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for entry in os.scandir(process):
                with contextlib.suppress(OSError):
                    if (target := os.readlink(entry.path)) in wanted:
                        found.add(wanted[target])
    return found
