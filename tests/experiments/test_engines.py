"""The comparison with other engines runs with those that are there, and its table shows what it recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from experiments import engines
from experiments.tables_engines import engines_table


@pytest.mark.slow
def test_it_records_what_the_table_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engines_table(tmp_path) == "(not recorded yet)"
    path = tmp_path / "engines.json"
    monkeypatch.setattr(sys, "argv", ["engines.py", "--smoke", "--out", str(path)])
    engines.main()
    [row] = json.loads(path.read_text())["rows"]
    assert set(row["us"]) >= {"eager", "torch.compile", "autosched"}
    assert set(row["us"]) | set(row["missing"]) == set(engines.ENGINES)
    assert all(error < 1e-4 for error in row["errors"].values())
    assert "| `autosched:toy` |" in engines_table(tmp_path)


def test_an_engine_that_fails_is_left_out_with_the_reason(tmp_path: Path) -> None:
    process = engines._Engine("autosched", "autosched:moe", tmp_path)
    try:
        assert "model.autosched" in process.missing
    finally:
        process.close()


def test_the_fastest_other_engine_is_what_a_schedule_is_compared_with(tmp_path: Path) -> None:
    us = {"eager": 9000.0, "torch.compile": 3000.0, "OpenVINO": 2000.0, "autosched": 1000.0}
    row = {"model": "m", "us": us, "errors": {}, "missing": {"ONNX Runtime": "ModuleNotFoundError: No module named 'onnxruntime'"}}
    environment = {"cores": 2, "torch": "2", "python": "3", "commit": "0123456789", "taken": "2026-01-01T00:00"}
    recorded = {"environment": environment, "versions": {"openvino": "1.0"}, "turns": 3, "rows": [row]}
    (tmp_path / "engines.json").write_text(json.dumps(recorded))
    text = engines_table(tmp_path)
    assert "| `m` | 9.00 | 3.00 | -- | 2.00 | 1.00 | 2.00x |" in text
    assert "openvino 1.0" in text
    assert "`m` with ONNX Runtime: ModuleNotFoundError: No module named 'onnxruntime'." in text
