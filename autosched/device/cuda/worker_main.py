"""The measuring process of the CUDA device: the only process of a tuning job that owns a CUDA context."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from autosched.core.errors import UnsupportedGraph
from autosched.device.cuda.measure import CudaMeasurer
from autosched.device.cuda.messages import SettingsBody
from autosched.device.cuda.meter import GpuMeter
from autosched.device.cuda.screen import observe_synchronising
from autosched.device.cuda.service import Bench, CudaService
from autosched.device.cuda.settings import apply_settings, require_gpu
from autosched.device.worker_child import COMPILE_S, Channel
from autosched.device.worker_messages import OpenRequest
from autosched.device.worker_tensors import read_program
from autosched.runtime.audit import audit_run
from autosched.runtime.cuda.bindings import open_bindings, why_unread
from autosched.runtime.cuda.graph import GraphCapturer
from autosched.runtime.cuda.key import cuda_device_key, cuda_software_key
from autosched.runtime.cuda.streams import Tensor
from autosched.runtime.cuda.torch_streams import TorchStreams
from autosched.runtime.float32 import full_float32
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.regions.library import region_library

# Several times the L2 cache of any GPU of compute capability 9.0 or 10.0.
_FLUSH_BYTES = 256 << 20


class _Builder:
    """Opens a program on the device chosen in the settings."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._index = 0

    def apply(self, settings: SettingsBody) -> None:
        """Set what the parent has set: it decides which kernels run."""
        require_gpu(settings)
        apply_settings(settings)
        self._index = settings.device_index

    def build(self, request: OpenRequest) -> Bench:
        """Bind, warm up, and find the operators that cannot be captured.

        Raises:
            UnsupportedGraph: naming them.
        """
        beat = self._channel.beat
        backend = TorchStreams(f"cuda:{self._index}")
        device = backend.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        program, constants = read_program(request.program_file, request.constants_file, device)
        beat(-1)
        with self._channel.working(COMPILE_S if program.source else 0.0):
            bound = bind(program, constants, device)
        if self._channel.plugin is not None:
            kernels = tuple(self._channel.plugin.wrap_kernel(index, kernel) for index, kernel in enumerate(bound.kernels))
            bound = dataclasses.replace(bound, kernels=kernels)
        inputs = random_inputs(program, request.seed, device)
        bindings = open_bindings()
        meter = GpuMeter(self._index)
        capturer = GraphCapturer(backend, reader=bindings, unread=why_unread())
        regions = region_library(program, device, cuda_device_key(self._index), cuda_software_key(self._index), bound.kernels)
        measurer = CudaMeasurer(capturer, bound, program.graph, inputs, beat=beat, contamination=meter.read, regions=regions)
        failure = capturer.warm_up(bound, measurer.static, lambda: beat(-1))
        beat(-1)
        if failure is not None:
            raise RuntimeError(f"the program does not run on the device: {failure.detail}")
        # Aliases were observed where the model was captured; what an operator returns a view of may differ here.
        _, lies = audit_run(bound, inputs)
        backend.synchronize()
        beat(-1)
        if lies:
            raise UnsupportedGraph(f"operators treat memory otherwise on this device than where the model was captured: {lies[0]}")
        if found := observe_synchronising(measurer):
            named = ", ".join(f"{item.name} {item.reason}" for item in found[:5])
            raise UnsupportedGraph(
                f"operators that a CUDA graph cannot hold: {named}. Move them out of the model, or tune for --device cpu."
            )
        beat(-1)

        def to_device(tensors: Sequence[torch.Tensor]) -> list[Tensor]:
            return [tensor.to(device) for tensor in tensors]

        return Bench(
            measurer,
            inputs,
            to_device,
            draw=lambda seed: random_inputs(program, seed, device),
            exact=_with_full_float32,
            bindings=bindings if capturer.can_observe else None,
            flushing=functools.partial(_flushing, device),
        )


@contextlib.contextmanager
def _flushing(device: torch.device) -> Iterator[Callable[[], object]]:
    """Memory that displaces the L2 cache when it is filled; held no longer than cold times are taken."""
    yield torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device).zero_


def _with_full_float32(run: Callable[[], list[Tensor]]) -> list[Tensor]:
    with full_float32():
        return run()


def main() -> None:
    """Serve until the parent is done."""
    channel = Channel()
    builder = _Builder(channel)
    channel.serve(CudaService(builder.build, builder.apply, channel.beat).handle)
