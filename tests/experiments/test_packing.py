"""The benchmark of packed weights runs, and its table marks what the pass packs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autosched.runtime.cores import usable_cores
from experiments import narrow, packing
from experiments.narrow import DTYPES
from experiments.serve import overhead
from experiments.tables_packing import narrow_table, packing_table


@pytest.mark.slow
def test_it_records_what_the_table_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert packing_table(tmp_path) == "(not recorded yet)"
    monkeypatch.setattr(overhead, "_BLOCK_US", 1.0)
    monkeypatch.setattr(sys, "argv", ["packing.py", "--smoke", "--out", str(tmp_path / "packing.json")])
    packing.main()
    cases = json.loads((tmp_path / "packing.json").read_text())["cases"]
    assert {case["threads"] for case in cases} == {1, usable_cores()}
    assert {case["from_cache"] for case in cases} == {True, False}
    assert all(case["unpacked_us"] > 0.0 and case["packed_us"] > 0.0 for case in cases)
    assert all((case["compiled_us"] > 0.0) if case["rows"] == 1 else ("compiled_us" not in case) for case in cases)
    by_rows, _, one_row = packing_table(tmp_path).rpartition("| 1 row |")  # which is the last table's head, too
    assert [len(line.split("|")) for line in one_row.splitlines() if line.startswith("| 256 x 256 |")] == [7]
    cached, memory = by_rows.split("weights from memory")
    for part in (cached, memory):
        (row,) = [line for line in part.splitlines() if line.startswith("| 256 x 256 |")]
        # Of this size, no number of rows is packed: the call costs more.
        assert row.count("**") == 0
        assert len(row.split("|")) == 8


def test_what_the_pass_packs_is_bold(tmp_path: Path) -> None:
    case = {"shape": [512, 512], "rows": 1, "threads": 1, "layers": 8, "unpacked_us": 30.0, "again_us": 30.3, "packed_us": 20.0}
    cases = [{**case, "from_cache": from_cache} for from_cache in (True, False)]
    environment = {"cores": 2, "torch": "2", "python": "3", "commit": "0123456789", "taken": "2026-01-01T00:00"}
    (tmp_path / "packing.json").write_text(json.dumps({"environment": environment, "rounds": 3, "cases": cases}))
    text = packing_table(tmp_path)
    assert "| 512 x 512 | 1.50 |" in text
    assert "| 512 x 512 | **1.50** |" in text
    assert "A/A: 1.0% apart in the median" in text
    assert "compiled" not in text


def test_one_row_is_set_against_what_is_compiled(tmp_path: Path) -> None:
    case = {"shape": [512, 512], "rows": 1, "layers": 8, "unpacked_us": 30.0, "again_us": 30.0, "packed_us": 20.0, "compiled_us": 10.0}
    cases = [{**case, "threads": threads, "from_cache": True, "compiled_us": 10.0 / threads} for threads in (2, 1)]
    environment = {"cores": 2, "torch": "2", "python": "3", "commit": "0123456789", "taken": "2026-01-01T00:00"}
    (tmp_path / "packing.json").write_text(json.dumps({"environment": environment, "rounds": 3, "cases": cases}))
    assert "| 512 x 512 | 3.00 / 6.00 | 2.00 / 4.00 |  |  |" in packing_table(tmp_path)


@pytest.mark.slow
def test_weights_in_fewer_bits_are_timed_beside_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert narrow_table(tmp_path) == "(not recorded yet)"
    monkeypatch.setattr(overhead, "_BLOCK_US", 1.0)
    monkeypatch.setattr(sys, "argv", ["narrow.py", "--smoke", "--out", str(tmp_path / "narrow.json")])
    narrow.main()
    rows = json.loads((tmp_path / "narrow.json").read_text())["rows"]
    assert {(row["dtype"], row["threads"]) for row in rows} == {(name, n) for name in (*DTYPES, "again") for n in {1, usable_cores()}}
    assert all(row["us"] > 0.0 for row in rows)
    text = narrow_table(tmp_path)
    assert "| **int8** |" in text
    assert "| int16 |" in text
    assert "| float32 again (A/A) |" in text
