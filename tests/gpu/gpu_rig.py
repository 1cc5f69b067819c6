"""A bound program on a real device, ready to capture; in a rehearsal, on the double with CPU tensors."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autosched.core.in_place import Chain
from autosched.core.program import Program
from autosched.device.cuda.baseline_session import CudaBaseline
from autosched.device.cuda.baselines import BaselineKind
from autosched.device.cuda.device import CudaDevice
from autosched.device.cuda.measure import CudaMeasurer
from autosched.device.cuda.session import CudaSession
from autosched.device.cuda.settings import current_settings
from autosched.runtime.cuda.audit import audit_graph
from autosched.runtime.cuda.bindings import open_bindings
from autosched.runtime.cuda.graph import GraphCapturer
from autosched.runtime.cuda.lanes import CaptureOptions
from autosched.runtime.cuda.runner import GraphRunner
from autosched.runtime.cuda.streams import StreamSet
from autosched.runtime.cuda.torch_streams import TorchStreams
from autosched.runtime.in_place import in_place
from autosched.runtime.kernels import BoundProgram, bind, random_inputs
from autosched.runtime.plan import Plan
from tests.conformance.cpu_cuda import CpuCuda

# One set of streams for the whole process: no stream of a set is ever freed, nor what cuBLAS keeps for it.
_STREAMS: list[StreamSet] = []
_DOUBLE: list[CpuCuda] = []


def rehearsing() -> bool:
    """Whether ``--gpu-rehearsal`` was given."""
    return "--gpu-rehearsal" in sys.argv


def without_gpu() -> bool:
    """Whether the operators' values come from a CPU, as in a rehearsal and on the emulator: large cases would show nothing more."""
    return rehearsing() or torch.cuda.get_device_name().startswith("Emulated")


def backend() -> Any:
    """The device's streams."""
    if not rehearsing():
        return TorchStreams()
    if not _DOUBLE:
        _DOUBLE.append(CpuCuda())
    return _DOUBLE[0]


def reader() -> Any:
    """What reads captured graphs, or ``None``."""
    return backend() if rehearsing() else open_bindings()


def open_session(program: Program, constants: Mapping[int, torch.Tensor], plugin: Path | None = None) -> CudaSession:
    """A measuring process."""
    if rehearsing():
        worker = "tests.conformance.cpu_cuda_worker"
        return CudaSession(program, constants, timeout_s=120.0, settings=current_settings(0), module=worker)
    if plugin is not None:
        return CudaSession(program, constants, timeout_s=120.0, settings=current_settings(0), plugin=plugin)
    return CudaDevice().open(program, constants, timeout_s=120.0)


def open_baseline(program: Program, constants: Mapping[int, torch.Tensor], kind: BaselineKind) -> CudaBaseline:
    """A baseline's process."""
    if rehearsing():
        return CudaBaseline(program, constants, kind, current_settings(0), module="tests.conformance.fake_baseline_worker")
    return CudaBaseline(program, constants, kind, current_settings(0))


class Rig:
    """A bound program on the device, ready to capture."""

    def __init__(self, program: Program, constants: dict[int, torch.Tensor]) -> None:
        self.backend = backend()
        self.program = program
        device = self.backend.device
        self.bound: BoundProgram = bind(program, {value: tensor.to(device) for value, tensor in constants.items()}, device)
        self.reader = reader()
        if not _STREAMS:
            _STREAMS.append(StreamSet(self.backend))
        self.capturer = GraphCapturer(self.backend, reader=self.reader, streams=_STREAMS[0])
        self.measurer = CudaMeasurer(self.capturer, self.bound, program.graph, random_inputs(program, 0, device))
        assert self.capturer.warm_up(self.bound, self.measurer.static) is None

    def inputs(self, seed: int) -> list[torch.Tensor]:
        return random_inputs(self.program, seed, self.backend.device)

    def capturing(self) -> bool:
        """Whether what is launched now is captured."""
        return bool(self.backend.capturing(self.backend.current_stream()))

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

    def assert_sound_in_place(self, plan: Plan, chains: Sequence[Chain], seed: int) -> None:
        """Captured with ``chains`` done in place: the reference's bits, held back by lane so that a race would show, and a sound audit."""
        graph = self.program.graph
        bound = in_place(self.bound, chains)
        for late in {step.lane for step in plan.steps}:
            delays = {step.operator: 30.0 for step in plan.steps if step.lane == late}
            for chosen in (CaptureOptions(observe=self.reader is not None), CaptureOptions(delays=delays)):
                runner = self.capturer.capture(bound, plan, self.measurer.static, graph=graph, options=chosen)
                assert isinstance(runner, GraphRunner), (seed, runner)
                for turn in range(2):
                    inputs = self.inputs(1000 + turn)
                    assert self.backend.same(runner(inputs), self.measurer.reference(inputs)), (seed, chosen)
                if runner.captured is not None:
                    assert len(runner.captured.overwritten) == sum(len(chain.links) for chain in chains)
                    assert audit_graph(graph, plan, runner.captured).problems == (), seed
                runner.close()

    def close(self) -> None:
        self.measurer.close()
        self.capturer.close()
