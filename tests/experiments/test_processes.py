"""What sets processes apart is told from what the whole machine does, and the benchmark of it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import processes
from experiments.tables_suite import processes_table


def test_what_a_process_keeps_lasts_and_what_the_machine_does_is_no_difference() -> None:
    pace = np.linspace(100.0, 140.0, 40)
    own = np.array([1.0, 1.02, 1.05])[:, None]
    found = processes.differences(np.stack([pace * own, pace * own]))
    assert found["same_pct"] == [0.0, 0.0, 0.0]
    assert found["two_pct"] == pytest.approx([100 * (1 - 1 / 1.02), 100 * (1 - 1 / 1.05), 100 * (1 - 1.02 / 1.05)])
    assert found["lasting"] == pytest.approx(1.0)


def test_what_changes_hands_does_not_last() -> None:
    halves = np.repeat(np.array([[1.0, 1.1], [1.1, 1.0], [1.05, 1.05]]), 20, axis=1)
    assert processes.differences(100.0 * np.stack([halves, halves]))["lasting"] == pytest.approx(-1.0, abs=0.01)


@pytest.mark.slow
def test_it_records_what_the_table_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "processes.json"
    assert processes_table(path) == "(not recorded yet)"
    monkeypatch.setattr(sys, "argv", ["processes.py", "autosched:deepfm", "--smoke", "--out", str(path)])
    processes.main()
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["model"], len(row["same_pct"]), len(row["two_pct"])) == ("autosched:deepfm", 2, 1)
    assert row["median_us"] > 0.0
    assert f"| `autosched:deepfm` | {row['median_us'] / 1000:.2f} ms | " in processes_table(path)
