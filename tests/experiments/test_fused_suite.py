"""The comparison of lowerings keeps every run as it ends, and goes on with those that are missing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.calls import LATE, LEFT, Call
from experiments.fused import suite

LOWERINGS = ("rewritten", "fused", "inductor")
ASKED = argparse.Namespace(device="cpu", effort="quick", budget=None, compiled=False, again=False, retry=False)


class Runs:
    """Runs that pretend: names as they were made, and what each answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.answers: dict[int, Any] = {}
        monkeypatch.setattr(suite, "measure", self.measure)

    def measure(self, run: Any, timeout_s: float, kept: dict[str, str]) -> dict[str, Any]:
        caches = Path(kept["AUTOSCHED_CACHE"])
        self.made.append(run.lowering + ("+" if caches.exists() else ""))
        caches.mkdir(parents=True, exist_ok=True)
        answer = self.answers.get(len(self.made), {"error": {"message": f"no {run.lowering}", "exit_code": 1}})
        if isinstance(answer, BaseException):
            raise answer
        found: dict[str, Any] = answer
        return found


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


def test_every_run_is_written_and_the_next_call_makes_only_what_is_missing(runs: Runs, tmp_path: Path) -> None:
    target, caches = tmp_path / "toy.json", tmp_path / "caches"
    runs.answers[4] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        suite.run_model("toy", ASKED, LOWERINGS, target, Call(float("inf"), longest_s=1500.0), caches)
    assert list(json.loads(target.read_text())["runs"]) == ["rewritten", "fused", "inductor"]
    assert suite.run_model("toy", ASKED, LOWERINGS, target, Call(float("inf"), longest_s=1500.0), caches)
    # What the first run of fused compiled is still there for its second.
    assert runs.made == ["rewritten", "fused", "inductor+", "fused+", "fused+"]
    assert not caches.exists()
    assert suite.run_model("toy", ASKED, LOWERINGS, target, Call(float("inf"), longest_s=1500.0), caches)
    assert len(runs.made) == 5


def test_where_the_caches_are_gone_both_runs_of_fused_are_made_again(runs: Runs, tmp_path: Path) -> None:
    target, caches = tmp_path / "toy.json", tmp_path / "caches"
    runs.answers[3] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        suite.run_model("toy", ASKED, ["rewritten", "fused"], target, Call(float("inf"), longest_s=1500.0), caches)
    assert suite.run_model("toy", ASKED, ["rewritten", "fused"], target, Call(float("inf"), longest_s=1500.0), tmp_path / "elsewhere")
    assert runs.made[3:] == ["fused", "fused+"]


def test_a_run_that_was_cut_short_is_made_again_and_one_that_had_all_the_time_is_not(runs: Runs, tmp_path: Path) -> None:
    target, caches = tmp_path / "toy.json", tmp_path / "caches"
    runs.answers[1] = {"error": {"message": "late", "exit_code": LATE}}
    assert suite.run_model("toy", ASKED, ["rewritten"], target, Call(100.0), caches)
    runs.made.clear()
    call = Call(100.0)
    call.took(1.0)
    call._began -= 80.0
    assert not suite.run_model("toy", ASKED, ["inductor"], target, call, caches)
    runs.answers.clear()
    assert suite.run_model("toy", ASKED, ["inductor"], target, Call(100.0), caches)
    assert len(runs.made) == 2


def test_what_failed_is_a_failure_and_is_made_again_when_asked(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["suite.py", "a", "--lowerings", "rewritten,inductor", "--out", str(tmp_path), "--work", str(tmp_path / "w")]
    runs.answers[2] = {"report": "of inductor", "strategies": []}
    monkeypatch.setattr(suite, "summary", lambda report: {})
    monkeypatch.setattr(sys, "argv", asked)
    assert (suite.main(), runs.made) == (1, ["rewritten", "inductor+"])
    assert (suite.main(), len(runs.made)) == (1, 2)
    runs.answers[3] = runs.answers[2]
    monkeypatch.setattr(sys, "argv", [*asked, "--retry"])
    assert (suite.main(), runs.made[2:]) == (0, ["rewritten"])


def test_a_call_without_time_says_what_is_left(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["suite.py", "a", "b", "--out", str(tmp_path), "--work", str(tmp_path / "w"), "--deadline", "0.001"])
    assert suite.main() == LEFT
    assert not runs.made
    assert "2 of 2 models are not done, the next is a" in capsys.readouterr().out
