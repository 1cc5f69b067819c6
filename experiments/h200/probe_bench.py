"""What the probes measure with: a device and a program on it, or a test double that stands in for both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from autosched.core.graph import OpGraph
from autosched.core.records import Failure
from autosched.core.schedule import Schedule, make_schedule
from autosched.costmodel.metrics import spearman
from autosched.device.cuda.measure import CudaMeasurer
from autosched.runtime.cuda.bindings import GraphBindings, open_bindings
from autosched.runtime.cuda.graph import GraphCapturer

Answer = tuple[str, dict[str, Any]]
"""A sentence, and raw data."""


# Launches that are to wait for the clock, far fewer than the device's queue takes (about a thousand), and what holds them back at most.
_QUEUED, _HELD_US = 256, 50_000.0


@dataclass
class Bench:
    """A device, streams, and the tools around them. ``program`` makes a measurer of a model of the zoo."""

    backend: Any
    capturer: GraphCapturer
    smoke: bool
    bindings: GraphBindings | None
    program: Callable[[], CudaMeasurer]

    def capture(self, sides: Sequence[Any], body: Callable[[], Any]) -> tuple[Any, Any]:
        """Capture what ``body`` launches on ``sides``."""
        made = self.capturer.capture_script(sides, body, pool=self.backend.new_pool())
        if isinstance(made, Failure):
            raise RuntimeError(made.detail)
        return made

    def lanes(self, count: int, priority: int = 0) -> list[Any]:
        """Distinct streams."""
        return [self.capturer.streams.lane(lane, priority) for lane in range(count)]

    def edge(self, before: Any, after: Any) -> None:
        """Make stream ``after`` wait for stream ``before``."""
        event = self.backend.new_event()
        self.backend.record(event, before)
        self.backend.wait(after, event)

    def replay_us(self, graph: Any, replays: int, rounds: int) -> list[float]:
        """Mean time of a replay in each of ``rounds`` blocks of back-to-back replays.

        The device is held back until a block is launched: of a short graph, the host's launches would be timed else.
        """
        backend, stream = self.backend, self.capturer.streams.named("replay")
        times = []
        for _ in range(rounds):
            start, end = backend.new_event(timing=True), backend.new_event(timing=True)
            with backend.on(stream):
                begin = time.perf_counter()
                backend.replay(graph)
                launch_us = 1e6 * (time.perf_counter() - begin)
                # Twice as long as they take: a launch may be slower than the first one was.
                backend.sleep(min(2.0 * launch_us * min(replays, _QUEUED), _HELD_US))
                backend.record(start, stream)
                for _ in range(replays):
                    backend.replay(graph)
                backend.record(end, stream)
            backend.synchronize()
            times.append(backend.elapsed_us(start, end) / replays)
        return times

    def preheat(self) -> None:
        """Keep the device busy for a second and a half, so that its clock is where steady work finds it."""
        if self.smoke:
            return
        import torch

        a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            for _ in range(20):
                a @ a
            torch.cuda.synchronize()


def cuda_bench() -> Bench:
    """On the first visible GPU."""
    from autosched.runtime.cuda.torch_streams import TorchStreams

    backend = TorchStreams()
    bindings = open_bindings()
    capturer = GraphCapturer(backend, reader=bindings)

    def program() -> CudaMeasurer:
        from autosched.capture.export import capture
        from autosched.runtime.kernels import bind, random_inputs
        from autosched.zoo import load

        try:
            model = load("torchvision:googlenet")
        except Exception:  # a machine without torchvision still has the package's own nets
            model = load("autosched:toy")
        captured = capture(model.model, model.args, model.kwargs, target="cuda")
        device = backend.device
        bound = bind(captured.program, {value: tensor.to(device) for value, tensor in captured.constants.items()}, device)
        measurer = CudaMeasurer(capturer, bound, captured.program.graph, random_inputs(captured.program, 0, device))
        failure = capturer.warm_up(bound, measurer.static)
        if failure is not None:
            raise RuntimeError(failure.detail)
        return measurer

    bench = Bench(backend, capturer, False, bindings, program)
    bench.preheat()
    return bench


def smoke_bench() -> Bench:
    """On the double."""
    from tests.conformance.fake_cuda import FakeCuda
    from tests.conformance.fake_graphs import diamond
    from tests.conformance.fake_program import FakeProgram

    cuda = FakeCuda()
    capturer = GraphCapturer(cuda, reader=cuda)

    def program() -> CudaMeasurer:
        graph: OpGraph = diamond(3, 4)
        fake = FakeProgram(cuda, graph)
        return CudaMeasurer(capturer, fake, graph, fake.inputs(0))

    return Bench(cuda, capturer, True, None, program)


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median and range, rounded for people; the raw times are kept beside it."""
    return {"median_us": round(median(times), 3), "min_us": round(min(times), 3), "max_us": round(max(times), 3)}


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation. Equals share their mean rank: a GPU's clock ticks coarsely. Where all are equal it is 0."""
    return spearman(np.array(first), np.array(second)) or 0.0


def chains(graph: OpGraph, lanes: int) -> Schedule:
    """Each operator on the lane of a predecessor whose lane's end it is, else on the emptiest: wide and dependent on many waits."""
    ends: list[int] = [-1] * lanes
    lane = [0] * len(graph)
    for index in range(len(graph)):
        free = [place for place, end in enumerate(ends) if end in graph.predecessors[index]]
        lane[index] = free[0] if free else min(range(lanes), key=lambda place: (ends[place], place))
        ends[lane[index]] = index
    return make_schedule(graph, range(len(graph)), lane)
