"""The CPU suite: what is asked for, and where it is kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments import suite


def test_other_batches_and_dtypes_are_asked_for_and_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[suite.Run] = []

    def answered(run: suite.Run, timeout_s: float, extra_environment: dict[str, str] | None = None) -> dict[str, Any]:
        asked.append(run)
        return {"verdict": f"kept of {run.model}"}

    monkeypatch.setattr(suite, "measure", answered)
    monkeypatch.setattr(sys, "argv", ["suite.py", "--more", "--out", str(tmp_path)])
    suite.main()
    assert [(run.model, run.batch, run.dtype) for run in asked] == list(suite.CPU_MORE)
    assert {run.effort for run in asked} == {"quick"}
    assert len(list((tmp_path / "more").iterdir())) == len(suite.CPU_MORE)
    document = json.loads((tmp_path / "more" / "timm_resnet18_b8_float32.json").read_text())
    assert document["report"] == {"verdict": "kept of timm:resnet18"}
    assert document["run"]["batch"] == 8
    asked.clear()
    monkeypatch.setattr(sys, "argv", ["suite.py", "--more", "--out", str(tmp_path), "transformers:bert"])
    suite.main()
    assert {(run.model, run.dtype) for run in asked} == {("transformers:bert", "bfloat16"), ("transformers:bert", "float16")}
