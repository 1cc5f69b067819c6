"""Where Inductor, and the compilers that it starts, put their files. Private interface, the same in PyTorch 2.11 to 2.15; without it
nothing changes."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path

from autosched.core.forks import RenewedLock
from autosched.core.scratch import Scratch

_log = logging.getLogger(__name__)

_LOCKS = "locks"  # Inductor's own
_lock = RenewedLock()
_own: list[Scratch] = []


def compilers_write_into(folder: Path) -> None:
    """Have the compilers that this process starts put their own temporary files into ``folder``: a killed one leaves them.

    Inductor's cache stays where it is.
    """
    if inductor_folder() is None:
        return
    # Its default lies in the folder for temporary files: it is settled by now.
    tempfile.gettempdir()
    os.environ["TMPDIR"] = str(folder)


def inductor_folder() -> Path | None:
    """Inductor's cache, which is made if it is not there; ``None`` if it cannot be, or if this PyTorch has none."""
    try:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        return Path(cache_dir())
    except (ImportError, OSError):
        return None


def let_inductor_write() -> None:
    """Give Inductor a folder of this process's own where it may not write into its cache, with a link to each file that is there.

    It locks what it looks for, even what it finds, and so it fails in a cache that can only be read: one that was filled when an image was
    built, and belongs to root. The variable of the environment that names its cache is what it asks each time.
    """
    folder = inductor_folder()
    if folder is None or _may_write(folder):
        return
    with _lock.lock:
        if any(folder == scratch.path for scratch in _own):
            return
        try:
            scratch = Scratch()
        except OSError as error:
            _log.info("Inductor cannot write into %s, and there is no other place: %s", folder, error)
            return
        _link(folder, scratch.path)
        _own.append(scratch)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch.path)
        _log.info("Inductor cannot write into %s; what is there is used, and what is new is gone with this process", folder)


def _may_write(folder: Path) -> bool:
    locks = folder / _LOCKS
    return os.access(folder, os.W_OK | os.X_OK) and (not locks.exists() or os.access(locks, os.W_OK | os.X_OK))


def _link(folder: Path, into: Path) -> None:
    for here, folders, files in os.walk(folder):
        if _LOCKS in folders:
            folders.remove(_LOCKS)
        there = into / Path(here).relative_to(folder)
        with contextlib.suppress(OSError):  # without a link it is compiled
            there.mkdir(exist_ok=True)
            for name in files:
                (there / name).symlink_to(Path(here, name))
