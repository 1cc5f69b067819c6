"""The best static rival on a CPU: the model under ``torch.compile`` with frozen weights, in a process of its own.

Its own process, because a copy compiled under a changed configuration in ours may silently reuse the code of another, and because a
compiler may crash or hang.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from autosched.capture.export import exported_program
from autosched.core.errors import DeviceError, UsageError
from autosched.core.program import Argument, NonFinite, Ref
from autosched.core.records import Failure, FailureKind
from autosched.core.variants import Lowering
from autosched.device.worker import Worker, WorkerDied
from autosched.device.worker_child import describe
from autosched.device.worker_messages import Answer, Broken, CompileAnswer, CompileRequest, RoundAnswer, RoundRequest
from autosched.runtime.host_key import numerics_key
from autosched.runtime.inductor.unfinished import remove_unfinished
from autosched.runtime.trees import describe_tree

_MODULE = "autosched.device.worker_compile"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where another process gets the model from.

    Args:
        place: a ``.pt2`` file, or ``module:function`` that, called with ``options`` as keywords, returns a model or something with
            a ``model``.
        options: keyword arguments; plain values.
    """

    place: str
    options: tuple[tuple[str, str | int | None], ...] = ()


def from_zoo(name: str, *, batch: int | None = None, dtype: str | None = None, seed: int = 0) -> ModelSource:
    """The zoo's model of that name, built with the same arguments in the other process."""
    return ModelSource("autosched.zoo:load", (("name", name), ("batch", batch), ("dtype", dtype), ("seed", seed)))


class CompiledBaseline:
    """The model under ``torch.compile``, in a process of its own. Compiles at the first round, which may take minutes.

    Args:
        source: where the process gets the model; ``None`` exports the model given instead, at the first round.
        model: exported if ``source`` is ``None``, or if what comes from there does not run.
        args, kwargs: the call that is timed; nested containers of tensors and plain values.
        references: tensors of the model's output for that call, flattened.
        threads: intra-operator threads.
        timeout_s: how long compiling, or one round, may take.
        min_block_us: as in ``EagerBaseline``.
        plugin: as in ``Worker``.
        lowering: the one whose mode of Inductor's is used.
    """

    def __init__(
        self,
        source: ModelSource | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        references: Sequence[torch.Tensor],
        *,
        threads: int,
        model: torch.nn.Module | None = None,
        timeout_s: float = 600.0,
        min_block_us: float = 0.0,
        plugin: Path | None = None,
        lowering: Lowering = Lowering.INDUCTOR,
    ) -> None:
        self.name = f"compiled_{threads}" if lowering is Lowering.INDUCTOR else f"{lowering}_{threads}"
        self._lowering = lowering
        self.max_abs_error: float | None = None
        self._source = source
        self._model = model
        self._args = tuple(args)
        self._kwargs = dict(kwargs or {})
        self._references = tuple(references)
        self._threads = threads
        self._min_block_us = min_block_us
        self._failure: Failure | None = None
        self._worker = Worker(_MODULE, timeout_s=timeout_s, plugin=plugin)

    def prepare(self) -> Failure | None:
        """Compile now rather than at the first round. Afterwards ``max_abs_error`` is known."""
        if self._failure is None and self.max_abs_error is None:
            answer = self._ask_compile()
            if self._source is not None and self._model is not None and _may_be_the_source(answer):
                self._source = None
                answer = self._ask_compile()
            if isinstance(answer, CompileAnswer):
                self.max_abs_error = answer.max_abs_error
            else:
                self._fail(answer)
        return self._failure

    def round_us(self) -> float | Failure:
        """As ``EagerBaseline.round_us``. Without a working compiler: ``Failure(unavailable)``."""
        if (failure := self.prepare()) is not None:
            return failure
        answer = self._single(RoundRequest(self._min_block_us), of_same=True)
        return answer.time_us if isinstance(answer, RoundAnswer) else self._fail(answer)

    def close(self) -> None:
        """End its process. May be called twice."""
        self._worker.close()

    def _ask_compile(self) -> Answer | Failure:
        try:
            source, args, kwargs = self._source, self._args, self._kwargs
            if source is None:
                source, args, kwargs = self._export()
            request = compile_request(self._worker, source, args, kwargs, self._references, threads=self._threads)
            request = msgspec.structs.replace(request, lowering=self._lowering.value, numerics=numerics_key("cpu"))
        except Exception as error:
            # The model itself is fine: it only cannot be brought to where it would be compiled.
            return Failure(FailureKind.UNAVAILABLE, f"the model cannot be handed to another process: {describe(error).detail}")
        return self._single(request)

    def _export(self) -> tuple[ModelSource, tuple[Any, ...], dict[str, Any]]:
        """The model written down, and its call as what was written takes it."""
        if self._model is None:
            raise UsageError("neither a source nor a model was given; expected one of them")
        exported, args, kwargs, *_ = exported_program(self._model, self._args, self._kwargs, for_compiler=True)
        leaves = _flattened(exported, args, kwargs)
        size_bytes = sum(tensor.nbytes for tensor in exported.state_dict.values())
        path = self._worker.folder_for(size_bytes) / "model.pt2"
        torch.export.save(exported, path)
        return ModelSource(str(path)), leaves, {}

    def _single(self, request: CompileRequest | RoundRequest, *, of_same: bool = False) -> Answer | Failure:
        try:
            answers: Iterator[Answer] = self._worker.ask(request, of_same=of_same)
            found = list(answers)
        except WorkerDied as death:
            remove_unfinished()
            return death.failure
        except DeviceError as error:
            return Failure(FailureKind.CRASH, str(error))
        return found[-1] if found else Failure(FailureKind.CRASH, "the compiling process gave no answer")

    def _fail(self, answer: Answer | Failure) -> Failure:
        if isinstance(answer, Failure):
            self._failure = answer
        else:
            self._failure = answer.failure if isinstance(answer, Broken) else Failure(FailureKind.CRASH, "an answer to another question")
        self._worker.close()
        return self._failure


