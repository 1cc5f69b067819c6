"""The benchmark of pooling by our own kernel runs, and its table shows what it recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autosched.runtime.cores import usable_cores
from autosched.runtime.cpu_kernels.library import kernel_library
from experiments import pooling
from experiments.serve import overhead
from experiments.tables_pooling import pooling_table


@pytest.mark.slow
@pytest.mark.usefixtures("native")
def test_it_records_what_the_table_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(why := kernel_library(), str):
        pytest.skip(why)
    assert pooling_table(tmp_path) == "(not recorded yet)"
    monkeypatch.setattr(overhead, "_BLOCK_US", 1.0)
    monkeypatch.setattr(sys, "argv", ["pooling.py", "--smoke", "--out", str(tmp_path / "pooling.json")])
    pooling.main()
    rows = json.loads((tmp_path / "pooling.json").read_text())["rows"]
    assert {row["threads"] for row in rows} == {1, usable_cores()}
    assert all(row["errors"]["own_pooling"] < 1e-6 for row in rows)
    assert "| 832, 7 x 7 | the largest of 3 x 3 |" in pooling_table(tmp_path)


@pytest.mark.parametrize("shape", [(pooling.MEAN, 32, 9, 3, 2, 1), (pooling.MEAN_OF_ALL, 32, 9, 9, 1, 0)])
@pytest.mark.usefixtures("native")
def test_each_kind_is_measured(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(why := kernel_library(), str):
        pytest.skip(why)
    monkeypatch.setattr(overhead, "_BLOCK_US", 1.0)
    row = pooling.measure(*shape, 1, 1)
    assert row["shape"] == list(shape)
    assert 0.0 < row["errors"]["own_pooling"] < 1e-5


def test_speed_ups_are_over_pytorch_and_errors_those_of_all_threads(tmp_path: Path) -> None:
    def rows(*shape: int) -> list[dict[str, object]]:
        errors = {"PyTorch": 1e-6, "own_pooling": 2e-7}
        times = [{"PyTorch": 400.0 / threads, "own_pooling": 200.0, "again": 404.0 / threads} for threads in (2, 1)]
        return [{"shape": list(shape), "threads": 2 - place, "us": us, "errors": errors} for place, us in enumerate(times)]

    environment = {"cores": 2, "torch": "2", "python": "3", "commit": "0123456789", "taken": "2026-01-01T00:00"}
    shapes = ((pooling.LARGEST, 64, 112, 3, 2, 1), (pooling.MEAN, 64, 9, 2, 1, 0), (pooling.MEAN_OF_ALL, 64, 7, 7, 1, 0))
    recorded = {"environment": environment, "rounds": 3, "rows": [row for shape in shapes for row in rows(*shape)]}
    (tmp_path / "pooling.json").write_text(json.dumps(recorded))
    text = pooling_table(tmp_path)
    cells = "400.0 / 200.0 | 200.0 / 200.0 | 2.00x / 1.00x | 1e-06 | 2e-07 |"
    assert f"| 64, 112 x 112 | the largest of 3 x 3, stride 2 | {cells}" in text
    assert f"| 64, 9 x 9 | the mean of 2 x 2 | {cells}" in text
    assert f"| 64, 7 x 7 | the mean of all | {cells}" in text
    assert "A/A: 1.0% apart in the median" in text
