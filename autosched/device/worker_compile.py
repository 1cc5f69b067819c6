"""The compiling process: one model under ``torch.compile`` with frozen weights, checked once and timed round by round."""

from __future__ import annotations

import importlib
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from autosched.capture.pt2 import load_pt2
from autosched.core.errors import UsageError
from autosched.core.program import Argument, NonFinite, Ref
from autosched.core.records import Failure, FailureKind
from autosched.core.variants import Lowering
from autosched.device.baselines import calls_us
from autosched.device.cpu_measure import TEAM_SPIN_S, no_collector, runs_lasting, warmed_us
from autosched.device.worker_child import Channel
from autosched.device.worker_messages import Answer, Broken, CompileAnswer, CompileRequest, Request, RoundAnswer, RoundRequest
from autosched.device.worker_tensors import read_in_order, read_tensors
from autosched.runtime.compiler_files import compilers_write_into
from autosched.runtime.float32 import rounded_as
from autosched.runtime.host_key import apply_numerics
from autosched.runtime.inductor.modes import mode_options
from autosched.runtime.numerics import compare
from autosched.runtime.state import Kept
from autosched.runtime.trees import call_of, map_tensors, output_tensors, renewed_calls


class _Service:
    """The compiled model, once there is one."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._calls_us: Callable[[int], float] | None = None
        self._kept: Kept | None = None
        self._threads = 1

    def handle(self, request: Request) -> Iterator[Answer]:
        match request:
            case CompileRequest():
                yield self._compile(request)
            case RoundRequest():
                if self._calls_us is None:
                    raise UsageError("a round was asked for before a model was compiled")
                yield RoundAnswer(self._round_us(self._calls_us, request.min_block_us))
            case _:
                raise UsageError(f"the compiling process cannot answer {type(request).__name__}")

    def _compile(self, request: CompileRequest) -> Answer:
        if (why := _missing_compiler()) is not None:
            return Broken(Failure(FailureKind.UNAVAILABLE, why))
        compilers_write_into(Path(request.tensors_file).parent)
        if request.numerics:
            apply_numerics(request.numerics)
        model, args, kwargs, references = load_call(request)
        self._threads = request.threads
        torch.set_num_threads(request.threads)
        kept = self._kept = Kept.anything(model, args, kwargs)
        difference = _other_model(model, args, kwargs, references) if not request.source.endswith(".pt2") else ""
        if kept.changed():
            kept.restore()
        if difference:
            return Broken(Failure(FailureKind.MISMATCH, f"{request.source} makes another model in another process: {difference}"))
        try:
            outputs = self._compile_and_run(model, args, kwargs, Lowering(request.lowering))
        except Exception as error:
            if "compil" in type(error).__name__.lower() or "CppCompileError" in str(error) or "C++ compiler" in str(error):
                first = (str(error).splitlines() or [""])[0]
                return Broken(Failure(FailureKind.UNAVAILABLE, f"the C++ compiler here cannot build what Inductor wrote: {first}"))
            raise
        agreement = compare(output_tensors(outputs), references)
        if not math.isfinite(agreement.max_abs_error):
            return Broken(Failure(FailureKind.MISMATCH, f"the compiled model's outputs differ in form: {agreement.reason}"))
        return CompileAnswer(agreement.max_abs_error)

    def _compile_and_run(self, model: torch.nn.Module, args: Any, kwargs: Any, lowering: Lowering) -> Any:
        import torch._inductor.config

        for name, value in {"freezing": True, **mode_options(lowering)}.items():
            setattr(torch._inductor.config, name, value)
        # Freezing needs gradients off when compiling and when running.
        with torch.no_grad():
            compiled = torch.compile(model, dynamic=False)
            restore: Callable[[], None] | None = None
            made: list[Any] = []
            for own_args, own_kwargs in renewed_calls(args, kwargs, 2):
                made.append(compiled(*own_args, **own_kwargs))
                if self._kept is not None and self._kept.changed():
                    # What it returns may be what is given back its contents.
                    made[-1] = map_tensors(lambda tensor: tensor.clone(), made[-1])
                    restore = self._kept.restore
                    restore()
        self._calls_us = lambda calls: calls_us(compiled, renewed_calls(args, kwargs, calls), restore)
        outputs = made[-1]
        return outputs

    def _round_us(self, calls_us: Callable[[int], float], min_block_us: float) -> float:
        self._channel.beat(-1)
        with torch.no_grad(), no_collector():
            taken_us = warmed_us(calls_us, lambda once_us: runs_lasting(min_block_us, once_us))
        if self._threads > 1:
            time.sleep(TEAM_SPIN_S)
        return taken_us


def _other_model(model: torch.nn.Module, args: Any, kwargs: Any, references: list[torch.Tensor]) -> str:
    """How the answer of a model that was built here differs from the one given, or nothing.

    Its weights may be drawn by other generators than PyTorch's, for example, which a seed does not reach.
    """
    with torch.no_grad():
        [(own_args, own_kwargs)] = renewed_calls(args, kwargs, 1)
        answer = model(*own_args, **own_kwargs)
    # The answer given is in full float32; here it is as the settings are.
    return compare(output_tensors(answer), references, rounded=rounded_as("cpu")).reason


def _missing_compiler() -> str | None:
    """Why nothing can be compiled here, or ``None``."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        compiler = get_cpp_compiler()
    except Exception as error:
        return f"torch.compile finds no C++ compiler ({type(error).__name__}); install g++, or name another in CXX, to have this baseline"
    if shutil.which(compiler) is None:
        return f"the C++ compiler {compiler} does not exist; install g++, or name another in CXX, to have this baseline"
    return None


def load_call(request: CompileRequest) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
    """The model, the arguments it is called with, and the tensors of its right answer, all on the CPU."""
    model = _load_model(request)
    tensors = read_tensors(Path(request.tensors_file))
    leaves = [_leaf(item, tensors) for item in request.leaves]
    args, kwargs = call_of(request.tree, leaves)
    return model, args, kwargs, read_in_order(request.references_file)


def _load_model(request: CompileRequest) -> torch.nn.Module:
    if request.source.endswith(".pt2"):
        return load_pt2(request.source)[0]
    module, _, function = request.source.partition(":")
    made = getattr(importlib.import_module(module), function)(**dict(request.options))
    model = getattr(made, "model", made)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{request.source} made a {type(made).__name__}; expected a model")
    return model


def _leaf(argument: Argument, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(argument, Ref):
        return tensors[str(argument.value)]
    return float(argument.name) if isinstance(argument, NonFinite) else argument


def main() -> None:
    """Serve until the parent is done."""
    channel = Channel()
    channel.serve(_Service(channel).handle)
