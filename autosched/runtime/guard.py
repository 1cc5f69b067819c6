"""What stands between a caller and a schedule: every call is checked, and where a check fails the model runs as it came."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from autosched.core.errors import AutoschedError, InputMismatch
from autosched.core.program import Program
from autosched.runtime.trees import as_captured, flatten_inputs, unflatten_outputs
from autosched.runtime.weights import Change, ModelWatch

# A server that sees every shape there is must not keep a list of them all.
_MAX_REASONS = 1000

Runner = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


class FallbackWarning(UserWarning):
    """The model ran as it came, without its schedule; the message says why. Given once for each reason and loaded model."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a loaded model does.

    Args:
        scheduled: whether calls run the schedule (those that pass the guard).
        reason: why not, if not.
        schedule: name of the strategy that made the schedule, empty if none was read.
        operators, lanes: size of the schedule.
        verdict: ``exact``, ``degraded`` or ``incompatible``; empty if no bundle could be read.
        differences: one line for each field in which the bundle and this host or model differ.
        max_abs_error: largest difference from the model in the comparison at load.
        calls: calls that ran the schedule.
        stepped_aside: ``(reason, calls)`` for calls that ran the model as it came.
    """

    scheduled: bool
    reason: str
    schedule: str = ""
    operators: int = 0
    lanes: int = 0
    verdict: str = ""
    differences: tuple[str, ...] = ()
    max_abs_error: float = 0.0
    calls: int = 0
    stepped_aside: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True)
class Prepared:
    """A schedule that was verified against its model and may run.

    Args:
        program: what it computes.
        runner: runs it on tensors in the order of ``program.graph.inputs``; called by one thread at a time.
        device: where inputs must be.
        watch: notices changes of the model.
        rebind: makes a new runner and watch from the model as it is now; raises an ``AutoschedError`` on any doubt.
            Its argument says whether to compare with the model again.
        offsets_matter: whether an operator addresses memory from the start of a storage.
    """

    program: Program
    runner: Runner
    device: torch.device
    watch: ModelWatch
    rebind: Callable[[bool], tuple[Runner, ModelWatch]]
    offsets_matter: bool


class LoadedModel:
    """A model and its schedule, called like the model.

    Calls may come from any thread; they take turns. Outputs belong to the caller: the next call does not touch them. They carry no
    gradient history: where an input requires gradients, and in training mode, the model runs as it came.

    Args:
        model: what the schedule was made from.
        prepared: the schedule, or ``None`` to run the model as it came for good.
        report: what :meth:`report` starts from.
        strict: raise where the model would otherwise run as it came.
    """

    def __init__(self, model: torch.nn.Module, prepared: Prepared | None, report: LoadReport, *, strict: bool) -> None:
        self.model = model
        self._prepared = prepared
        self._report = report
        self._strict = strict
        self._signature = inspect.signature(model.forward)
        self._lock = threading.Lock()
        self._calls = 0
        self._aside: dict[str, int] = {}
        self._warned: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the schedule on inputs like those it was made for, the model as it came on all others.

        Raises:
            InputMismatch: with ``strict``, if the inputs are not those the schedule was made for.
            AutoschedError: with ``strict``, if the schedule may not run for another reason.
        """
        prepared = self._prepared
        if prepared is None:
            return self.model(*args, **kwargs)
        if reason := foreign_mode(prepared.device):
            return self._step_aside("mode", reason, args, kwargs)
        try:
            tensors = self._flattened(prepared.program, args, kwargs)
            _require_fit(tensors, prepared.device)
        except InputMismatch as error:
            return self._step_aside("inputs", str(error), args, kwargs, error)
        outcome = self._run(prepared, _laid_out(prepared, tensors))
        if isinstance(outcome, str):
            return self._step_aside("model", outcome, args, kwargs)
        if isinstance(outcome, Exception):
            return self._after_failure(outcome, args, kwargs)
        if not torch.is_inference_mode_enabled():
            outcome = [_normal(tensor) for tensor in outcome]
        return unflatten_outputs(prepared.program, outcome)

    def _flattened(self, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        try:
            return flatten_inputs(program, args, kwargs)
        except InputMismatch:
            # By keyword what was captured by position, or the other way round, is the same call.
            rearranged = as_captured(program, self._signature, args, kwargs)
            if rearranged is None:
                raise
            return flatten_inputs(program, *rearranged)

    def _run(self, prepared: Prepared, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | Exception | str:
        """Outputs, or what an operator raised, or why the schedule may not run."""
        with self._lock:
            if reason := self._follow_model(prepared):
                return reason
            try:
                with torch.no_grad():
                    outputs = prepared.runner(tensors)
            except Exception as error:
                return error
            self._calls += 1
            return outputs

    def __repr__(self) -> str:
        report = self.report()
        name = type(self.model).__name__
        if not report.scheduled:
            return f"<autosched: {name} as it came ({report.reason})>"
        return f"<autosched: {name} on schedule {report.schedule!r}, {report.operators} operators on {report.lanes} lanes>"

    def report(self) -> LoadReport:
        """Which schedule runs, or why the model runs as it came, and how often each happened."""
        base = self._report
        return LoadReport(
            scheduled=self._prepared is not None,
            reason=base.reason,
            schedule=base.schedule,
            operators=base.operators,
            lanes=base.lanes,
            verdict=base.verdict,
            differences=base.differences,
            max_abs_error=base.max_abs_error,
            calls=self._calls,
            stepped_aside=tuple(self._aside.items()),
        )

    def refresh(self) -> None:
        """Read all parameters again. Needed only after a change through ``parameter.data``, which PyTorch does not count.

        Raises:
            AutoschedError: with ``strict``, if the schedule no longer fits the model.
        """
        with self._lock:
            reason = self._rebind(self._prepared, verify=True) if self._prepared is not None else ""
        if reason:
            self._warn("model", reason)

    def _follow_model(self, prepared: Prepared) -> str:
        """Keep up with changes of the model; why the schedule may not run, or nothing."""
        change = prepared.watch.change()
        if change is Change.NONE:
            return ""
        if change is Change.MODE:
            return "a module of the model is in another mode (train or eval) than at load; call model.eval() to use the schedule"
        if change is Change.HOOKS:
            return "forward hooks were added to or removed from the model after load, and a schedule does not call them"
        if change is Change.CONTENT and not prepared.program.prologue:
            # Read where they are at every call, and nothing was computed from them ahead of time.
            prepared.watch.accept()
            return ""
        return self._rebind(prepared, verify=change is Change.STRUCTURE)

    def _rebind(self, prepared: Prepared, *, verify: bool) -> str:
        try:
            prepared.runner, prepared.watch = prepared.rebind(verify)
        except Exception as error:
            reason = f"the model was changed and its schedule no longer fits: {error}"
            self._retire(reason)
            if self._strict and isinstance(error, AutoschedError):
                raise
            return reason
        return ""

    def _after_failure(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A bad index in an input, say, fails in the model too, and then that is the answer.
        result = self.model(*args, **kwargs)
        reason = f"an operator failed where the model did not ({type(error).__name__}: {error})"
        self._retire(reason)
        if self._strict:
            raise AutoschedError(f"the schedule may not run: {reason}") from error
        self._warn("failure", reason)
        return result

    def _retire(self, reason: str) -> None:
        self._prepared = None
        base = self._report
        self._report = LoadReport(
            False, reason, base.schedule, base.operators, base.lanes, base.verdict, base.differences, base.max_abs_error
        )

    def _step_aside(
        self, kind: str, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: AutoschedError | None = None
    ) -> Any:
        if self._strict:
            raise error or AutoschedError(f"the schedule may not run: {reason}")
        self._warn(kind, reason)
        return self.model(*args, **kwargs)

    def _warn(self, kind: str, reason: str) -> None:
        if reason in self._aside or len(self._aside) < _MAX_REASONS:
            self._aside[reason] = self._aside.get(reason, 0) + 1
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"autosched runs {type(self.model).__name__} as it came: {reason}", FallbackWarning, stacklevel=4)


def foreign_mode(device: torch.device) -> str:
    """Why this thread's modes forbid running operators on other threads or from a recording, or nothing."""
    # Not is_compiling(), which is true in every thread while any of them compiles; export and make_fx show as fake inputs or modes.
    if torch.compiler.is_dynamo_compiling() or torch._C._get_tracing_state() is not None:
        return "the call is being traced or compiled"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on, which the schedule was not made for"
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return "a dispatch mode or function transform is active, which lanes would not see"
    return ""


def _require_fit(tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    gradients = torch.is_grad_enabled()
    for position, tensor in enumerate(tensors):
        kind = type(tensor)
        if kind is not torch.Tensor and kind is not torch.nn.Parameter:
            raise InputMismatch(f"input {position} is a {kind.__name__}; the schedule was made for plain tensors.")
        if gradients and tensor.requires_grad:
            raise InputMismatch(f"input {position} requires gradients, and a schedule computes none. Call under torch.no_grad().")
        if tensor.device != device:
            raise InputMismatch(f"input {position} is on {tensor.device}; the schedule was made for {device}.")
        if tensor.layout is not torch.strided:
            raise InputMismatch(f"input {position} is {tensor.layout}; the schedule was made for strided tensors.")


def _laid_out(prepared: Prepared, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs with the strides of tuning: an operator that asks for memory by stride would else read something different."""
    values = prepared.program.graph.values
    for position, (index, tensor) in enumerate(zip(prepared.program.graph.inputs, tensors, strict=True)):
        strides = values[index].spec.strides
        if tensor.stride() != strides or tensor.is_conj() or tensor.is_neg() or (prepared.offsets_matter and tensor.storage_offset()):
            with torch.no_grad():
                tensors[position] = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensors


def _normal(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that may be changed and used anywhere: one made in inference mode may not."""
    if not tensor.is_inference():
        return tensor
    try:
        # By capsule: several times cheaper than the protocol's handshake, which is for strangers.
        return from_dlpack(torch._C._to_dlpack(tensor))
    except (RuntimeError, BufferError, TypeError):
        return tensor.clone()
