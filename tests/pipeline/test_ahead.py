"""Compiling a whole model in a process that is ended when its time is over."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.export import Captured
from autosched.core.variants import Lowering
from autosched.device import ahead
from autosched.device.cpu import CpuDevice
from autosched.device.worker import Worker
from autosched.pipeline import attempts, inductor_capture
from autosched.pipeline.original import Original
from autosched.pipeline.preparing import NotHad, capture_as

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither one test's attempts at compiling nor how long this machine took to export decides whether the next begins."""
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(attempts, "EXPORTS", {})


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
    why = capture_as(Lowering.INDUCTOR, Original(net, args, None), CpuDevice(), limit_s=0.05)
    assert isinstance(why, NotHad)
    assert "Inductor had not compiled the whole model after" in why.why
    assert why.needs_s is not None
    assert started
    assert not any(worker.pid for worker in started)


def test_widths_are_compiled_at_once_unless_there_is_one_core_or_kernels_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[tuple[int, ...]]] = []
    monkeypatch.setattr(Worker, "start", lambda worker: None)
    monkeypatch.setattr(ahead, "_first_reason", lambda workers, bodies, *rest: asked.append([body.threads for body in bodies]))
    net, args = model()
    source = inductor_capture.inductor_source(Original(net, args, None).draft())[0]
    for lowering, processes in ((Lowering.INDUCTOR, 2), (Lowering.INDUCTOR, 1), (Lowering.MAX_AUTOTUNE, 2)):
        monkeypatch.setattr(ahead, "worker_count", lambda jobs, processes=processes: processes)
        assert ahead.compile_ahead(source.program, source.constants, "cpu", (4, 1), 10.0, lowering) is None
    assert asked == [[(4,), (1,)], [(4, 1)], [(4, 1)]]


def test_a_reason_of_one_process_ends_the_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What cannot be used for one number of threads is not waited for with another."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead, "worker_count", lambda jobs: 2)
    ended = threading.Event()
    stopped: list[Worker] = []

    def compile_one(worker: Worker, body: ahead.AheadBody) -> None:
        if body.threads == (1,):
            raise ahead._Reason("its code is not understood")
        assert ended.wait(60.0)

    def stop(worker: Worker) -> None:
        stopped.append(worker)
        ended.set()

    monkeypatch.setattr(Worker, "start", lambda worker: None)
    monkeypatch.setattr(Worker, "stop", stop)
    monkeypatch.setattr(ahead, "_compile", compile_one)
    net, args = model()
    source = inductor_capture.inductor_source(Original(net, args, None).draft())[0]
    found = ahead.compile_ahead(source.program, source.constants, "cpu", (4, 1), 60.0)
    assert found == ahead.NotCompiled("its code is not understood")
    assert len(stopped) == 1


def test_a_process_that_dies_is_a_reason_and_leaves_nothing_unfinished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "ab").mkdir()
    unfinished = tmp_path / "ab" / "kernel.so"
    unfinished.touch()
    monkeypatch.setattr(ahead, "MODULE", "autosched.device.no_such_module")
    net, args = model()
    why = capture_as(Lowering.INDUCTOR, Original(net, args, None), CpuDevice(), limit_s=800.0)
    assert isinstance(why, NotHad)
    assert "compiled the whole model ended" in why.why or "cannot be compiled in another process" in why.why
    assert why.needs_s is None
    assert not unfinished.exists()


def test_what_fits_is_captured_like_without_a_limit() -> None:
    net, args = model()
    found = capture_as(Lowering.INDUCTOR, Original(net, args, None), CpuDevice(), limit_s=800.0)
    assert isinstance(found, Captured), found
    again = capture_as(Lowering.INDUCTOR, Original(net, args, None), CpuDevice())
    assert isinstance(again, Captured)
    assert found.program.lowering == "inductor"
    assert found.program.graph.hash == again.program.graph.hash
