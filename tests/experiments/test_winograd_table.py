"""The benchmark of single convolutions runs, and its table shows what it recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autosched.runtime.cores import usable_cores
from autosched.runtime.cpu_kernels.library import kernel_library
from experiments import winograd
from experiments.serve import overhead
from experiments.tables_winograd import winograd_table


@pytest.mark.slow
@pytest.mark.usefixtures("native")
def test_it_records_what_the_table_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(why := kernel_library(), str):
        pytest.skip(why)
    assert winograd_table(tmp_path) == "(not recorded yet)"
    monkeypatch.setattr(overhead, "_BLOCK_US", 1.0)
    monkeypatch.setattr(sys, "argv", ["winograd.py", "--smoke", "--out", str(tmp_path / "winograd.json")])
    winograd.main()
    rows = json.loads((tmp_path / "winograd.json").read_text())["rows"]
    assert {row["threads"] for row in rows} == {1, usable_cores()}
    assert all(0.0 < row["errors"]["winograd_2"] < 1e-5 and 0.0 < row["errors"]["winograd_4"] < 1e-4 for row in rows)
    assert "| 128, 128, 28 x 28 |" in winograd_table(tmp_path)


def test_speed_ups_are_over_onednn_and_errors_those_of_all_threads(tmp_path: Path) -> None:
    def row(threads: int, error: float) -> dict[str, object]:
        us = {"oneDNN": 400.0 / threads, "winograd_2": 200.0, "winograd_4": 100.0, "again": 404.0 / threads}
        return {"shape": [64, 96, 56], "threads": threads, "us": us, "errors": {"oneDNN": error, "winograd_2": 2e-7, "winograd_4": 3e-6}}

    environment = {"cores": 2, "torch": "2", "python": "3", "commit": "0123456789", "taken": "2026-01-01T00:00"}
    (tmp_path / "winograd.json").write_text(json.dumps({"environment": environment, "rounds": 3, "rows": [row(2, 1e-6), row(1, 5e-6)]}))
    text = winograd_table(tmp_path)
    assert "| 64, 96, 56 x 56 | 400 / 200 us | 2.00x / 1.00x | 4.00x / 2.00x | 1e-06 | 2e-07 | 3e-06 |" in text
    assert "A/A: 1.0% apart in the median" in text
