"""The benchmark of attention by our own kernel runs, and its table shows what it recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autosched.runtime.cores import usable_cores
from autosched.runtime.cpu_kernels.library import kernel_library
from experiments import attention
from experiments.serve import overhead
from experiments.tables_attention import attention_table


@pytest.mark.slow
@pytest.mark.usefixtures("native")
def test_it_records_what_the_table_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(why := kernel_library(), str):
        pytest.skip(why)
    assert attention_table(tmp_path) == "(not recorded yet)"
    monkeypatch.setattr(overhead, "_BLOCK_US", 1.0)
    monkeypatch.setattr(sys, "argv", ["attention.py", "--smoke", "--out", str(tmp_path / "attention.json")])
    attention.main()
    rows = json.loads((tmp_path / "attention.json").read_text())["rows"]
    assert {row["threads"] for row in rows} == {1, usable_cores()}
    assert all(0.0 < row["errors"]["own_attention"] < 1e-5 for row in rows)
    assert "| 1, 12, 32 x 32, 64 |" in attention_table(tmp_path)


@pytest.mark.parametrize("shape", [(1, 2, 2, 16, 24, 8, attention.BIAS), (1, 4, 2, 16, 16, 8, attention.CAUSAL)])
@pytest.mark.usefixtures("native")
def test_each_kind_is_measured(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(why := kernel_library(), str):
        pytest.skip(why)
    monkeypatch.setattr(overhead, "_BLOCK_US", 1.0)
    row = attention.measure(*shape, 1, 1)
    assert row["shape"] == list(shape)
    assert row["errors"]["own_attention"] < 1e-5


def test_speed_ups_are_over_pytorch_and_errors_those_of_all_threads(tmp_path: Path) -> None:
    def row(threads: int, error: float) -> dict[str, object]:
        us = {"PyTorch": 400.0 / threads, "own_attention": 200.0, "again": 404.0 / threads}
        errors = {"PyTorch": error, "own_attention": 2e-7}
        return {"shape": [1, 8, 2, 16, 32, 64, attention.CAUSAL], "threads": threads, "us": us, "errors": errors}

    environment = {"cores": 2, "torch": "2", "python": "3", "commit": "0123456789", "taken": "2026-01-01T00:00"}
    (tmp_path / "attention.json").write_text(json.dumps({"environment": environment, "rounds": 3, "rows": [row(2, 1e-6), row(1, 5e-6)]}))
    text = attention_table(tmp_path)
    assert "| 1, 8 (2 of keys), 16 x 32, 64, causal | 400 / 200 | 200 / 200 | 2.00x / 1.00x | 1e-06 | 2e-07 |" in text
    assert "A/A: 1.0% apart in the median" in text
