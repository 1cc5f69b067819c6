"""Baselines: on how many threads a CPU's run; of a GPU, what compiles shares the compilers' time, what does not is not held to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.errors import UsageError, WorkerLost
from autosched.core.progress import Silent
from autosched.core.records import Failure
from autosched.device.cuda.baseline_session import PREPARE_TIMEOUT_S
from autosched.device.cuda.baselines import BaselineKind
from autosched.device.registry import device_named
from autosched.pipeline import baselines, compile_time
from tests.conformance.fake_driver import gpus_called
from tests.conformance.unavailable_baseline import UnavailableBaseline


def test_modes_that_are_not_asked_for_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_COMPILE_MODES", "max_autotune, compiled")
    assert baselines._wanted() == [BaselineKind.COMPILED, BaselineKind.MAX_AUTOTUNE]
    monkeypatch.setenv("AUTOSCHED_COMPILE_MODES", "")
    assert baselines._wanted() == [BaselineKind.COMPILED, BaselineKind.MAX_AUTOTUNE, BaselineKind.MAX_AUTOTUNE_COMBO]
    monkeypatch.setenv("AUTOSCHED_COMPILE_MODES", "fastest")
    with pytest.raises(
        UsageError, match="AUTOSCHED_COMPILE_MODES names 'fastest'; expected some of compiled, max_autotune, max_autotune_combo"
    ):
        baselines._wanted()


def test_the_model_as_it_came_takes_no_compilers_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With little of the total left it had no time, although it compiles nothing."""
    now: list[float] = [0.0]
    started: list[BaselineKind] = []
    limits_s: dict[BaselineKind, float] = {}
    monkeypatch.delenv("AUTOSCHED_COMPILE_LIMIT_S", raising=False)
    monkeypatch.setenv("AUTOSCHED_COMPILE_TOTAL_S", "80")

    class Baseline(UnavailableBaseline):
        def start(self) -> None:
            started.append(self.kind)

        def prepare(self, limit_s: float) -> Failure:
            assert started == list(BaselineKind)  # the last one imports while the first one compiles
            limits_s[self.kind] = limit_s
            now[0] += 30.0
            return super().prepare(limit_s)

    monkeypatch.setattr(baselines, "CudaBaseline", Baseline)
    model, args = nn.ReLU(), (torch.ones(2),)
    captured = capture(model, args)
    with gpus_called("Test GPU A"):
        rivals = baselines.Rivals(model, args, None, device_named("cuda"), compiled=True, source=None, progress=Silent())
        monkeypatch.setattr(compile_time.time, "monotonic", lambda: now[0])
        rivals.ready(captured, [])  # not entered: no process waits
    assert limits_s == {
        BaselineKind.EAGER: PREPARE_TIMEOUT_S,
        BaselineKind.COMPILED: 40.0,
        BaselineKind.MAX_AUTOTUNE: 25.0,
        BaselineKind.MAX_AUTOTUNE_COMBO: 10.0,
    }


def test_processes_of_a_gpus_baselines_start_before_there_is_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[str] = []
    given: dict[BaselineKind, Any] = {}

    class Process:
        def start(self) -> None:
            came.append("start")
            if len(came) == 2:
                raise WorkerLost("no more processes")

        def close(self) -> None:
            came.append("close")

    class Baseline(UnavailableBaseline):
        def __init__(self, program: Any, constants: Any, kind: BaselineKind, settings: Any, *, worker: Any, **options: Any) -> None:
            super().__init__(program, constants, kind, settings)
            given[kind] = worker

    monkeypatch.setattr(baselines, "CudaBaseline", Baseline)
    monkeypatch.setattr(baselines, "new_baseline_worker", Process)
    model, args = nn.ReLU(), (torch.ones(2),)
    with gpus_called("Test GPU A"):
        with baselines.Rivals(model, args, None, device_named("cuda"), compiled=True, source=None, progress=Silent()) as rivals:
            assert came == ["start"] * 4
            rivals.ready(capture(model, args), [])
            assert list(given) == list(BaselineKind)
            assert len(set(map(id, given.values()))) == 4
            assert all(isinstance(worker, Process) for worker in given.values())
        assert came == ["start"] * 4 + ["close"] * 4
        with baselines.Rivals(model, args, None, device_named("cuda"), compiled=False, source=None, progress=Silent()):
            assert came[8:] == ["start"]
    with baselines.Rivals(model, args, None, device_named("cpu"), compiled=True, source=None, progress=Silent()):
        assert came[8:] == ["start", "close"]


def test_a_cpu_has_as_many_threads_as_cores_and_not_as_hardware_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two for each core the model in eager mode was slower than PyTorch is by itself, and what was tuned looked better than it is."""
    monkeypatch.setattr(baselines, "physical_cores", lambda: 4)
    monkeypatch.setattr("autosched.runtime.cores.usable_cores", lambda: 8)
    compiled: list[int] = []

    class Compiled:
        max_abs_error = 0.0

        def __init__(self, *given: Any, threads: int, **options: Any) -> None:
            compiled.append(threads)

        def prepare(self) -> None: ...

        def close(self) -> None: ...

        def round_us(self) -> float:
            return 1.0

    monkeypatch.setattr(baselines, "CompiledBaseline", Compiled)
    monkeypatch.setenv("AUTOSCHED_COMPILE_MODES", "compiled")
    model, args = nn.ReLU(), (torch.ones(2),)
    with baselines.Rivals(model, args, None, device_named("cpu"), compiled=True, source=None, progress=Silent()) as rivals:
        names = [item.name for item in rivals.ready(capture(model, args), [])]
    assert names == ["eager_1", "eager_4", "torch_compile"]
    assert compiled == [4]
