"""What stands between a caller and a schedule: every call is checked, and where a check fails the model runs as it came."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch

from autosched.core.callers import warn_caller
from autosched.core.errors import AutoschedError, InputMismatch, InTheMidst, UsageError
from autosched.core.forks import RenewedLock
from autosched.core.specs import TENSOR_TYPES, only_adds_to_tensors
from autosched.core.standing_aside import all_aside, asking, hooks_around, schedule_within
from autosched.runtime.foreign_modes import foreign_mode
from autosched.runtime.load_report import LoadReport, shape_report, shared_bytes
from autosched.runtime.shape_table import ShapeTable
from autosched.runtime.slot import Refused, Slot
from autosched.runtime.state import turn_of
from autosched.runtime.write_back import normal

# A server that sees every shape there is must not keep a list of them all.
_MAX_REASONS = 1000
_MORE_REASONS = f"reasons beyond the first {_MAX_REASONS:,}"

# In the model's place it is asked what a function is asked: torch.export wants to know where the code is. Not what it wraps, for some
# libraries would call that instead.
_OF_A_FUNCTION = ("__name__", "__qualname__", "__doc__", "__code__", "__globals__", "__annotations__", "__defaults__", "__kwdefaults__")

_HOOKED = (
    "the model has forward hooks, which its own call runs around the schedule in its place; those that were captured with it would run "
    "twice. Remove them and load again, or call what load() returned without putting it in the model's place"
)


class FallbackWarning(UserWarning):
    """The model ran as it came, without its schedule; the message says why. Given once for each kind of reason and loaded model."""


class _Running(threading.local):
    """Whether this thread is in a call."""

    inside = False


class LoadedModel:
    """A model and its schedules, called like the model. ``model.forward = loaded`` puts it in the model's place, hooks and all.

    Calls may come from any thread; those of one shape take turns. Outputs belong to the caller: the next call does not touch them. They
    carry no gradient history: where an input requires gradients, and in training mode, the model runs as it came.

    Args:
        model: what the schedules were made from.
        table: the schedules by shape, or ``None`` to run the model as it came for good.
        report: what :meth:`report` starts from.
        strict: raise where the model would otherwise run as it came.
        short: whether there is no table because there was no memory for one.
    """

    def __init__(self, model: torch.nn.Module, table: ShapeTable | None, report: LoadReport, *, strict: bool, short: bool = False) -> None:
        self.model = model
        self.short = short
        self._table = table
        self._report = report
        self._strict = strict
        # A newer file takes the place of an older one, and nothing of that is kept, unless a library has put a function around it.
        self._forward: Callable[..., Any] = model.forward._forward if isinstance(model.forward, LoadedModel) else model.forward
        older = schedule_within(self._forward)
        self._older_aside: Callable[[], Any] = nullcontext if older is None else older.standing_aside
        self._turn = turn_of(model) if table is not None and any(slot.program.state for slot in table.slots) else None
        self._hooks = hooks_around(model)
        self._signature = inspect.signature(model.forward)
        # In the model's place it is asked what it takes: generate() of transformers gives a model no positions if that has no such name.
        self.__signature__ = self._signature
        # Hooks of accelerate put a partial there, which has no code of its own.
        for function in (getattr(self._forward, "func", None), self._forward):
            vars(self).update({name: getattr(function, name) for name in _OF_A_FUNCTION if function and hasattr(function, name)})
        self._running = _Running()
        self._refresh_due = False
        self._notes = RenewedLock()
        self._aside: dict[str, int] = {}
        self._warned: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the schedule for inputs like these; the model as it came if there is none.

        Raises:
            InputMismatch: with ``strict``, if there is no schedule for such inputs.
            AutoschedError: with ``strict``, if the schedule may not run for another reason.
            HalfWritten: if the schedule failed when it had changed part of the model's state, which is then the caller's to reset.
        """
        running = self._running
        if running.inside:
            # The model itself is running, and its forward is this: ``model.forward = load(path, model)``.
            return self._forward(*args, **kwargs)
        if self._refresh_due and not asking.yes():
            self.refresh()
        gradients = torch.is_grad_enabled()
        running.inside = True
        try:
            if asking.yes():
                return self._as_it_came(args, kwargs)
            table = self._table
            if table is None:
                self._count(self._report.reason)
                return self._as_it_came(args, kwargs)
            if reason := foreign_mode(table.kind):
                return self._step_aside("mode", reason, args, kwargs)
            own, own_before, of_all, of_all_before = self._hooks
            if (own or own_before or of_all or of_all_before) and self._in_place:
                return self._step_aside("hooks", _HOOKED, args, kwargs)
            try:
                found = table.find(self._signature, args, kwargs)
                slot, tensors = found.slot, found.tensors
                if not found.checked:
                    _fit(slot, tensors, table.device, self.model)
                    found.learn()
            except InputMismatch as error:
                return self._step_aside("inputs", str(error), args, kwargs, error)
            outcome = table.run(found)
            if not isinstance(outcome, list):
                return self._answer_otherwise(slot, outcome, args, kwargs)
            if not torch.is_inference_mode_enabled():
                outcome = [normal(tensor) for tensor in outcome]
            return slot.answer(outcome, found.given)
        except BaseException:
            # Of a signal's handler, perhaps, in the middle of ``torch.no_grad``, which then does not put back what it found.
            torch._C._set_grad_enabled(gradients)
            raise
        finally:
            running.inside = False

    def __reduce__(self) -> Any:
        """Neither pickled nor copied: threads, recordings and memory addresses belong to one process and one model.

        A model in whose place it is can be: libraries copy models (averages of weights, conversions) and send them to processes. The copy
        is the model as it came, and a warning says so.

        Raises:
            UsageError: if it is in no model's place, or with ``strict``.
        """
        if self._in_place and not self._strict:
            name = type(self.model).__name__
            reason = "the schedule is bound to this process and this very model; load the file for the copy, too"
            warn_caller(f"autosched leaves a copy of {name} without a schedule: {reason}", FallbackWarning)
            # Of the copy, which has no forward of its own yet.
            return getattr, (self.model, "forward")
        raise UsageError(
            f"a loaded {type(self.model).__name__} cannot be pickled or copied, for its schedule is bound to this process and this very "
            "model; copy the model (without it: 'del model.forward', if it is in the model's place), and load the file for the copy."
        )

    def __repr__(self) -> str:
        report = self.report()
        name = type(self.model).__name__
        if not report.scheduled:
            return f"<autosched: {name} without a schedule ({report.reason})>"
        shapes = f", {len(report.shapes)} shapes ({report.ready} ready)" if len(report.shapes) > 1 else ""
        return f"<autosched: {name} on schedule {report.schedule!r}, {report.operators} operators on {report.lanes} lanes{shapes}>"

    def __getattr__(self, name: str) -> NoReturn:
        # Only for what is not there. Handing it on would be a trap: model.to() and model.half() return the model, without its schedules.
        raise AttributeError(
            f"a loaded model is a callable and has no attribute {name!r}; the module it was made from is its attribute 'model'"
        )

    @contextmanager
    def standing_aside(self) -> Iterator[None]:
        """Calls of this thread run the model as it came, and are not counted."""
        before = self._running.inside
        self._running.inside = True
        try:
            with self._older_aside():
                yield
        finally:
            self._running.inside = before

    def report(self) -> LoadReport:
        """Which schedules run, or why the model runs as it came, how often each happened, and what memory they take."""
        table, base = self._table, self._report
        if table is None:
            return dataclasses.replace(base, stepped_aside=self._stepped_aside())
        # Another thread may evict one between two looks.
        prepared = [slot.prepared for slot in table.slots]
        shapes = tuple(map(shape_report, table.slots, prepared))
        left = [slot for slot in table.slots if not slot.refused]
        return dataclasses.replace(
            base,
            scheduled=bool(left),
            reason="" if left else table.slots[0].refused,
            max_abs_error=max(shape.max_abs_error for shape in shapes),
            calls=sum(shape.calls for shape in shapes),
            stepped_aside=self._stepped_aside(),
            shapes=shapes,
            padding="off" if table.padding is None else table.padding.refused or "on",
            evictions=table.evictions,
            notes=(*base.notes, *dict.fromkeys(each.without for each in prepared if each is not None and each.without)),
            shared_bytes=shared_bytes([each.packed_bytes for each in prepared if each is not None]),
        )

    def refresh(self) -> None:
        """Read all parameters again and compare with the model. Needed only after changes that nothing counts; ``load`` lists them.

        A schedule that was given up because the model was changed into another one is used again, if the model now is what it was.
        Within a call of the same thread (by a signal's handler, a finalizer), it is put off until the next call begins; on a GPU, also
        within one of another model's.

        Raises:
            AutoschedError: with ``strict``, if a schedule no longer fits the model, or the model is in training mode.
        """
        table, running = self._table, self._running
        if table is None:
            return
        if running.inside or asking.serves:
            # That call, or the one that waits for this thread, has what this would wait for.
            self._refresh_due = True
            return
        running.inside = True
        try:
            self._refresh_due = False
            # In the model's place this would else be asked for the answer that it is compared with, and wait for itself.
            with all_aside():
                # All of them, before any is told of: none may go on with what it read before.
                found = [table.refresh(slot) for slot in table.slots]
        except InTheMidst:
            # Of another model's call, which has the device until it ends.
            self._refresh_due = True
            return
        except BaseException:
            self._refresh_due = True
            raise
        finally:
            running.inside = False
        for refused in found:
            if refused is not None:
                if self._strict:
                    raise _error_of(refused)
                self._warn(refused.kind, refused.reason)

    def _answer_otherwise(self, slot: Slot, outcome: Exception | Refused, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(outcome, Exception):
            return self._after_failure(slot, outcome, args, kwargs)
        if outcome.kind == "retired" and not self._strict:
            # It was said when it was retired.
            self._count(outcome.reason)
            return self._as_it_came(args, kwargs)
        return self._step_aside(outcome.kind, outcome.reason, args, kwargs, _error_of(outcome))

    def _after_failure(self, slot: Slot, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A bad index in an input, say, fails in the model too, and then that is the answer.
        result = self._as_it_came(args, kwargs)
        reason = f"an operator failed where the model did not ({type(error).__name__}: {error})"
        slot.fail(reason, error)
        if self._strict:
            raise AutoschedError(f"the schedule may not run: {reason}") from error
        self._count(reason)
        self._warn("failure", reason)
        return result

    def _as_it_came(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        there = self._there
        # In the model's place, the model's own call is on its way already, and runs its hooks.
        run = self._forward if there is self else self.model
        if self._turn is None or asking.serves:
            with self._older_aside():
                return run(*args, **kwargs)
        # A newer one in the model's place would have this thread, which has the turn, wait for one that waits for the turn.
        newer = nullcontext() if there is None or there is self else there.standing_aside()
        # Whoever compares a schedule with the model has other numbers in its state meanwhile.
        with self._turn.lock, newer, self._older_aside():
            return run(*args, **kwargs)

    @property
    def _there(self) -> LoadedModel | None:
        """The schedule in the model's place. Libraries, and record_calls, put a function around what is there."""
        found: LoadedModel | None = schedule_within(self.model.__dict__.get("forward"))
        return found

    @property
    def _in_place(self) -> bool:
        return self._there is self

    def _step_aside(
        self, kind: str, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: AutoschedError | None = None
    ) -> Any:
        if self._strict:
            raise error or AutoschedError(f"the schedule may not run: {reason}")
        self._count(reason)
        self._warn(kind, reason)
        return self._as_it_came(args, kwargs)

    def _stepped_aside(self) -> tuple[tuple[str, int], ...]:
        # Of a copy, which is made at once: another thread may count meanwhile, and pairs are made one by one.
        return tuple(self._aside.copy().items())

    def _count(self, reason: str) -> None:
        with self._notes.lock:
            listed = reason in self._aside or len(self._aside) < _MAX_REASONS
            name = reason if listed else _MORE_REASONS
            self._aside[name] = self._aside.get(name, 0) + 1

    def _warn(self, kind: str, reason: str) -> None:
        with self._notes.lock:
            first = kind not in self._warned
            self._warned.add(kind)
        if first:
            warn_caller(f"autosched runs {type(self.model).__name__} without a schedule: {reason}", FallbackWarning)


def _error_of(refused: Refused) -> AutoschedError:
    if isinstance(refused.error, AutoschedError):
        return refused.error
    return AutoschedError(f"the schedule may not run: {refused.reason}")


def _fit(slot: Slot, tensors: list[torch.Tensor], device: torch.device, model: torch.nn.Module) -> None:
    """Check what the shape does not say, and lay inputs out with the strides of tuning.

    An operator that asks for memory by stride would else read something different.

    Raises:
        InputMismatch: if an input is no plain tensor of this device, or needs gradients.
    """
    gradients = torch.is_grad_enabled()
    prepared = slot.prepared
    # Before the schedule is ready nobody knows; a copy does no harm.
    offsets_matter = prepared is None or prepared.offsets_matter
    for position, (tensor, strides) in enumerate(zip(tensors, slot.strides, strict=True)):
        kind = type(tensor)
        if kind not in TENSOR_TYPES:
            advice = " Give x.as_subclass(torch.Tensor)." if only_adds_to_tensors(tensor) else ""
            raise InputMismatch(f"input {position} is a {kind.__name__}; the schedule was made for plain tensors.{advice}")
        if gradients and tensor.requires_grad:
            raise InputMismatch(f"input {position} requires gradients, and a schedule computes none. Call under torch.no_grad().")
        if tensor.device != device:
            raise InputMismatch(f"input {position} is on {tensor.device}; the schedule was made for {device}.")
        if tensor.layout is not torch.strided:
            raise InputMismatch(f"input {position} is {tensor.layout}; the schedule was made for strided tensors.")
        if tensor.stride() != strides or tensor.is_conj() or tensor.is_neg() or (offsets_matter and tensor.storage_offset()):
            if why := slot.why_no_copy(position, tensors, model):
                raise InputMismatch(f"input {position} {why} and its memory layout differs from tuning. Give x.contiguous().")
            # No history: what requires gradients does not come here where they are on.
            tensors[position] = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
