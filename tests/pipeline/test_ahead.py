"""Compiling a whole model in a process that is ended when its time is over."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autosched.core.variants import Lowering
from autosched.device import ahead
from autosched.device.worker import Worker
from autosched.pipeline import inductor_capture
from autosched.pipeline.preparing import capture_as

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"),
    pytest.mark.timeout(300),
]


def model() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)).eval(), (torch.randn(4, 8),)


def test_what_does_not_fit_in_the_time_is_given_up_and_its_process_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(*call: object) -> None:
        raise AssertionError("compiled here although the time was over")

    started: list[Worker] = []

    class Seen(Worker):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            started.append(self)

    monkeypatch.setattr(ahead, "Worker", Seen)
    monkeypatch.setattr(inductor_capture, "lower_inductor", too_late)
    net, args = model()
    why = capture_as(Lowering.INDUCTOR, net, args, None, "cpu", limit_s=0.05)
    assert isinstance(why, str)
    assert "Inductor had not compiled the whole model after" in why
    assert [worker.pid for worker in started] == [None]


def test_a_process_that_dies_is_a_reason_and_leaves_nothing_unfinished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "ab").mkdir()
    unfinished = tmp_path / "ab" / "kernel.so"
    unfinished.touch()
    monkeypatch.setattr(ahead, "MODULE", "autosched.device.no_such_module")
    net, args = model()
    why = capture_as(Lowering.INDUCTOR, net, args, None, "cpu", limit_s=30.0)
    assert isinstance(why, str)
    assert "compiled the whole model ended" in why or "cannot be compiled in another process" in why
    assert not unfinished.exists()


def test_what_fits_is_captured_like_without_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    net, args = model()
    found = capture_as(Lowering.INDUCTOR, net, args, None, "cpu", limit_s=200.0)
    assert not isinstance(found, str), found
    again = capture_as(Lowering.INDUCTOR, net, args, None, "cpu")
    assert not isinstance(again, str)
    assert found.program.lowering == "inductor"
    assert found.program.graph.hash == again.program.graph.hash
