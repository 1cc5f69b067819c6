"""What the compiler is given on a GPU: the user's model where another process can build it, else the program, and the report says which."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
import torch

from autosched.capture.export import Captured, capture
from autosched.core.records import Failure, FailureKind
from autosched.device.compiled_baseline import ModelSource, from_zoo
from autosched.device.cuda import baseline_session
from autosched.device.cuda.baseline_session import CudaBaseline, ModelCall
from autosched.device.cuda.baselines import BaselineKind, TimedBaseline
from autosched.device.cuda.settings import current_settings
from autosched.device.worker import ENDED_WAITING
from autosched.runtime.trees import output_tensors
from autosched.zoo import ZooModel, load
from tests.conformance.cpu_cuda import CpuCuda

WORKER = "tests.conformance.fake_baseline_worker"


@pytest.fixture(scope="module")
def toy() -> ZooModel:
    return load("autosched:toy")


@pytest.fixture(scope="module")
def captured(toy: ZooModel) -> Captured:
    return capture(toy.model, toy.args, toy.kwargs)


def call_of(toy: ZooModel, source: ModelSource) -> ModelCall:
    with torch.no_grad():
        answer = output_tensors(toy.model(*toy.args, **toy.kwargs))
    return ModelCall(source, toy.args, toy.kwargs, answer)


@pytest.fixture
def baseline(captured: Captured, request: pytest.FixtureRequest) -> Iterator[CudaBaseline]:
    model: ModelCall | None = request.param(load("autosched:toy")) if request.param is not None else None
    made = CudaBaseline(captured.program, captured.constants, BaselineKind.EAGER, current_settings(0), model=model, module=WORKER)
    yield made
    made.close()


@pytest.mark.parametrize("baseline", [lambda toy: call_of(toy, from_zoo("autosched:toy"))], indirect=True)
def test_the_model_itself_runs_where_the_process_can_build_it(baseline: CudaBaseline) -> None:
    prepared = baseline.prepare()
    assert not isinstance(prepared, Failure), prepared
    assert prepared.of_model
    assert prepared.max_abs_error == 0.0  # the same weights, the same inputs
    assert baseline.why_not_model == ""
    assert isinstance(baseline.round_us(), float)


@pytest.mark.parametrize("baseline", [None], indirect=True)
def test_without_a_source_it_is_the_program_and_says_why(baseline: CudaBaseline) -> None:
    prepared = baseline.prepare()
    assert not isinstance(prepared, Failure), prepared
    assert not prepared.of_model
    assert "no other process can build the model" in baseline.why_not_model


@pytest.mark.parametrize("baseline", [lambda toy: call_of(toy, from_zoo("autosched:deepfm"))], indirect=True)
def test_a_model_that_does_not_run_there_gives_way_to_the_program(baseline: CudaBaseline) -> None:
    prepared = baseline.prepare()
    assert not isinstance(prepared, Failure), prepared
    assert not prepared.of_model
    assert baseline.why_not_model


@pytest.mark.parametrize("baseline", [lambda toy: call_of(toy, ModelSource("tests.conformance.no_such_module:make"))], indirect=True)
def test_a_source_that_is_not_there_is_named(baseline: CudaBaseline) -> None:
    prepared = baseline.prepare()
    assert not isinstance(prepared, Failure), prepared
    assert "no_such_module" in baseline.why_not_model


def test_an_answer_of_another_shape_is_no_baseline(captured: Captured, toy: ZooModel) -> None:
    call = call_of(toy, from_zoo("autosched:toy"))._replace(references=[torch.zeros(3)])
    with CudaBaseline(captured.program, captured.constants, BaselineKind.EAGER, current_settings(0), model=call, module=WORKER) as baseline:
        prepared = baseline.prepare()
    assert not isinstance(prepared, Failure)
    assert "shapes" in baseline.why_not_model


def test_arguments_that_cannot_travel_leave_the_program(captured: Captured, toy: ZooModel) -> None:
    call = call_of(toy, from_zoo("autosched:toy"))._replace(kwargs={"lock": object()})
    with CudaBaseline(captured.program, captured.constants, BaselineKind.EAGER, current_settings(0), model=call, module=WORKER) as baseline:
        assert not isinstance(baseline.prepare(), Failure)
    assert "lock" in baseline.why_not_model or "object" in baseline.why_not_model


def test_a_model_that_loses_the_device_gives_way_to_the_program_in_a_fresh_process(captured: Captured, toy: ZooModel) -> None:
    call = call_of(toy, ModelSource(f"{WORKER}:LosesTheDevice"))
    with CudaBaseline(captured.program, captured.constants, BaselineKind.EAGER, current_settings(0), model=call, module=WORKER) as baseline:
        prepared = baseline.prepare()
        assert not isinstance(prepared, Failure), prepared
        assert not prepared.of_model
        assert "illegal memory access" in baseline.why_not_model
        assert isinstance(baseline.round_us(), float)


def test_a_time_limit_is_no_reason_to_do_without_the_model(captured: Captured, toy: ZooModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Expired(RuntimeError):
        pass

    def expire(number: int, frame: object) -> None:
        raise Expired

    before = signal.signal(signal.SIGUSR1, expire)
    monkeypatch.setattr(baseline_session, "compile_request", lambda *_, **__: signal.raise_signal(signal.SIGUSR1))
    call, settings = call_of(toy, from_zoo("autosched:toy")), current_settings(0)
    baseline = CudaBaseline(captured.program, captured.constants, BaselineKind.EAGER, settings, model=call, module=WORKER)
    try:
        with baseline, pytest.raises(Expired):
            baseline.prepare()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_process_that_was_ended_while_it_waited_is_said_to_be(captured: Captured) -> None:
    with CudaBaseline(captured.program, captured.constants, BaselineKind.EAGER, current_settings(0), module=WORKER) as baseline:
        assert not isinstance(baseline.prepare(), Failure)
        assert isinstance(baseline.round_us(), float)
        baseline._worker.stop()
        while baseline._worker.pid is not None:
            time.sleep(0.01)
        assert baseline.round_us() == ENDED_WAITING


def test_without_a_gpu_a_baseline_is_one_failure(captured: Captured) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with CudaBaseline(captured.program, captured.constants, BaselineKind.EAGER, current_settings(0)) as baseline:
        found = baseline.prepare()
    assert isinstance(found, Failure)
    assert found.kind in (FailureKind.CRASH, FailureKind.UNAVAILABLE)


class _Counted(CpuCuda):
    """Bytes are what the module says it holds."""

    held = peak = 0

    def hold(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)

    def allocated_bytes(self) -> int:
        return self.held

    def reset_peak(self) -> None:
        self.peak = self.held

    def peak_bytes(self) -> int:
        return self.peak


def test_the_peak_is_that_of_one_run_without_what_stays() -> None:
    backend = _Counted()
    seen: list[int] = []

    def module(tensor: torch.Tensor) -> torch.Tensor:
        if not seen:
            backend.hold(32 << 20)  # a library's workspace, made by the first product and kept
        seen.append(1)
        backend.hold(1000)
        backend.hold(-1000)
        return tensor

    baseline = TimedBaseline(backend, module, [torch.ones(2)], BaselineKind.EAGER)
    assert baseline.peak_bytes == 1000
    assert torch.equal(baseline.outputs[0], torch.ones(2))
