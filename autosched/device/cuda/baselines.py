"""What a schedule has to beat on a GPU, beside the sequential one: the program eagerly, and compiled by PyTorch.

Each runs in a process of its own: the compiler's CUDA graph trees clear cuBLAS workspaces that live graphs of ours would still
read. Compiled programs are captured into one CUDA graph here rather than by the compiler, so that neither guards nor input copies
nor Python are on their clock: that favours them, and compares device time with device time.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autosched.core.errors import UsageError
from autosched.core.variants import Lowering
from autosched.device.cuda.launches import launched_us
from autosched.device.cuda.waking import Waker
from autosched.runtime.cuda.streams import StreamBackend, Tensor
from autosched.runtime.inductor.common import add_calls
from autosched.runtime.inductor.modes import mode_options
from autosched.runtime.kernels import BoundProgram
from autosched.runtime.trees import output_tensors, renewed_calls

_WARM_UPS = 3
_BLOCK_US = 1000.0
# Longer than a turn of everything that is compared: others have kept the device busy meanwhile. Compilers keep it waiting for minutes.
_IDLE_S = 5.0


class BaselineKind(enum.StrEnum):
    """How the program is run."""

    EAGER = "eager"  # operator by operator, as PyTorch does
    COMPILED = "compiled"  # torch.compile with its defaults, in a CUDA graph
    MAX_AUTOTUNE = "max_autotune"  # mode max-autotune, in a CUDA graph
    MAX_AUTOTUNE_COMBO = "max_autotune_combo"  # the same, with combo kernels and frozen weights


MODES: Mapping[BaselineKind, Lowering] = {
    BaselineKind.COMPILED: Lowering.INDUCTOR,
    BaselineKind.MAX_AUTOTUNE: Lowering.MAX_AUTOTUNE,
    BaselineKind.MAX_AUTOTUNE_COMBO: Lowering.MAX_AUTOTUNE_COMBO,
}
"""The lowering that is compiled with the options of a compiled baseline."""


def compile_options(kind: BaselineKind) -> dict[str, Any]:
    """Inductor options of a compiled baseline.

    Raises:
        UsageError: for a kind that is not compiled.
    """
    if kind not in MODES:
        raise UsageError(f"baseline {kind} is not compiled; expected one of {', '.join(MODES)}")
    options: dict[str, Any] = {"triton.cudagraphs": False, **mode_options(MODES[kind])}
    if kind is BaselineKind.MAX_AUTOTUNE_COMBO:
        options["freezing"] = True
    return options


def program_module(bound: BoundProgram) -> torch.fx.GraphModule:
    """The program as a module that a compiler can read: one node for each call, constants as buffers. It returns a list of tensors."""
    graph = torch.fx.Graph()
    program = bound.program
    made = {value: graph.placeholder(f"input_{value}") for value in program.graph.inputs}
    root = torch.nn.Module()
    for value, tensor in enumerate(bound.constants):
        if tensor is not None:
            root.register_buffer(f"constant_{value}", tensor)
            made[value] = graph.get_attr(f"constant_{value}")
    add_calls(graph, made, (call for item in program.graph.operators for call in item.calls), bound.device)
    graph.output([made[value] for value in program.graph.outputs])
    return torch.fx.GraphModule(root, graph)


class TimedBaseline:
    """One baseline, ready to be timed. ``outputs`` are the tensors of its last answer.

    ``peak_bytes`` is what one run allocates at most beside what stays from run to run: no weights, no inputs, no workspaces
    that the libraries keep and nothing that the compiler took while it timed kernels. A schedule's graph is counted the same way.

    Args:
        module: what is called; its answer may be nested.
        args, kwargs: of the call, on the device; captured ones are read where they are.
    """

    def __init__(
        self,
        backend: StreamBackend,
        module: Callable[..., Any],
        args: Sequence[Any],
        kind: BaselineKind,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._backend = backend
        self._args, self._kwargs = tuple(args), dict(kwargs or {})
        self._graph: Any = None
        self._stream = backend.new_stream(0)
        self._waker = Waker(backend, lambda: self._stream, _IDLE_S)
        compiled = kind is not BaselineKind.EAGER
        self._run = _compiled(module, kind) if compiled else module
        # What a user would write: freezing wants gradients off, and the compiler keeps a guard for each mode it has seen.
        self._mode: Callable[[], Any] = torch.no_grad if compiled else torch.inference_mode
        # The inputs and constants were made on another stream.
        backend.synchronize()
        with self._mode(), backend.on(self._stream):
            for _ in range(_WARM_UPS):
                self._answer()
            self.peak_bytes = self._one_run_bytes()
        backend.synchronize()
        if compiled:
            self._capture()

    def _capture(self) -> None:
        # A process of its own, one graph in it: the convenient interface will do, and is what a user would write.
        graph = torch.cuda.CUDAGraph()
        with self._mode(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._answer()
        self._graph = graph
        graph.replay()
        self._backend.synchronize()

    def _answer(self, call: tuple[tuple[Any, ...], dict[str, Any]] | None = None) -> None:
        args, kwargs = call or renewed_calls(self._args, self._kwargs, 1)[0]
        self.outputs: list[Tensor] = output_tensors(self._run(*args, **kwargs))

    def _one_run_bytes(self) -> int:
        backend = self._backend
        self.outputs = []
        before = backend.allocated_bytes()
        backend.reset_peak()
        self._answer()
        return backend.peak_bytes() - before

    def block_us(self, min_block_us: float) -> float:
        """Time of one run, the mean over a block of back-to-back runs of at least ``min_block_us`` microseconds."""
        wanted_us = max(min_block_us, _BLOCK_US)
        self._waker.wake()
        once_us = self._time(2)
        return self._time(max(1, min(2000, int(wanted_us / max(once_us, 1.0)) + 1)))

    def _time(self, runs: int) -> float:
        graph = self._graph
        time_us = self._eager_us(runs) if graph is None else launched_us(self._backend, self._stream, graph.replay, runs)
        self._waker.busy()
        return time_us

    def _eager_us(self, runs: int) -> float:
        """The host's time is part of it: so it is for whoever runs a model operator by operator."""
        backend = self._backend
        start, end = backend.new_event(timing=True), backend.new_event(timing=True)
        waiting = renewed_calls(self._args, self._kwargs, runs + 1)
        with self._mode(), backend.on(self._stream):
            self._answer(waiting.pop())
            backend.record(start, self._stream)
            while waiting:
                self._answer(waiting.pop())
            backend.record(end, self._stream)
        backend.synchronize()
        return backend.elapsed_us(start, end) / runs


def _compiled(module: Callable[..., Any], kind: BaselineKind) -> Callable[..., Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run: Callable[..., Any] = torch.compile(module, options=compile_options(kind), dynamic=False)
    return run
