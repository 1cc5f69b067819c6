"""The serving benchmarks run, at their smallest, and their table says what they recorded or that nothing was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.tables_serve import serve_table

_SERVE = Path(__file__).resolve().parents[2] / "experiments" / "serve"


def _smoke(script: str, out: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(_SERVE / script), "--smoke", "--out", str(out)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_nothing_recorded_is_said(tmp_path: Path) -> None:
    assert serve_table(tmp_path) == "(not recorded yet)"


@pytest.mark.slow
def test_both_benchmarks_record_what_the_table_shows(tmp_path: Path) -> None:
    _smoke("load.py", tmp_path / "load.json")
    assert "`tower:30`" in serve_table(tmp_path)
    assert "(not recorded yet)" in serve_table(tmp_path)
    _smoke("overhead.py", tmp_path / "overhead.json")
    text = serve_table(tmp_path)
    assert "(not recorded yet)" not in text
    assert "added by the guard" in text
    recorded = json.loads((tmp_path / "load.json").read_text())
    case = recorded["cases"][0]
    assert recorded["environment"]["cores"] >= 1
    # The stages are parts of the whole, and the whole is all of them.
    assert abs(sum(case["stages_s"].values()) - case["total_s"]["p50"]) < 0.5 * case["total_s"]["p50"]
    assert min(case["stages_s"].values()) >= 0.0
