"""A measuring process of the CUDA device on the double: the real conversation, service and measurements, without a GPU."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from autosched.core.program_json import decode_program
from autosched.device.cuda.measure import CudaMeasurer
from autosched.device.cuda.messages import SettingsBody
from autosched.device.cuda.service import Bench, CudaService
from autosched.device.worker_child import Channel
from autosched.device.worker_messages import OpenRequest
from autosched.runtime.cuda.graph import GraphCapturer
from tests.conformance.fake_cuda import FakeCuda
from tests.conformance.fake_cuda_values import FakeTensor, OutOfMemory, mix
from tests.conformance.fake_program import FakeProgram

_KILLS = "kills the process"
_NO_MEMORY = "runs out of memory"
_LOSES = "loses the device"
_RUINS = "ruins the process"
_BAD_CAPTURE = "breaks the capture"
_VARIES = "gives another number each time"


class FakeBuilder:
    """Opens a program on a double. Operators whose source says so misbehave."""

    def __init__(self, beat: Callable[[int], None]) -> None:
        self._beat = beat
        self.settings: SettingsBody | None = None

    def apply(self, settings: SettingsBody) -> None:
        self.settings = settings

    def build(self, request: OpenRequest) -> Bench:
        program = decode_program(Path(request.program_file).read_bytes())
        cuda = FakeCuda()
        graph = program.graph
        fails = {operator.index: OutOfMemory() for operator in graph.operators if operator.source == _NO_MEMORY}
        fake = FakeProgram(cuda, graph)
        kernels = list(fake.kernels)
        for operator in graph.operators:
            if operator.source == _LOSES:
                kernels[operator.index] = _losing(cuda, kernels[operator.index])
            if operator.source == _KILLS:
                kernels[operator.index] = _killing_in_capture(cuda, kernels[operator.index])
            if operator.index in fails:
                kernels[operator.index] = _failing_in_capture(cuda, kernels[operator.index], fails[operator.index])
            if operator.source == _VARIES:
                kernels[operator.index] = _varying(cuda, kernels[operator.index], operator.writes[0])
            if operator.source == _RUINS:
                cuda.recovers = False
            if operator.source in (_BAD_CAPTURE, _RUINS):
                kernels[operator.index] = _breaking(cuda, kernels[operator.index])
        fake.kernels = tuple(kernels)
        capturer = GraphCapturer(cuda, reader=cuda)
        measurer = CudaMeasurer(capturer, fake, graph, fake.inputs(request.seed), beat=self._beat)

        def to_device(tensors: Sequence[torch.Tensor]) -> list[FakeTensor]:
            return [cuda.tensor(mix(int(tensor.sum().item()))) for tensor in tensors]

        return Bench(measurer, fake.inputs(request.seed), to_device, draw=fake.inputs)


def _failing_in_capture(cuda: FakeCuda, kernel: Callable[..., None], error: Exception) -> Callable[..., None]:
    def run(slots: list[FakeTensor | None]) -> None:
        if cuda.capturing(cuda.current_stream()):
            raise error
        kernel(slots)

    return run


def _varying(cuda: FakeCuda, kernel: Callable[..., None], value: int) -> Callable[..., None]:
    numbers = itertools.count()

    def run(slots: list[FakeTensor | None]) -> None:
        kernel(slots)
        if not cuda.capturing(cuda.current_stream()):
            slots[value] = cuda.tensor(mix(next(numbers)))

    return run


def _losing(cuda: FakeCuda, kernel: Callable[..., None]) -> Callable[..., None]:
    def lose(memory: object) -> Callable[[object], None]:
        cuda.lost = "CUDA error: an illegal memory access was encountered"
        return lambda target: None

    def run(slots: list[FakeTensor | None]) -> None:
        kernel(slots)
        if cuda.capturing(cuda.current_stream()):
            cuda.launch(lose)

    return run


def _killing_in_capture(cuda: FakeCuda, kernel: Callable[..., None]) -> Callable[..., None]:
    def run(slots: list[FakeTensor | None]) -> None:
        if cuda.capturing(cuda.current_stream()):
            os.kill(os.getpid(), signal.SIGKILL)
        kernel(slots)

    return run


def _breaking(cuda: FakeCuda, kernel: Callable[..., None]) -> Callable[..., None]:
    def run(slots: list[FakeTensor | None]) -> None:
        if cuda.capturing(cuda.current_stream()):
            cuda.synchronize()
        kernel(slots)

    return run


def main() -> None:
    channel = Channel()
    builder = FakeBuilder(channel.beat)
    channel.serve(CudaService(builder.build, builder.apply, channel.beat).handle)
