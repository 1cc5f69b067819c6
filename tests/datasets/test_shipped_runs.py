"""Runs that come with autosched load with pandas alone and can be replayed; a golden store stands in until some are recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

import autosched.datasets
from autosched.datasets.audit import audit
from autosched.datasets.schema import COLUMNS, SCHEMA
from autosched.datasets.store import Store
from autosched.pipeline.replaying import replay_device

DATA = Path(autosched.datasets.__file__).parent / "data"
SHIPPED = sorted(path.parent for path in DATA.glob("*/about.json"))
GOLDEN = Path(__file__).parents[1] / "compat" / "costmodel" / f"schema-{SCHEMA}" / "store"


@pytest.mark.parametrize("folder", SHIPPED or [GOLDEN], ids=lambda folder: folder.name)
def test_runs_load_with_pandas_and_replay(folder: Path) -> None:
    pairs = pd.read_parquet(folder / "pairs")
    assert list(pairs.columns) == list(COLUMNS["pairs"])
    assert (pairs["slowdown_last"] > 0).all()
    store = Store.open(folder)
    assert not {"impossible", "no kernel", "unknown device"} & {finding.kind for finding in audit(store).findings if len(finding.keys) > 5}
    device = replay_device(folder)
    assert device.key in {scope.device for scope in store.scopes()}


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_shipped_runs_are_small_and_described(folder: Path) -> None:
    about = json.loads((folder / "about.json").read_text())
    assert not about["rehearsal"]
    assert about["device"]["name"]
    assert len(about["commit"]) == 40
    limit = 5e6 if about["device"]["kind"] == "cpu" else 20e6
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < limit
    assert not list(folder.rglob("*.corrupt-*"))
