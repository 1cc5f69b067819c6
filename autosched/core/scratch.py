"""Folders and files that a process may leave behind when it is killed: made so that a later process can tell, and taken away by it.

A folder is named after the process that made it, and that process holds a lock in it. It is abandoned if no process of that number is
there and the lock is free: a container that shares the folder, but not the numbers of processes, shares the lock. A folder of such a name
without a lock is somebody else's, unless it is empty. A file that is written beside the one it is to replace is abandoned when it is an
hour old: none takes that long.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from types import TracebackType

_PREFIX = "autosched-"
_LOCK = ".held"
_LONG_S = 3600.0


class Scratch:
    """A folder that only this user can read, gone with :meth:`close`, with this process, or with the next one that makes one.

    Args:
        base: where; by default the folder for temporary files.
    """

    def __init__(self, base: Path | None = None) -> None:
        home = base if base is not None else Path(tempfile.gettempdir())
        remove_abandoned_folders(home)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=home))
        handle = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._finalizer = weakref.finalize(self, _remove, self.path, handle, os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Remove it with all that is in it. May be called twice."""
        self._finalizer()


def remove_abandoned_folders(base: Path) -> None:
    """Remove the folders in ``base`` whose processes no longer exist."""
    with contextlib.suppress(OSError):
        for folder in base.glob(f"{_PREFIX}*-*"):
            owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
            with contextlib.suppress(OSError):
                if owner.isdigit() and _is_ours(folder) and not _exists(int(owner)) and _is_free(folder):
                    _remove_with_lock_last(folder)


def remove_abandoned_files(folder: Path, name: re.Pattern[str]) -> None:
    """Remove files of this user in ``folder`` that are called so and were last written more than an hour ago."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                if not name.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
                    continue
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and status.st_mtime < time.time() - _LONG_S:
                    os.unlink(entry.path)


def _remove(path: Path, handle: int, owner: int) -> None:
    # A process that was forked has this object too, and not the folder.
    if os.getpid() == owner:
        _remove_with_lock_last(path)
    with contextlib.suppress(OSError):
        os.close(handle)


def _remove_with_lock_last(path: Path) -> None:
    """So that what is left where this is interrupted is still known for ours."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != _LOCK:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
    shutil.rmtree(path, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()


def _is_free(folder: Path) -> bool:
    """Whether nobody holds a folder. One without a lock may have been made a moment ago, or by somebody else for other things."""
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return folder.stat().st_mtime < time.time() - _LONG_S and not any(folder.iterdir())
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # Somebody has it; or there are no locks here, and it may be that of a process on another machine.
        return False
    finally:
        os.close(handle)
    return True


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OverflowError:
        return False
    except PermissionError:
        return True
    return True
