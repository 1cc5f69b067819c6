"""What a block of replays tells is the device's time, also where the host is the slower of the two."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from autosched.core.records import Failure, ScheduleRecord
from autosched.core.schedule import sequential
from autosched.device.cuda import baselines
from autosched.device.cuda.baselines import BaselineKind, TimedBaseline
from autosched.device.cuda.launches import launched_us
from autosched.device.cuda.measure import CudaMeasurer
from autosched.runtime.cuda.graph import GraphCapturer
from tests.conformance.fake_cuda import FakeCuda
from tests.conformance.fake_cuda_values import FakeCapture, FakeEvent, FakeStream
from tests.conformance.fake_graphs import diamond
from tests.conformance.fake_program import FakeProgram

_LAUNCH_US = 12.0  # of the host, from Python
_ENTRIES = 1024  # of a stream's queue; a launch of a graph takes some of them
_OF_A_LAUNCH = 4


class HostBound(FakeCuda):
    """The host takes its time for each launch; nothing starts on the device before it was launched, and its queue may be full."""

    def __init__(self) -> None:
        super().__init__()
        self.now_us = 0.0
        self.queued = 0
        self.overflows = 0
        self.asleep_us = 0.0

    def launched(self) -> None:
        """One launch on the current stream."""
        self.now_us += _LAUNCH_US
        self.queued += _OF_A_LAUNCH
        self.overflows += self.queued > _ENTRIES
        self._current.clock_us = max(self._current.clock_us, self.now_us)

    def replay(self, graph: FakeCapture) -> None:
        self.launched()
        super().replay(graph)

    def sleep(self, time_us: float) -> None:
        self.launched()
        self.asleep_us += time_us
        super().sleep(time_us)

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        if stream.capture is None:
            stream.clock_us = max(stream.clock_us, self.now_us)
        super().record(event, stream)

    def synchronize(self) -> None:
        super().synchronize()
        self.now_us = max(self.now_us, self._current.clock_us, *(item.clock_us for ring in self._rings.values() for item in ring))
        self.queued = 0


def measurer(cuda: FakeCuda, operator_us: float) -> CudaMeasurer:
    graph = diamond(2, 2)
    program = FakeProgram(cuda, graph, durations_us={operator.index: operator_us for operator in graph.operators})
    return CudaMeasurer(GraphCapturer(cuda), program, graph, program.inputs(1))


@pytest.mark.parametrize("operator_us", [0.5, 2.0, 300.0])
@pytest.mark.parametrize("min_block_us", [0.0, 20000.0])
def test_a_schedule_s_time_is_the_device_s_however_short_it_is(operator_us: float, min_block_us: float) -> None:
    cuda = HostBound()
    bench = measurer(cuda, operator_us)
    length = len(bench.graph)
    ((_, record),) = bench.schedules([sequential(bench.graph)], rounds=3, trace=False, min_block_us=min_block_us, seed=0)
    assert isinstance(record, ScheduleRecord)
    assert record.samples.median_us == pytest.approx(operator_us * length)
    assert cuda.overflows == 0
    times = bench.paired([sequential(bench.graph)], rounds=3, seed=0)
    assert not isinstance(times, Failure)
    assert times[0] == pytest.approx([operator_us * length] * 3)
    assert cuda.overflows == 0


def test_waiting_for_launches_costs_a_long_schedule_next_to_nothing() -> None:
    cuda = HostBound()
    bench = measurer(cuda, 2000.0 / 6)
    bench.wake()
    bench.runner(sequential(bench.graph))
    cuda.asleep_us = 0.0
    assert bench.paired([sequential(bench.graph)], rounds=30, seed=0)
    assert 0.0 < cuda.asleep_us < 0.001 * 30 * 2000.0 * 30


@pytest.mark.parametrize("count", [1, 7, 1000, 2000])
def test_the_mean_is_of_as_many_launches_as_were_asked_for(count: int) -> None:
    cuda, timed = FakeCuda(), 0
    stream = cuda.new_stream(0)

    def launch() -> None:
        nonlocal timed
        timed += 1
        cuda.launch(None, 3.0)

    assert launched_us(cuda, stream, launch, count) == pytest.approx(3.0)
    assert timed >= count


def test_a_compiled_baseline_is_timed_as_schedules_are_and_an_eager_one_with_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = HostBound()

    def run(*_: Any) -> torch.Tensor:
        cuda.launched()
        cuda.launch(None, 3.0)
        return torch.ones(1)

    def capture(baseline: Any) -> None:
        baseline._graph = types.SimpleNamespace(replay=run)

    monkeypatch.setattr(TimedBaseline, "_capture", capture)
    monkeypatch.setattr(baselines, "_compiled", lambda module, kind: module)
    given = [torch.ones(1)]
    assert TimedBaseline(cuda, run, given, BaselineKind.COMPILED).block_us(0.0) == pytest.approx(3.0)
    assert TimedBaseline(cuda, run, given, BaselineKind.EAGER).block_us(0.0) == pytest.approx(_LAUNCH_US, rel=0.3)
    assert cuda.overflows == 0
