"""The process of one baseline of the CUDA device: binds the program, compiles it if asked, and times it block by block."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from autosched.core.errors import UsageError
from autosched.device.cuda.baselines import BaselineKind, TimedBaseline, program_module
from autosched.device.cuda.lost import require_device
from autosched.device.cuda.messages import BaselineBody, BaselineResult, SettingsBody, unwrap, wrap_answer
from autosched.device.cuda.settings import apply_settings, require_gpu
from autosched.device.worker_child import Channel
from autosched.device.worker_compile import load_call
from autosched.device.worker_messages import (
    Answer,
    CompileRequest,
    ExtraRequest,
    OpenRequest,
    Request,
    RoundAnswer,
    RoundRequest,
)
from autosched.device.worker_tensors import read_program
from autosched.runtime.cuda.streams import StreamBackend
from autosched.runtime.cuda.torch_streams import TorchStreams
from autosched.runtime.inductor.bind import source_of
from autosched.runtime.kernels import BoundProgram, bind, random_inputs
from autosched.runtime.trees import map_tensors


class BaselineService:
    """Answers a :class:`autosched.device.cuda.baseline_session.CudaBaseline`.

    Args:
        device_of: the device of a visible GPU's index, ``backend_of`` its streams; tests give others.
    """

    def __init__(
        self,
        channel: Channel,
        device_of: Callable[[int], str] = lambda index: f"cuda:{index}",
        backend_of: Callable[[str], StreamBackend] = TorchStreams,
    ) -> None:
        self._channel = channel
        self._device_of = device_of
        self._backend_of = backend_of
        self._device = device_of(0)
        self._backend: StreamBackend | None = None
        self._bound: BoundProgram | None = None
        self._inputs: list[torch.Tensor] = []
        self._timed: TimedBaseline | None = None

    def handle(self, request: Request) -> Iterator[Answer]:
        """Answer one request; end the process where the device is lost to it, so that the next request finds another."""
        try:
            yield from self._answers(request)
        except Exception as error:
            if self._backend is not None:
                require_device(self._backend, error)
            raise

    def _answers(self, request: Request) -> Iterator[Answer]:
        match request:
            case ExtraRequest():
                if (settings := unwrap(request, SettingsBody)) is not None:
                    require_gpu(settings)
                    apply_settings(settings)
                    self._device = self._device_of(settings.device_index)
                elif (body := unwrap(request, BaselineBody)) is not None:
                    yield wrap_answer(self._prepare(BaselineKind(body.kind), body.call))
                else:
                    raise UsageError(f"a baseline's process cannot answer {request.name}")
            case OpenRequest():
                self._open(request)
            case RoundRequest() if self._timed is not None:
                yield RoundAnswer(self._timed.block_us(request.min_block_us))
            case _:
                raise UsageError(f"a baseline's process cannot answer {type(request).__name__} now")

    def _open(self, request: OpenRequest) -> None:
        if self._device.startswith("cuda"):
            torch.cuda.set_device(self._device)
        program, constants = read_program(request.program_file, request.constants_file, self._device)
        self._channel.beat(-1)
        if program.source:
            # What other ways of running are measured on is the operators, not what a compiler has made of them already.
            program, constants = source_of(program, constants)
        self._bound = bind(program, constants, self._device)
        self._inputs = random_inputs(program, request.seed, self._device)

    def _prepare(self, kind: BaselineKind, call: CompileRequest | None) -> BaselineResult:
        bound = self._bound
        if bound is None:
            raise UsageError("a baseline was asked for before a program was opened")
        backend = self._backend = self._backend_of(self._device)
        args: tuple[Any, ...] = tuple(self._inputs)
        kwargs: dict[str, Any] = {}
        if call is not None:
            made, args, kwargs, wanted = load_call(call)
            module: Any = made.to(self._device)
            args, kwargs = map_tensors(lambda tensor: tensor.to(self._device), (args, kwargs))
            self._channel.beat(-1)
        else:
            module = bound_callable(bound) if kind is BaselineKind.EAGER else program_module(bound)
            wanted = [tensor.clone() for tensor in bound.run(self._inputs)]
        self._timed = TimedBaseline(backend, module, args, kind, kwargs)
        return BaselineResult(_distance(self._timed.outputs, wanted), self._timed.peak_bytes, call is not None)


def bound_callable(bound: BoundProgram) -> Any:
    """The program as a function of its inputs, operator by operator."""
    return lambda *inputs: bound.run(inputs)


def _distance(made: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Largest absolute difference of two answers.

    Raises:
        UsageError: if they differ in form.
    """
    if [tensor.shape for tensor in made] != [tensor.shape for tensor in wanted]:
        shapes = [[list(tensor.shape) for tensor in answer] for answer in (made, wanted)]
        raise UsageError(f"the baseline's answer has shapes {shapes[0]}; expected the model's {shapes[1]}")
    distances = [(mine.cpu().double() - other.cpu().double()).abs() for mine, other in zip(made, wanted, strict=True) if mine.numel()]
    return max((float(distance.max()) for distance in distances), default=0.0)


def main() -> None:
    """Serve until the parent is done."""
    channel = Channel()
    _import_compiler()
    channel.serve(BaselineService(channel).handle)


def _import_compiler() -> None:
    """Now, while the model is captured elsewhere, and not while somebody waits for the baseline, of whichever kind it is."""
    # What is in the way is said when something is to be compiled.
    with contextlib.suppress(Exception):
        importlib.import_module("torch._inductor.compile_fx")
