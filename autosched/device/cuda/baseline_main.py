"""The process of one baseline of the CUDA device: binds the program, compiles it if asked, and times it block by block."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from autosched.core.errors import UsageError
from autosched.core.program_json import decode_program
from autosched.device.cuda.baselines import BaselineKind, TimedBaseline, program_module
from autosched.device.cuda.messages import BaselineBody, BaselineResult, SettingsBody, unwrap, wrap_answer
from autosched.device.cuda.settings import apply_settings
from autosched.device.worker_child import Channel
from autosched.device.worker_messages import (
    Answer,
    ExtraRequest,
    OpenRequest,
    Request,
    RoundAnswer,
    RoundRequest,
)
from autosched.device.worker_tensors import read_tensors
from autosched.runtime.kernels import BoundProgram, bind, random_inputs
from autosched.runtime.streams import TorchStreams


class _Service:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._device = "cuda:0"
        self._bound: BoundProgram | None = None
        self._inputs: list[torch.Tensor] = []
        self._timed: TimedBaseline | None = None

    def handle(self, request: Request) -> Iterator[Answer]:
        """Answer one request."""
        match request:
            case ExtraRequest():
                if (settings := unwrap(request, SettingsBody)) is not None:
                    apply_settings(settings)
                    self._device = f"cuda:{settings.device_index}"
                elif (body := unwrap(request, BaselineBody)) is not None:
                    yield wrap_answer(self._prepare(BaselineKind(body.kind)))
                else:
                    raise UsageError(f"a baseline's process cannot answer {request.name}")
            case OpenRequest():
                self._open(request)
            case RoundRequest() if self._timed is not None:
                yield RoundAnswer(self._timed.block_us(request.min_block_us))
            case _:
                raise UsageError(f"a baseline's process cannot answer {type(request).__name__} now")

    def _open(self, request: OpenRequest) -> None:
        program = decode_program(Path(request.program_file).read_bytes())
        constants = {int(name): tensor.to(self._device) for name, tensor in read_tensors(Path(request.constants_file)).items()}
        self._channel.beat(-1)
        self._bound = bind(program, constants, self._device)
        self._inputs = random_inputs(program, request.seed, self._device)

    def _prepare(self, kind: BaselineKind) -> BaselineResult:
        bound = self._bound
        if bound is None:
            raise UsageError("a baseline was asked for before a program was opened")
        backend = TorchStreams(self._device)
        module: Any = bound_callable(bound) if kind in (BaselineKind.EAGER, BaselineKind.CUDA_GRAPH) else program_module(bound)
        wanted = [tensor.clone() for tensor in bound.run(self._inputs)]
        before = backend.allocated_bytes()
        backend.reset_peak()
        begin = time.monotonic()
        self._timed = TimedBaseline(backend, module, self._inputs, kind)
        prepare_s = time.monotonic() - begin
        worst = max((_distance(made, want) for made, want in zip(self._timed.outputs, wanted, strict=True)), default=0.0)
        return BaselineResult(worst, prepare_s, backend.peak_bytes() - before)


def bound_callable(bound: BoundProgram) -> Any:
    """The program as a function of its inputs, operator by operator."""
    return lambda *inputs: bound.run(inputs)


def _distance(made: torch.Tensor, wanted: torch.Tensor) -> float:
    if made.numel() == 0:
        return 0.0
    return float((made.double() - wanted.double()).abs().max())


def main() -> None:
    """Serve until the parent is done."""
    channel = Channel()
    channel.serve(_Service(channel).handle)
