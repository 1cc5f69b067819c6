"""What lies in the cache folder, by kind: tuned schedules with what they are for, everything else by size; and taking it away.

Only files that autosched writes, under the names that it gives them, are seen at all: ``AUTOSCHED_CACHE`` may be a folder that holds other
things. What a running job holds stays.
"""

from __future__ import annotations

import contextlib
import enum
import fnmatch
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from autosched.config import (
    NATIVE_LIBRARY,
    cache_dir,
    cost_models_dir,
    loops_dir,
    measurements_dir,
    native_dir,
    regions_dir,
    runs_dir,
    schedules_dir,
    studies_path,
)
from autosched.core.atomic_write import half_written
from autosched.core.errors import AutoschedError, UsageError, why_of
from autosched.runtime.bundle.format import printable, read_bundle
from autosched.runtime.cache import SUFFIX
from autosched.runtime.regions.store import RegionStore
from autosched.runtime.shapes import describe_shape

_LOCK_S = 5.0  # a journal is locked for one write at a time
_JOURNAL = r"[0-9a-f]{24}\.jsonl"
_LEFT_BEHIND = re.compile(r"\.[0-9a-f]{24}\.removed-\d+")  # by a removal that was interrupted
_LEAST_PREFIX = 6  # characters of a file's name that may stand for it


class Kind(enum.StrEnum):
    """What autosched keeps in its cache folder."""

    SCHEDULES = "schedules"
    MEASUREMENTS = "measurements"
    LOOPS = "loops"
    RUNS = "runs"
    COST_MODELS = "costmodels"
    REGIONS = "regions"
    INDUCTOR = "inductor"
    NATIVE = "native"
    STUDIES = "studies"


ABOUT = {
    Kind.SCHEDULES: "tuned schedules, for torch.compile and autosched.compile",
    Kind.MEASUREMENTS: "operators and pairs, which the next job need not measure again",
    Kind.LOOPS: "what an interrupted job goes on from",
    Kind.RUNS: "what jobs measured, for 'autosched train'",
    Kind.COST_MODELS: "trained on this machine",
    Kind.REGIONS: "compiled code of fused regions",
    Kind.INDUCTOR: "code that Inductor wrote for whole models",
    Kind.NATIVE: "C++ of autosched's own, compiled here: lanes without the interpreter, convolutions and products",
    Kind.STUDIES: "Optuna's, for its dashboard",
}


@dataclass(frozen=True, slots=True)
class Item:
    """One file, or one folder that belongs together; ``modified_s`` in seconds since 1970, of its newest file."""

    kind: Kind
    path: Path
    files: int
    size_bytes: int
    modified_s: float


class Here(enum.StrEnum):
    """Whether a tuned schedule is found on this machine, with its present versions and settings."""

    FOUND = "found"
    OTHER = "made for something else"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tuned schedule in the cache.

    Args:
        file: its name in the folder of tuned schedules.
        inputs: shapes and dtypes.
        measured_us: median of the kept schedule in the tuning job, microseconds.
        differences: why it is not found here, a line each.
    """

    file: str
    size_bytes: int
    age_s: float
    here: Here
    model: str = ""
    inputs: str = ""
    device: str = ""
    device_kind: str = ""
    lowering: str = ""
    chosen: str = ""
    measured_us: float | None = None
    differences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KindSize:
    """How much there is of one kind."""

    kind: Kind
    about: str
    files: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CacheListing:
    """``autosched cache``."""

    folder: str
    schedules: tuple[Entry, ...]
    kinds: tuple[KindSize, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Stayed:
    """Something that was not removed, and why."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Cleared:
    """``autosched cache clear``: what was removed by kind, and what was not."""

    folder: str
    removed: tuple[KindSize, ...]
    stayed: tuple[Stayed, ...]
    size_bytes: int


