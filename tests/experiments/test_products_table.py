"""Single products: what is recorded, and the table made of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autosched.runtime.cores import usable_cores
from autosched.runtime.cpu_kernels.library import kernel_library
from experiments import products
from experiments.tables_products import products_table


def test_a_small_run_is_recorded_and_shown(native: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(why := kernel_library(), str):
        pytest.skip(f"no kernel: {why}")
    assert products_table(tmp_path) == "(not recorded yet)"
    monkeypatch.setattr(sys, "argv", ["products.py", "--smoke", "--out", str(tmp_path / "products.json")])
    products.main()
    rows = json.loads((tmp_path / "products.json").read_text())["rows"]
    assert {row["threads"] for row in rows} == {1, usable_cores()}
    assert all(0.0 < error < 1e-5 for row in rows for error in row["errors"].values())
    assert "| 16, 128, 256 |" in products_table(tmp_path)


@pytest.mark.parametrize(("mkl", "faster"), [(50.0, "2.00x / 4.00x"), (200.0, "4.00x / 8.00x")])
def test_speed_ups_are_over_the_faster_library(mkl: float, faster: str, tmp_path: Path) -> None:
    def row(threads: int) -> dict[str, object]:
        us = {"oneDNN": 100.0, "MKL": mkl, "own": 25.0 / threads, "again": 101.0}
        slower = {"oneDNN": 300.0, "MKL": 400.0, "own": 100.0 / threads, "again": 301.0}
        return {
            "shape": [8, 64, 96],
            "threads": threads,
            "us": us,
            "from_memory_us": slower,
            "errors": {"oneDNN": 1e-6, "MKL": 2e-6, "own": threads * 1e-7},
        }

    environment = {"cores": 2, "torch": "2.13.0", "python": "3.11", "commit": "0123456789", "taken": "2026-01-01T00:00"}
    (tmp_path / "products.json").write_text(json.dumps({"environment": environment, "rounds": 3, "rows": [row(2), row(1)]}))
    text = products_table(tmp_path)
    assert f"| 25.0 / 12.5 | {faster} | 3.00x / 6.00x | 1e-06 | 2e-06 | 2e-07 |" in text
    assert "A/A: 1.0% apart in the median" in text
