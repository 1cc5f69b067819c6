"""Replacing a file, or a folder, as a whole: a reader, in any process and at any time, sees the old one or the new one, never half of one.

The new content is written beside the file, to a name that says so, and then renamed. What a killed writer left under such a name is
removed by a later one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import stat
from pathlib import Path

from autosched.core.scratch import remove_abandoned_files

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def write_atomically(target: Path, content: bytes, mode: int = 0o666) -> None:
    """Make ``content`` the file ``target``, in one step. After return it survives a power cut.

    Args:
        target: in a folder that exists.
        mode: of the file, less what the mask of this process takes away.

    Raises:
        OSError: if it cannot be written; what was at ``target`` is still there.
        ValueError: for a name that no file can have.
    """
    if _is_device(target):
        # /dev/null must not become a file, and has no old content to keep.
        target.write_bytes(content)
        return
    target = behind_link(target)
    remove_half_written(target.parent, re.escape(target.name))
    # In the same folder: a rename is atomic only within one file system.
    name = half_written_name(target)
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    _sync_folder(target.parent)


def behind_link(target: str | os.PathLike[str]) -> Path:
    """The file that is written for ``target``: a link stays, above all /dev/stdout, and what it names is written."""
    return Path(os.path.realpath(target) if os.path.islink(target) else target)


def replace_folder(fresh: Path, target: Path) -> None:
    """Make the folder ``fresh`` the folder ``target``, in one step. A former one is at ``fresh`` then, or beside it, to be removed.

    Where the file system cannot exchange two folders (NFS), ``target`` is absent for a moment.

    Raises:
        OSError: if it cannot be done; what was at ``target`` is still there.
    """
    if not target.exists():
        fresh.rename(target)
    elif not _exchanged(fresh, target):
        former = fresh.with_name(f"{fresh.name}.former")
        target.rename(former)
        try:
            fresh.rename(target)
        except BaseException:
            former.rename(target)
            raise
    _sync_folder(target.parent)


def _exchanged(one: Path, other: Path) -> bool:
    """Whether two folders have changed places; a full folder cannot be renamed over."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except AttributeError:  # not Linux
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _is_device(path: Path) -> bool:
    try:
        return stat.S_ISCHR(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def half_written_name(target: Path) -> Path:
    """Where the content of ``target`` is written first; a name of its own each time."""
    return target.parent / f".{target.name}.{secrets.token_hex(8)}.part"


def half_written(names: str) -> str:
    """A regular expression for what a killed writer leaves of files whose names match the regular expression ``names``.

    >>> re.fullmatch(half_written("a|b"), ".b.00112233aabbccdd.part") is not None
    True
    """
    return rf"\.(?:{names})\.[0-9a-f]{{16}}\.part"


def remove_half_written(folder: Path, names: str) -> None:
    """Remove what killed writers left in ``folder`` of files whose names match ``names``, where it is an hour old."""
    remove_abandoned_files(folder, re.compile(half_written(names)))


def _sync_folder(folder: Path) -> None:
    # Makes the new name itself survive a power cut; not every system lets a folder be opened.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