def items() -> list[Item]:
    """Everything in the cache folder, by kind and name; empty if there is no such folder."""
    studies = studies_path()
    found = _files(Kind.SCHEDULES, schedules_dir(), re.compile(rf"[0-9a-f-]+{re.escape(SUFFIX)}(\.corrupt-.*)?"))
    found += _files(Kind.MEASUREMENTS, measurements_dir(), re.compile(rf"{_JOURNAL}(\.corrupt-\d+)?|{half_written(_JOURNAL)}"))
    found += _files(Kind.LOOPS, loops_dir(), re.compile(_JOURNAL))
    found += _folders(Kind.RUNS, runs_dir(), lambda folder: any(folder.glob("*/*part-*.parquet*")))  # damaged ones put aside, too
    found += _folders(Kind.COST_MODELS, cost_models_dir(), lambda folder: (folder / "manifest.json").is_file())
    for kept in RegionStore(regions_dir()).kept():
        found.append(Item(Kind.INDUCTOR if kept.whole else Kind.REGIONS, kept.path, 1, kept.size_bytes, kept.used_s))
    found += _files(Kind.NATIVE, native_dir(), re.compile(rf"{NATIVE_LIBRARY}|{half_written(NATIVE_LIBRARY)}"))
    found += _files(Kind.STUDIES, studies.parent, re.compile(re.escape(studies.name) + r"(-journal|-wal|-shm)?"))
    order = list(Kind)
    return sorted(found, key=lambda item: (order.index(item.kind), item.path.name))


def sizes(found: Sequence[Item]) -> tuple[KindSize, ...]:
    """``found`` added up by kind; kinds of which there is nothing are left out."""
    return tuple(
        KindSize(kind, ABOUT[kind], sum(item.files for item in mine), sum(item.size_bytes for item in mine))
        for kind in Kind
        if (mine := [item for item in found if item.kind is kind])
    )


def listing() -> CacheListing:
    """What is in the cache, and which tuned schedules are found on this machine; the newest first."""
    found = items()
    entries = sorted((entry_of(item) for item in found if item.kind is Kind.SCHEDULES), key=lambda entry: entry.age_s)
    return CacheListing(str(cache_dir()), tuple(entries), sizes(found), sum(item.size_bytes for item in found))


def entry_of(item: Item) -> Entry:
    """What the tuned schedule in ``item`` is for, and whether it is found here."""
    # What reads no schedule answers without PyTorch.
    from autosched.pipeline.bundles import verdict_here
    from autosched.runtime.verdict import Compatibility

    age_s = max(0.0, time.time() - item.modified_s)
    try:
        bundle = read_bundle(item.path)
    except (AutoschedError, OSError) as error:
        why = getattr(error, "why", None) or str(error)
        return Entry(item.path.name, item.size_bytes, age_s, Here.DAMAGED, differences=(printable(why),))
    report, verdict = bundle.evidence.report, verdict_here(bundle)
    row = next((row for row in report.strategies if row.name == report.chosen), None)
    return Entry(
        item.path.name,
        item.size_bytes,
        age_s,
        # What is looked up has the same device, versions and settings; anything else would be another entry.
        Here.FOUND if verdict.compatibility is Compatibility.EXACT else Here.OTHER,
        printable(report.model),
        describe_shape(bundle.program),
        printable(bundle.key.device.name),
        printable(bundle.key.device.kind),
        printable(report.lowering),
        printable(report.chosen),
        row.measured_us if row is not None else None,
        verdict.lines,
    )


def select(names: Sequence[str], older_than_s: float | None = None) -> list[Item]:
    """What ``autosched cache clear`` would remove.

    Args:
        names: kinds, models as they are listed (``*`` stands for anything), or file names of tuned schedules, or how one begins; none
            means everything.
        older_than_s: only what was last written, or for compiled code last used, so many seconds ago.

    Raises:
        UsageError: for a name that nothing answers to.
    """
    found = items()
    chosen = list(found)
    if names:
        schedules = [item for item in found if item.kind is Kind.SCHEDULES]
        models = {item.path: entry_of(item).model for item in schedules} if set(names) - set(Kind) else {}
        wanted: set[Path] = set()
        for name in names:
            if name in set(Kind):
                wanted |= {item.path for item in found if item.kind == name}
                continue
            named = {item.path for item in schedules if _is_called(name, item, models[item.path])}
            if not named:
                raise UsageError(
                    f"nothing in the cache is called {name!r}; expected {', '.join(Kind)}, a model such as "
                    f"{next((model for model in models.values() if model), 'torchvision:googlenet')}, or a file's name; "
                    "'autosched cache' lists them"
                )
            wanted |= named
        chosen = [item for item in found if item.path in wanted]
    limit_s = time.time() - older_than_s if older_than_s is not None else None
    return [item for item in chosen if limit_s is None or item.modified_s < limit_s]


