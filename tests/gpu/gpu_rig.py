"""A bound program on a real device, ready to capture."""

from __future__ import annotations

import torch

from autosched.core.program import Program
from autosched.device.cuda.measure import CudaMeasurer
from autosched.runtime.cuda_bindings import open_bindings
from autosched.runtime.cuda_graph import GraphCapturer, GraphRunner
from autosched.runtime.cuda_lanes import CaptureOptions
from autosched.runtime.kernels import BoundProgram, bind, random_inputs
from autosched.runtime.plan import Plan
from autosched.runtime.streams import StreamSet, TorchStreams

# One set of streams for the whole process: each test taking its own would exhaust the 32 there are.
_STREAMS: list[StreamSet] = []


class Rig:
    """A bound program on the device, ready to capture."""

    def __init__(self, program: Program, constants: dict[int, torch.Tensor]) -> None:
        self.backend = TorchStreams()
        self.program = program
        device = self.backend.device
        self.bound: BoundProgram = bind(program, {value: tensor.to(device) for value, tensor in constants.items()}, device)
        self.reader = open_bindings()
        if not _STREAMS:
            _STREAMS.append(StreamSet(self.backend))
        self.capturer = GraphCapturer(self.backend, reader=self.reader, streams=_STREAMS[0])
        self.measurer = CudaMeasurer(self.capturer, self.bound, program.graph, random_inputs(program, 0, device))
        assert self.capturer.warm_up(self.bound, self.measurer.static) is None

    def inputs(self, seed: int) -> list[torch.Tensor]:
        return random_inputs(self.program, seed, self.backend.device)

    def capture(self, plan: Plan, **options: object) -> GraphRunner:
        made = self.capturer.capture(
            self.bound,
            plan,
            self.measurer.static,
            graph=self.program.graph,
            options=CaptureOptions(**options),  # type: ignore[arg-type]
        )
        assert isinstance(made, GraphRunner), made
        return made

    def close(self) -> None:
        self.measurer.close()
        self.capturer.close()
