"""Tuned schedules by what they are for: finding one in the cache folder. Writing is ``export.cache``; a server only reads.

One entry is one bundle, in a file named after its key. A file that is not what its writer wrote is moved aside, never deleted and
never fatal: the search for a schedule goes on as if there were none.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from autosched.core.callers import warn_caller
from autosched.core.errors import ArtifactCorrupt, AutoschedError
from autosched.core.forks import RenewedLock
from autosched.core.likeness import structure_key
from autosched.core.records import DeviceKey, SoftwareKey
from autosched.runtime.bundle.format import Bundle, read_bundle
from autosched.runtime.regions.store import private_folder

SUFFIX = ".autosched"
STRUCTURE = "structure"  # in a bundle's environment: the model's key, which does not depend on how it was cut into operators

_lock = RenewedLock()
_warned: set[str] = set()


class CacheWarning(UserWarning):
    """The schedule cache cannot be used as it should; the message says why. Given once for each cause and process."""


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What a tuned schedule is for.

    Args:
        structure: ``core.likeness.structure_key`` of the model's calls, before they are fused into operators.
        device: where it was, or shall be, run.
        software: versions there, whether or not memory is kept between calls: a schedule for one is a good one for the other.
        numerics: process-wide settings, as ``host_key.numerics_key`` gives them.
    """

    structure: str
    device: DeviceKey
    software: SoftwareKey
    numerics: tuple[tuple[str, str], ...]

    @property
    def filename(self) -> str:
        """``<graph>-<device>-<software>-<settings>.autosched``, each part a digest."""
        parts = (self.structure[:32], _digest(self.device), _digest(self.software), _digest(self.numerics))
        return "-".join(parts) + SUFFIX


def key_of(bundle: Bundle) -> CacheKey:
    """The key under which ``bundle`` is kept: that of the model, if its evidence has one, else that of its own operators."""
    structure = dict(bundle.evidence.environment).get(STRUCTURE) or structure_key(bundle.program.graph)
    return CacheKey(structure, bundle.key.device, bundle.key.software.keeping_memory(False), bundle.key.numerics)


def find(folder: str | os.PathLike[str], key: CacheKey) -> Bundle | None:
    """The tuned schedule kept under ``key``, or ``None``. Never raises for what is in the folder.

    Args:
        folder: of the cache; it need not exist.

    Warns:
        CacheWarning: if there is an entry that cannot be used.
    """
    path = Path(folder) / key.filename
    bundle: Bundle | None = None
    try:
        if not path.exists():
            return None
        if may_be_anyones(path.parent) and not private_folder(path.parent):
            why = "others can write there. Set AUTOSCHED_CACHE to a folder of your own."
            warn_once(f"{folder}: not private", f"tuned schedules in {folder} are not used: it belongs to another user, or {why}")
            return None
        bundle = _read(path)
        if key_of(bundle) != key:
            raise ArtifactCorrupt(str(path), "it holds a schedule for something else than its name says")
    except ArtifactCorrupt as error:
        _set_aside(path, error.why)
        return None
    except (AutoschedError, OSError) as error:
        warn_once(f"{path}: {type(error).__name__}", f"the tuned schedule in {path} is not used: {error}")
        return None
    return bundle


def may_be_anyones(folder: Path) -> bool:
    """Whether any user could have made a folder of this name before: it is among temporary files."""
    return folder.absolute().is_relative_to(tempfile.gettempdir())


def _read(path: Path) -> Bundle:
    try:
        return read_bundle(path)
    except ArtifactCorrupt:
        # Another process may have replaced it between two reads of a slow disk; what is bad stays bad.
        return read_bundle(path)


def _set_aside(path: Path, why: str) -> None:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    target = path.with_name(f"{path.name}.corrupt-{stamp}")
    count = 1
    while target.exists():
        target = path.with_name(f"{path.name}.corrupt-{stamp}-{count}")
        count += 1
    try:
        os.rename(path, target)
        kept = f"moved to {target.name}"
    except FileNotFoundError:
        # Several processes of a server read it at the same time.
        kept = "moved by another process"
    except OSError:
        kept = "left where it is (the folder cannot be changed)"
    warn_once(f"{path}: corrupt", f"the tuned schedule in {path} is damaged ({why}); it was {kept} and is not used. Tune again.")


def warn_once(cause: str, message: str) -> None:
    """Warn with ``message`` unless this process has warned of ``cause`` before."""
    with _lock.lock:
        if cause in _warned:
            return
        _warned.add(cause)
    warn_caller(f"autosched: {message}", CacheWarning)


def _digest(item: object) -> str:
    return hashlib.sha256(msgspec.json.encode(item)).hexdigest()[:16]