def clear(chosen: Sequence[Item]) -> Cleared:
    """Remove what :func:`select` chose. What a running job holds, and what cannot be removed, stays and is named."""
    removed: list[Item] = []
    stayed: list[Stayed] = []
    for item in chosen:
        if why := _remove(item):
            stayed.append(Stayed(str(item.path), why))
        else:
            removed.append(item)
    return Cleared(str(cache_dir()), sizes(removed), tuple(stayed), sum(item.size_bytes for item in removed))


def _is_called(name: str, item: Item, model: str) -> bool:
    if len(name) >= _LEAST_PREFIX and item.path.name.startswith(name):
        return True
    return bool(model) and fnmatch.fnmatchcase(model, name)


def _remove(item: Item) -> str:
    """Why it stays; empty if it is gone."""
    try:
        if item.kind is Kind.STUDIES and _job_runs():
            return "a tuning job is running"
        if item.kind in (Kind.MEASUREMENTS, Kind.LOOPS) and re.fullmatch(_JOURNAL, item.path.name):
            with FileLock(f"{item.path}.lock", timeout=_LOCK_S if item.kind is Kind.MEASUREMENTS else 0):
                item.path.unlink(missing_ok=True)
                # A journal's stays: jobs wait for it, and must never hold locks of one name in different files.
                if item.kind is Kind.LOOPS:
                    from autosched.pipeline.diary import remove_lock_file

                    remove_lock_file(item.path)
        elif item.path.is_dir():
            # Under another name first: whoever reads meanwhile finds all of it or nothing.
            aside = item.path
            if not _LEFT_BEHIND.fullmatch(aside.name):
                aside = item.path.rename(item.path.with_name(f".{item.path.name}.removed-{os.getpid()}"))
            shutil.rmtree(aside)
        else:
            item.path.unlink(missing_ok=True)
    except Timeout:
        return "a running job holds it"
    except OSError as error:
        return why_of(error)
    return ""


def _job_runs() -> bool:
    """Whether a device loop is under way: it holds the lock of its diary. Locks that nobody holds and that are for nothing go."""
    for path in sorted(loops_dir().glob("*.jsonl.lock")):
        from autosched.pipeline.diary import remove_lock_file

        try:
            with FileLock(path, timeout=0):
                remove_lock_file(path.with_suffix(""))
        except Timeout:
            return True
    return False


def _files(kind: Kind, folder: Path, name: re.Pattern[str]) -> list[Item]:
    found = []
    for entry in _entries(folder):
        with contextlib.suppress(OSError):
            if entry.is_file(follow_symlinks=False) and name.fullmatch(entry.name):
                status = entry.stat(follow_symlinks=False)
                found.append(Item(kind, Path(entry.path), 1, status.st_size, status.st_mtime))
    return found


def _folders(kind: Kind, folder: Path, is_ours: Callable[[Path], bool]) -> list[Item]:
    found = []
    for entry in _entries(folder):
        path = Path(entry.path)
        with contextlib.suppress(OSError):
            if not entry.is_dir(follow_symlinks=False):
                continue
            if _LEFT_BEHIND.fullmatch(entry.name) or (re.fullmatch(r"[0-9a-f]{24}", entry.name) and is_ours(path)):
                inside = [file.stat(follow_symlinks=False) for file in path.rglob("*") if file.is_file()]
                newest_s = max((file.st_mtime for file in inside), default=0.0)
                found.append(Item(kind, path, len(inside), sum(file.st_size for file in inside), newest_s))
    return found


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError:
        return []
