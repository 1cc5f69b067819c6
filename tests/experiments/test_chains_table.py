"""The benchmark of chained convolutions runs, and its table shows what it recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autosched.runtime.cores import usable_cores
from autosched.runtime.cpu_kernels.library import kernel_library
from experiments import chains
from experiments.serve import overhead
from experiments.tables_chains import chains_table


@pytest.mark.slow
@pytest.mark.usefixtures("native")
def test_it_records_what_the_table_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(why := kernel_library(), str):
        pytest.skip(why)
    assert chains_table(tmp_path) == "(not recorded yet)"
    monkeypatch.setattr(overhead, "_BLOCK_US", 1.0)
    monkeypatch.setattr(sys, "argv", ["chains.py", "--smoke", "--out", str(tmp_path / "chains.json")])
    chains.main()
    rows = json.loads((tmp_path / "chains.json").read_text())["rows"]
    assert {row["threads"] for row in rows} == {1, usable_cores()}
    assert all(0.0 < row["errors"][name] < 1e-5 for row in rows for name in ("oneDNN", "own_convolution", "own_chain"))
    assert "| 64, 384, 14 x 14 | 1 x 1 | 3 x 3 |" in chains_table(tmp_path)


def test_speed_ups_are_over_the_faster_two_and_errors_those_of_all_threads(tmp_path: Path) -> None:
    def row(threads: int, error: float) -> dict[str, object]:
        us = {"oneDNN": 40.0, "own_convolution": 60.0 / threads, "own_chain": 20.0, "again": 40.4}
        errors = {"oneDNN": 1e-6, "own_convolution": 2e-7, "own_chain": error}
        return {"shape": [16, 96, 112, 1, 1, 3, 2], "threads": threads, "us": us, "errors": errors}

    environment = {"cores": 2, "torch": "2", "python": "3", "commit": "0123456789", "taken": "2026-01-01T00:00"}
    (tmp_path / "chains.json").write_text(json.dumps({"environment": environment, "rounds": 3, "rows": [row(2, 3e-7), row(1, 5e-6)]}))
    text = chains_table(tmp_path)
    assert "| 16, 96, 112 x 112 | 1 x 1 | 3 x 3, stride 2 | 40 / 40 | 60 / 30 | 20 / 20 | 2.00x / 1.50x | 3e-07 |" in text
    assert "A/A: 1.0% apart in the median" in text
