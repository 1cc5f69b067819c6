"""The comparison of lowerings keeps every run as it ends, and measures a model again whose file lacks one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from experiments.fused import suite


def test_every_run_is_written_and_a_file_that_lacks_one_is_not_complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "toy.json"
    seen: list[bool] = []

    def measure(run: Any, timeout_s: float, kept: dict[str, str]) -> dict[str, Any]:
        seen.append(suite.complete(target, ["rewritten", "fused"]))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return {"error": {"message": f"no {run.lowering}", "exit_code": 1}}

    monkeypatch.setattr(suite, "measure", measure)
    asked = argparse.Namespace(device="cpu", effort="quick", budget=None, compiled=False, timeout=1.0)
    with pytest.raises(KeyboardInterrupt):
        suite.run_model("toy", asked, ["rewritten", "fused"], target)
    assert list(json.loads(target.read_text())["runs"]) == ["rewritten", "fused"]
    assert seen == [False, False, False]
    assert suite.complete(target, ["rewritten"])
    assert not suite.complete(target, ["rewritten", "fused"])
    seen[:] = [False] * 3
    suite.run_model("toy", asked, ["rewritten", "fused"], target)
    assert list(json.loads(target.read_text())["runs"]) == ["rewritten", "fused", "fused_again"]
    assert suite.complete(target, ["rewritten", "fused"])
