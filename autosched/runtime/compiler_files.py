"""Where Inductor, and the compilers that it starts, put their files. Private interface, the same in PyTorch 2.11 to 2.15; without it
nothing changes."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path

from autosched.core.forks import RenewedLock, outlive_forks
from autosched.core.scratch import Scratch

_log = logging.getLogger(__name__)

_LOCKS = "locks"  # Inductor's own
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # asked for each time
_lock = RenewedLock()


class _Own:
    """The folder that this process has given Inductor, if any; a forked one gives it another, for this one goes with this process."""

    def __init__(self) -> None:
        self.scratch: Scratch | None = None
        self._instead_of = ""
        outlive_forks(self)

    def use(self, scratch: Scratch, instead_of: Path) -> None:
        """From now on Inductor writes into ``scratch``."""
        self.scratch, self._instead_of = scratch, str(instead_of)
        os.environ[_FOLDER] = str(scratch.path)

    def after_fork(self) -> None:
        """Back to what was there."""
        if self.scratch is not None and os.environ.get(_FOLDER) == str(self.scratch.path):
            os.environ[_FOLDER] = self._instead_of
        self.scratch = None


_own = _Own()


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
    except (ImportError, OSError, KeyError):  # the last where the system has no name for this user, in PyTorch 2.11
        return None


def let_inductor_write() -> None:
    """Give Inductor a folder of this process's own where it may not write into its cache, with a link to each file that is there.

    It locks what it looks for, even what it finds, and so it fails in a cache that can only be read: one that was filled when an image was
    built, and belongs to root.
    """
    with _lock.lock:
        folder = inductor_folder()
        if folder is None or _may_write(folder):
            return
        try:
            scratch = Scratch()
        except OSError as error:
            _log.info("Inductor cannot write into %s, and there is no other place: %s", folder, error)
            return
        _link(folder, scratch.path)
        _own.use(scratch, folder)
        _log.info("Inductor cannot write into %s; what is there is used, and what is new is gone with this process", folder)


def inductor_moved() -> bool:
    """Whether this process has given Inductor a folder of its own."""
    return _own.scratch is not None


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
