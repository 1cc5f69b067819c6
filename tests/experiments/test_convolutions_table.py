"""The benchmark of single convolutions summed by our own kernel runs, and its table shows what it recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autosched.runtime.cores import usable_cores
from autosched.runtime.cpu_kernels.library import kernel_library
from experiments import convolutions
from experiments.serve import overhead
from experiments.tables_convolutions import convolutions_table


@pytest.mark.slow
@pytest.mark.usefixtures("native")
def test_it_records_what_the_table_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(why := kernel_library(), str):
        pytest.skip(why)
    assert convolutions_table(tmp_path) == "(not recorded yet)"
    monkeypatch.setattr(overhead, "_BLOCK_US", 1.0)
    monkeypatch.setattr(sys, "argv", ["convolutions.py", "--smoke", "--out", str(tmp_path / "convolutions.json")])
    convolutions.main()
    rows = json.loads((tmp_path / "convolutions.json").read_text())["rows"]
    assert {row["threads"] for row in rows} == {1, usable_cores()}
    assert all(0.0 < row["errors"]["own_convolution"] < 1e-5 for row in rows)
    assert "| 64, 384, 14 x 14 | 1 x 1 |" in convolutions_table(tmp_path)


def test_speed_ups_are_over_onednn_and_errors_those_of_all_threads(tmp_path: Path) -> None:
    def row(threads: int, error: float) -> dict[str, object]:
        us = {"oneDNN": 40.0 / threads, "own_convolution": 20.0, "again": 40.4 / threads}
        errors = {"oneDNN": error, "own_convolution": 2e-7}
        return {"shape": [96, 96, 56, 7, 2, 96], "threads": threads, "us": us, "errors": errors}

    environment = {"cores": 2, "torch": "2", "python": "3", "commit": "0123456789", "taken": "2026-01-01T00:00"}
    (tmp_path / "convolutions.json").write_text(json.dumps({"environment": environment, "rounds": 3, "rows": [row(2, 1e-6), row(1, 5e-6)]}))
    text = convolutions_table(tmp_path)
    assert "| 96, 96, 56 x 56 | 7 x 7, stride 2, each channel | 40.0 / 20.0 | 20.0 / 20.0 | 2.00x / 1.00x | 1e-06 | 2e-07 |" in text
    assert "A/A: 1.0% apart in the median" in text


def test_groups_are_named(tmp_path: Path) -> None:
    rows = [
        {"shape": [128, 128, 56, 3, 1, groups], "threads": 1, "us": dict.fromkeys(("oneDNN", "own_convolution", "again"), 1.0),
         "errors": dict.fromkeys(("oneDNN", "own_convolution"), 1e-6)}
        for groups in (1, 32)
    ]  # fmt: skip
    environment = {"cores": 2, "torch": "2", "python": "3", "commit": "0123456789", "taken": "2026-01-01T00:00"}
    (tmp_path / "convolutions.json").write_text(json.dumps({"environment": environment, "rounds": 3, "rows": rows}))
    text = convolutions_table(tmp_path)
    assert "| 128, 128, 56 x 56 | 3 x 3 |" in text
    assert "| 128, 128, 56 x 56 | 3 x 3, 32 groups |" in text
