"""The benchmark of compiling ends within its call and keeps what it has."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from autosched.core.variants import Variant
from experiments.calls import LEFT, Call
from experiments.fused import compile_cost


def test_a_turn_that_takes_too_long_is_ended_and_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(compile_cost, "__file__", str(slow))
    monkeypatch.setattr(compile_cost, "LEAST_S", 0.1)
    found = compile_cost.turn("toy", argparse.Namespace(device="cpu", lowering="fused"), str(tmp_path), None, 0.5)
    assert found["error"] == "not done in 0 s"


def test_every_turn_is_written_and_none_begins_without_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[list[str]] = []

    def turn(model: str, arguments: argparse.Namespace, folder: str, workers: int | None, limit_s: float) -> dict[str, object]:
        assert limit_s <= 22.0
        if (tmp_path / "fused_toy.json").exists():
            written.append(sorted(json.loads((tmp_path / "fused_toy.json").read_text())))
        return {"ready_s": 1.0, "workers": workers}

    monkeypatch.setattr(compile_cost, "turn", turn)
    monkeypatch.setattr(sys, "argv", ["compile_cost.py", "toy", "--serial", "--deadline", "30", "--out", str(tmp_path)])
    assert compile_cost.main() == 0
    assert [[name for name in ("first", "second", "serial") if name in turns] for turns in written] == [["first"], ["first", "second"]]
    document = json.loads((tmp_path / "fused_toy.json").read_text())
    assert document["serial"]["workers"] == 1
    written.clear()
    assert compile_cost.main() == 0
    assert not written
    monkeypatch.undo()
    assert "not begun" in compile_cost.turn("toy", argparse.Namespace(device="cpu", lowering="fused"), str(tmp_path), None, 1.0)["error"]


def test_a_call_that_was_too_short_is_gone_on_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target, begun = tmp_path / "fused_toy.json", list[str]()
    asked = argparse.Namespace(device="cpu", lowering="fused", workers=None, serial=True, again=False, retry=False)

    def turn(model: str, arguments: argparse.Namespace, folder: str, workers: int | None, limit_s: float) -> dict[str, object]:
        begun.append("serial" if workers == 1 else "together")
        if len(begun) == 2:
            return {"error": "not done in 40 s", "late_after_s": 40.0}
        return {"error": "status 1"} if workers == 1 else {"ready_s": 1.0}

    monkeypatch.setattr(compile_cost, "turn", turn)
    monkeypatch.setattr(compile_cost, "environment", lambda: {"commit": f"after {len(begun)} turns"})
    assert compile_cost.measure("toy", asked, target, Call(500.0)) == LEFT
    assert begun == ["together", "together", "serial"]
    # The second needs what the first one compiled; the serial one failed, which is a result.
    assert compile_cost.measure("toy", asked, target, Call(500.0)) == 1
    assert begun[3:] == ["together", "together"]
    assert json.loads(target.read_text())["environment"] == {"commit": "after 3 turns"}
    asked.retry = True
    assert compile_cost.measure("toy", asked, target, Call(500.0)) == 1
    assert begun[5:] == ["serial"]
    asked.retry = False
    # Less than it had all the time there is: another call like this one would come to nothing more.
    begun.clear()
    target.unlink()
    assert compile_cost.measure("toy", asked, target, Call(42.0)) == 1


def test_a_first_turn_that_no_call_has_time_for_is_not_begun_again_for_the_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each call spent all of its time on the first one, of which it had a result, and had none left for the second."""
    target, begun = tmp_path / "fused_toy.json", list[float]()
    asked = argparse.Namespace(device="cuda", lowering="fused", workers=None, serial=False, again=False, retry=False)

    def turn(model: str, arguments: argparse.Namespace, folder: str, workers: int | None, limit_s: float) -> dict[str, object]:
        if begun:
            return {"error": "not begun: 0 s were left", "late_after_s": 0.0}
        begun.append(limit_s)
        return {"error": f"not done in {limit_s:.0f} s", "late_after_s": limit_s}

    monkeypatch.setattr(compile_cost, "turn", turn)
    assert compile_cost.measure("toy", asked, target, Call(500.0)) == 1
    assert json.loads(target.read_text())["second"]["error"] == "not begun: the first turn has no result"
    assert compile_cost.measure("toy", asked, target, Call(500.0)) == 1
    assert len(begun) == 1
    begun.clear()
    assert compile_cost.measure("toy", asked, target, Call(900.0)) == 1
    assert len(begun) == 1


def test_only_what_a_compiler_makes_is_asked_for_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants of libraries were regions, and kernels of our own were refused, which nobody had given the weights."""
    asked: list[tuple[int, int, int]] = []
    offered = (Variant.CALLS, Variant.COMPILED, Variant.OWN_CONVOLUTION, Variant.CUDNN_FUSED, Variant.CUBLASLT)
    library = SimpleNamespace(
        variants=lambda operator: offered, prepare=asked.extend, kernel=lambda *item: None, apply=lambda bound, plan: bound,
        compiled=0, reused=0, processes=1, refusals=(),
    )  # fmt: skip
    monkeypatch.setattr("autosched.runtime.regions.library.region_library", lambda *given: library)
    found = compile_cost.fused_turn("autosched:toy", "cpu")
    assert {variant for _, _, variant in asked} == {Variant.COMPILED}
    assert found["variants"] == len(asked) == found["operators"] * len(found["widths"])
