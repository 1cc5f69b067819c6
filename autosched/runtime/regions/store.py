"""Compiled code kept on this machine: the text of the module a compiler wrote for a region or a program, by what it was compiled from.

What is kept here is run as code, so it is trusted only where nobody else can have written it: the folder and the file belong to this
user, or to root, who can do anything to this user anyway and fills the folders of images that others serve from; nobody else may write
them, no link is followed, and the text is what its digest says. Any doubt is a miss, and the region is compiled again. Nothing of it ever
travels in a bundle.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from autosched.core.decoding import decode_json
from autosched.core.scratch import remove_abandoned_files

_log = logging.getLogger(__name__)

SCHEMA = 1
WHOLE = "whole-"  # keys of whole programs, as a compiler wrote them, begin with this
MOST_BYTES = 256 << 20
_MOST_ENTRY_BYTES = 16 << 20
_NAME = re.compile(r"[0-9a-f]{40}\.json|\.new-.*")
_HALF_WRITTEN = re.compile(r"\.new-.*")
_ROOT = 0
_KEPT_SHARE = 0.8  # of the bytes allowed, after files were removed: so that the next one removes none


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    key: str
    sha256: str
    source: str


class _Key(msgspec.Struct, frozen=True):
    key: str


@dataclass(frozen=True, slots=True)
class KeptText:
    """One file of a store; ``whole`` if it is of a whole program, ``used_s`` when it was last used, in seconds since 1970."""

    path: Path
    whole: bool
    size_bytes: int
    used_s: float


class RegionStore:
    """A folder of compiled code. Of what is more than ``most_bytes``, that goes which was not used for longest; it is compiled again then.

    Args:
        folder: made, readable by this user only, when something is first kept.
        most_bytes: size of all files together.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._folder = folder
        self._most_bytes = most_bytes

    def get(self, key: str) -> str | None:
        """The text kept under ``key``, or ``None`` on any doubt."""
        try:
            data = self._read(self._path(key))
        except OSError:
            return None
        if data is None:
            return None
        try:
            entry = decode_json(data, _Entry)
        except msgspec.MsgspecError:
            _log.info("a kept region is damaged and compiled again: %s", key)
            return None
        if entry.schema != SCHEMA or entry.key != key or entry.sha256 != _digest(key, entry.source):
            _log.info("a kept region is not what its digest says and compiled again: %s", key)
            return None
        return entry.source

    def put(self, key: str, source: str) -> bool:
        """Keep a text; whether it could be kept. Readers see all of it or nothing."""
        data = msgspec.json.encode(_Entry(SCHEMA, key, _digest(key, source), source))
        if len(data) > _MOST_ENTRY_BYTES:
            return False
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not private_folder(self._folder):
                return False
            handle, name = tempfile.mkstemp(dir=self._folder, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.replace(name, self._path(key))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            _log.info("a compiled region is not kept: %s", error)
            return False
        self._prune()
        return True

    def kept(self) -> list[KeptText]:
        """What is there, also what an interrupted process left; empty without a folder. A text that cannot be read counts as a region's."""
        return [KeptText(path, _is_whole(path), status.st_size, status.st_mtime) for path, status in self._files()]

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """Ours alone, by name: ``AUTOSCHED_CACHE`` may be a folder in which there is another one of this name."""
        found: list[tuple[Path, os.stat_result]] = []
        with contextlib.suppress(OSError):
            for entry in sorted(os.scandir(self._folder), key=lambda entry: entry.name):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and _NAME.fullmatch(entry.name):
                        found.append((Path(entry.path), status))
        return found

    def _prune(self) -> None:
        """Remove what an interrupted process left, and what was not used for longest if there is too much."""
        remove_abandoned_files(self._folder, _HALF_WRITTEN)
        found = self._files()
        total = sum(status.st_size for _, status in found)
        if total <= self._most_bytes:
            return
        for path, status in sorted(found, key=lambda item: item[1].st_mtime_ns):
            if total <= _KEPT_SHARE * self._most_bytes:
                return
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= status.st_size

    def _path(self, key: str) -> Path:
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"

    def _read(self, path: Path) -> bytes | None:
        if not private_folder(self._folder):
            return None
        # Without waiting for a writer, if it is a pipe.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            if not _private(status, stat.S_ISREG) or status.st_size > _MOST_ENTRY_BYTES:
                _log.info("a kept region does not belong to this user or root alone and is compiled again: %s", path)
                return None
            with contextlib.suppress(OSError):
                os.utime(handle)  # it was used: others go first
            return file.read()


def _is_whole(path: Path) -> bool:
    try:
        # Not the way to run anything: only the name of what it is of.
        return decode_json(path.read_bytes(), _Key).key.startswith(WHOLE)
    except (OSError, msgspec.MsgspecError):
        return False


def private_folder(path: Path) -> bool:
    """Whether it is a folder of this user's or root's that nobody else may write into."""
    return _private(os.stat(path), stat.S_ISDIR)


def private_file(path: Path) -> bool:
    """Whether it is a file of this user's or root's, no link, that nobody else may write."""
    return _private(os.lstat(path), stat.S_ISREG)


def _private(status: os.stat_result, is_kind: object) -> bool:
    kind_fits = is_kind(status.st_mode) if callable(is_kind) else False
    return bool(kind_fits) and status.st_uid in (os.getuid(), _ROOT) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest(key: str, source: str) -> str:
    return hashlib.sha256(f"{key}\n{source}".encode()).hexdigest()
