"""A store of runs as it is committed: one file for each table, a description of the machine beside them, nothing else."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from autosched.datasets.audit import audit
from autosched.datasets.schema import TABLES
from autosched.datasets.store import Store, union
from autosched.device.base import Device
from experiments.calls import write_json
from experiments.devices import commit, folder_name

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "datasets" / "data"


def folder_of(device: Device) -> Path:
    """Where a device's runs are committed, in ``datasets/data``."""
    return DATA / folder_name(device.key)


def resume(work: Path, target: Path) -> None:
    """Begin from what is shipped already. Also where something has gathered here: ``ship`` leaves nothing at ``target`` but these rows."""
    if any((target / table).is_dir() for table in TABLES):
        union([target], work)


def ship(work: Path, target: Path, device: Device, **about: object) -> None:
    """Replace ``target``'s tables by the rows of ``work``, and describe them in ``about.json``. A model there stays."""
    _replace_tables(work, target)
    described = {
        "device": msgspec.to_builtins(device.key),
        "software": dict(device.software.versions),
        "taken": _now(),
        "commit": commit(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **_found_in(target),
        "read_with": "pandas.read_parquet(folder / 'pairs'), and likewise the other tables",
        **about,
    }
    write_json(target / "about.json", described)


def add(folders: Sequence[Path], target: Path) -> dict[str, Any]:
    """Add the rows of ``folders`` to what is shipped at ``target``; what is said there now. No device is needed, and none is asked.

    Raises:
        SystemExit: nothing is shipped there, or a folder has runs of another device.
        ArtifactCorrupt: a folder that is not a store.
    """
    about = target / "about.json"
    if not about.is_file():
        raise SystemExit(f"{target} has no about.json: runs are added to a data set that a collect.py has begun")
    ours = {(row.device.kind, row.device.name) for row in Store.open(target).scopes()}
    for folder in folders:
        if others := [row.device.name for row in Store.open(folder).scopes() if (row.device.kind, row.device.name) not in ours]:
            raise SystemExit(f"{folder} has runs of {others[0]}; those in {target} are of {', '.join(sorted(name for _, name in ours))}")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        union([target, *folders], Path(scratch) / "all")
        _replace_tables(Path(scratch) / "all", target)
    described = {**json.loads(about.read_text(encoding="utf-8")), "taken": _now(), **_found_in(target)}
    write_json(about, described)
    return described


def _replace_tables(work: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=work.parent) as scratch:
        union([work], Path(scratch) / "one")
        target.mkdir(parents=True, exist_ok=True)
        for table in TABLES:
            # Whole beside the old one before that goes: whoever ends this leaves one of them.
            fresh = target / f".{table}.new"
            shutil.rmtree(fresh, ignore_errors=True)
            if any((Path(scratch) / "one" / table).iterdir()):
                shutil.copytree(Path(scratch) / "one" / table, fresh)
            shutil.rmtree(target / table, ignore_errors=True)
            if fresh.exists():
                fresh.rename(target / table)


def _found_in(target: Path) -> dict[str, object]:
    """What can be said of a store by looking at its rows."""
    store = Store.open(target)
    found = audit(store)
    return {
        "rows": {table: len(store.keys(table)) for table in TABLES},
        "families": found.families,
        "audit": found.lines(),
        "noise_floor_pct": None if math.isnan(found.noise_floor_pct) else found.noise_floor_pct,
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
