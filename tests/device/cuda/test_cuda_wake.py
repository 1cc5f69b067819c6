"""What a device must have been through before it is measured or captured on: its clock is up, and the kernels of our own are loaded."""

from __future__ import annotations

import pytest
import torch

from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import make_schedule, sequential
from autosched.device.cuda import service
from autosched.device.cuda.baselines import BaselineKind, TimedBaseline
from autosched.device.cuda.measure import CudaMeasurer
from autosched.device.cuda.messages import ProfilesBody, wrap_request
from autosched.device.worker_messages import OpenRequest
from autosched.runtime.cuda.graph import GraphCapturer
from tests.conformance.cpu_cuda import CpuCuda
from tests.conformance.fake_cuda import FakeCapture, FakeCuda
from tests.conformance.fake_graphs import diamond
from tests.conformance.fake_program import FakeProgram


class Watched(FakeCuda):
    """Notes each launch of a kernel of our own, and whether it was captured."""

    def __init__(self) -> None:
        super().__init__()
        self.slept_us: list[float] = []
        self.captured: dict[str, list[bool]] = {"sleep": [], "touch": []}

    def sleep(self, time_us: float) -> None:
        self.slept_us.append(time_us)
        self.captured["sleep"].append(self.capturing(self.current_stream()))
        super().sleep(time_us)

    def touch(self) -> None:
        self.captured["touch"].append(self.capturing(self.current_stream()))
        super().touch()


def test_an_idle_device_is_woken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    cuda, graph = Watched(), diamond()
    program = FakeProgram(cuda, graph)
    measurer = CudaMeasurer(GraphCapturer(cuda), program, graph, program.inputs(1))
    measurer.wake()
    measurer.wake()
    assert len(cuda.slept_us) == 1
    assert cuda.slept_us[0] >= 1e5
    now_s += 10.0
    measurer.wake()
    assert len(cuda.slept_us) == 2
    # What is timed keeps it awake.
    now_s += 10.0
    assert measurer.solo_us(0)
    measurer.wake()
    assert sum(time_us >= 1e5 for time_us in cuda.slept_us) == 2


def test_a_device_that_waited_for_many_captures_is_woken_before_their_graphs_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)

    class Slow(Watched):
        def begin_capture(self, pool: int) -> FakeCapture:
            nonlocal now_s
            now_s += 0.9
            return super().begin_capture(pool)

    cuda, graph = Slow(), diamond()
    program = FakeProgram(cuda, graph)
    measurer = CudaMeasurer(GraphCapturer(cuda), program, graph, program.inputs(1))
    measurer.capturer.scratch_pool()
    apart = make_schedule(graph, range(len(graph)), [index % 2 for index in range(len(graph))])

    def woken(times: object) -> int:
        assert not isinstance(times, Failure)
        return sum(time_us >= 1e5 for time_us in cuda.slept_us)

    measurer.wake()
    assert woken(measurer.paired([sequential(graph), apart], rounds=2, seed=0)) == 2
    # These are there already.
    assert woken(measurer.paired([apart, sequential(graph)], rounds=2, seed=0)) == 2
    assert woken(list(measurer.schedules([sequential(graph), apart], 2, False, 0.0, 0))) == 2
    assert woken(list(measurer.schedules([sequential(graph), apart], 2, False, 0.0, 0))) == 3


class _Slept(CpuCuda):
    def __init__(self) -> None:
        super().__init__()
        self.slept_us: list[float] = []

    def sleep(self, time_us: float) -> None:
        self.slept_us.append(time_us)


def test_a_baseline_wakes_a_device_that_its_compiler_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    backend = _Slept()
    baseline = TimedBaseline(backend, lambda tensor: tensor, [torch.ones(2)], BaselineKind.EAGER)
    assert backend.slept_us == []
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    baseline.block_us(0.0)
    baseline.block_us(0.0)
    assert len(backend.slept_us) == 1
    assert backend.slept_us[0] >= 1e5
    # A turn of the others does not count.
    now_s += 2.0
    baseline.block_us(0.0)
    assert len(backend.slept_us) == 1
    now_s += 60.0
    baseline.block_us(0.0)
    assert len(backend.slept_us) == 2


@pytest.mark.parametrize("warmed", [False, True])
def test_our_own_kernels_are_loaded_before_they_are_captured(*, warmed: bool) -> None:
    cuda, graph = Watched(), diamond()
    program = FakeProgram(cuda, graph)
    capturer = GraphCapturer(cuda)
    if warmed:
        assert capturer.warm_up(program, program.inputs(1)) is None
    capturer.scratch_pool()
    assert {name: seen[0] for name, seen in cuda.captured.items()} == {"sleep": False, "touch": False}
    assert cuda.captured["touch"][-1]


def test_a_device_is_woken_before_operators_are_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile holds times; in a process that was started for it, nothing was timed before."""
    cuda, graph = Watched(), diamond()
    program = FakeProgram(cuda, graph)
    measurer = CudaMeasurer(GraphCapturer(cuda), program, graph, program.inputs(1))
    bench = service.Bench(measurer, [], to_device=list, draw=lambda seed: [])
    answers = service.CudaService(lambda request: bench, lambda body: None, lambda item: None)
    woken: list[bool] = []

    def profile(*_: object, **__: object) -> Failure:
        woken.append(any(time_us >= 1e5 for time_us in cuda.slept_us))
        return Failure(FailureKind.CRASH, "not asked")

    monkeypatch.setattr(service, "profile_operator", profile)
    list(answers.handle(OpenRequest("", "", 0)))
    list(answers.handle(wrap_request(ProfilesBody((0,), False, (0,)))))
    assert woken == [True]
