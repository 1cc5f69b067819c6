"""What a device must have been through before it is measured or captured on: its clock is up, and the kernels of our own are loaded."""

from __future__ import annotations

import pytest
import torch

from autosched.device.cuda.baselines import BaselineKind, TimedBaseline
from autosched.device.cuda.measure import CudaMeasurer
from autosched.runtime.cuda_graph import GraphCapturer
from tests.conformance.cpu_cuda import CpuCuda
from tests.conformance.fake_cuda import FakeCuda
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
