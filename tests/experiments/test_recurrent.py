"""The benchmark of recurrent layers runs, and its table shows what it recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from experiments import recurrent
from experiments.recurrent import AGAIN, EAGER, IN_ORDER, LAYERS, ONE_THREAD, TUNED
from experiments.serve import overhead
from experiments.tables_recurrent import recurrent_table


@pytest.mark.slow
def test_it_records_what_the_table_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recurrent_table(tmp_path) == "(not recorded yet)"
    monkeypatch.setattr(overhead, "_BLOCK_US", 1.0)
    monkeypatch.setattr(sys, "argv", ["recurrent.py", "--smoke", "--out", str(tmp_path / "recurrent.json")])
    recurrent.main()
    (case,) = json.loads((tmp_path / "recurrent.json").read_text())["cases"]
    assert [row["name"] for row in case["rows"]] == [EAGER, AGAIN, ONE_THREAD, IN_ORDER, TUNED]
    assert all(row["median_us"] > 0.0 and row["max_difference"] < 1e-6 for row in case["rows"])
    assert "| LSTM 8 to 16, 2 layers, both directions; 4 steps |" in recurrent_table(tmp_path)


def test_a_row_says_what_was_measured(tmp_path: Path) -> None:
    row = {"median_us": 1500.0, "ci_us": [1, 2], "speedup": 1.0, "speedup_ci": [0.9, 1.1], "max_difference": 0.0}
    rows = [{**row, "name": name} for name in (EAGER, AGAIN, ONE_THREAD, IN_ORDER)] + [{**row, "name": TUNED, "speedup": 2.5}]
    case = {"kind": "LSTM", "inputs": 8, "hidden": 16, "layers": 1, "both": False, "steps": 1, "batch": 4, "lanes": 2, "rows": rows}
    environment = {"cores": 2, "torch": "2", "python": "3", "commit": "0123456789", "taken": "2026-01-01T00:00"}
    (tmp_path / "recurrent.json").write_text(json.dumps({"environment": environment, "rounds": 3, "threads": 2, "cases": [case]}))
    text = recurrent_table(tmp_path)
    same = "1.00x (0.90 to 1.10)"
    assert f"| LSTM 8 to 16, 1 layer; 1 step, batch 4 | 1,500 us | {same} | {same} | {same} | 2.50x (0.90 to 1.10) | 2 | 0e+00 |" in text


def test_every_size_is_asked_once_and_both_kinds_in_both_directions() -> None:
    assert len(set(LAYERS)) == len(LAYERS)
    assert {layer.kind for layer in LAYERS if layer.both} == {"LSTM", "GRU"}