def _flattened(exported: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Let ``exported`` take and return leaves, and return those of its call: another process may not know its containers."""
    leaves = tuple(pytree.tree_leaves((args, kwargs)))
    signature = exported.module_call_graph[0].signature
    if signature is not None:
        signature.in_spec = pytree.tree_structure((leaves, {}))
        signature.out_spec = pytree.tree_structure((0,) * signature.out_spec.num_leaves)
        signature.forward_arg_names = None
        exported.example_inputs = (leaves, {})
    return leaves


def _may_be_the_source(answer: Answer | Failure) -> bool:
    """Whether another copy of the model might still do: no compiler, or no time left, is the same for all."""
    failure = answer.failure if isinstance(answer, Broken) else answer
    return isinstance(failure, Failure) and failure.kind not in (FailureKind.UNAVAILABLE, FailureKind.TIMEOUT)


def compile_request(
    worker: Worker,
    source: ModelSource,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    references: Sequence[torch.Tensor],
    *,
    threads: int,
) -> CompileRequest:
    """The question of a model and one call of it, its tensors written to the worker's folder.

    Raises:
        UsageError: if an argument is neither a tensor nor a plain value.
    """
    tensors, leaves, tree = _describe_call(args, kwargs or {})
    answers = {str(place): tensor.detach().cpu() for place, tensor in enumerate(references)}
    return CompileRequest(
        source=source.place,
        options=source.options,
        tree=tree,
        leaves=leaves,
        tensors_file=str(worker.write_tensors("call.safetensors", {name: tensor.detach().cpu() for name, tensor in tensors.items()})),
        references_file=str(worker.write_tensors("references.safetensors", answers)),
        threads=threads,
    )


def _describe_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], tuple[Argument, ...], str]:
    leaves, tree = describe_tree((tuple(args), dict(kwargs)))
    tensors: dict[str, torch.Tensor] = {}
    described: list[Argument] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            described.append(Ref(len(tensors)))
            tensors[str(len(tensors))] = leaf
        elif isinstance(leaf, float) and not math.isfinite(leaf):
            described.append(NonFinite("nan" if math.isnan(leaf) else "inf" if leaf > 0 else "-inf"))
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            described.append(leaf)
        else:
            raise UsageError(f"an argument is a {type(leaf).__name__}; expected tensors and plain values")
    return tensors, tuple(described), tree
