"""One shape that a loaded model has a schedule for: made ready once, run by one thread at a time, and given up where it no longer fits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autosched.core.errors import AutoschedError, HalfWritten, IncompatibleArtifact, InTheMidst
from autosched.core.extents import Extents, extent_of
from autosched.core.frames import empty_frames
from autosched.core.from_outside import let_through
from autosched.core.program import Program, Ref
from autosched.runtime.call_form import answer_maker
from autosched.runtime.no_memory import MOST_SHORT, lacks_memory, left_alone
from autosched.runtime.prepared import OPERATOR_ERRORS, ChangedMeanwhile, InAnotherMode, NoLongerFits, Prepared
from autosched.runtime.shapes import describe_shape
from autosched.runtime.state import holders_of
from autosched.runtime.trees import objects_given, returns_given

# A server that puts new weights in place under traffic is done after a few calls; a model that changes itself at each call never is.
_MOST_UNSETTLED = 100


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a call may not run on a schedule. ``kind`` groups reasons that warn once together."""

    kind: str
    reason: str
    error: Exception | None = None

    def __post_init__(self) -> None:
        # The model is run next, and has no room beside what was made of a schedule.
        if self.error is not None:
            empty_frames(self.error)


class Slot:
    """One shape: its program, and its schedule once that is ready.

    Args:
        program: what it was captured as.
        prepare: binds and verifies the schedule; raises what says why it may not run.
    """

    def __init__(self, program: Program, prepare: Callable[[], Prepared]) -> None:
        self.program = program
        self.label = describe_shape(program)
        self.prepared: Prepared | None = None
        self.refused = ""
        self.calls = 0
        self.max_abs_error = 0.0
        self.answer = answer_maker(program)
        self.returns_given = returns_given(program)
        self.order = reading_order(program)
        values = program.graph.values
        self.strides = [values[index].spec.strides for index in program.given]
        targets = {item.target for item in program.writes}
        self.changed = frozenset(place for place, value in enumerate(program.given) if value in targets)
        self._by_stride = read_by_stride(program)
        self._prepare = prepare
        self._lock = threading.Lock()
        self._of_parent: Prepared | None = None
        self.given_up = False  # until refresh(): for what the model was, which it may cease to be, or for want of memory
        self._unsettled = 0  # comparisons in a row during which the model was changed
        self._short = 0  # attempts, since the last call that went well, for which there was no memory
        self._left_alone = 0  # calls to come that are left to the model before it is made ready again
        self._shortage = ""

    def objects_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[int, Any]:
        """What of the call is to come back itself, where there may be anything (``returns_given``).

        Raises:
            InputMismatch: as ``trees.objects_given``.
        """
        return objects_given(self.program, args, kwargs)

    def why_no_copy(self, position: int, tensors: Sequence[torch.Tensor], model: torch.nn.Module) -> str:
        """Why a copy, laid out as in tuning, is not to ``model`` what it has at ``position`` of ``tensors``; empty if it is."""
        tensor = tensors[position]
        if position in self.changed:
            return "is changed in place"
        if self.program.writes and self._memory_changed(tensors, model).meets(extent_of(tensor)):
            return "shares memory with what is changed in place"
        from_start = self._by_stride.get(position)
        other = tensor.stride() != self.strides[position] or (from_start and tensor.storage_offset())
        return "is read by as_strided" if from_start is not None and other else ""

    def _memory_changed(self, tensors: Sequence[torch.Tensor], model: torch.nn.Module) -> Extents:
        """Where a call may write. What it only replaces is counted, too: which that is, nobody knows before the schedule is ready."""
        try:
            state = [holder.now() for holder in holders_of(self.program, model)]
        except IncompatibleArtifact:
            # Nothing will run on it, and whoever finds that says why.
            state = []
        return Extents(extent_of(tensor) for tensor in (*(tensors[place] for place in self.changed), *state))

    @property
    def left_to_the_model(self) -> bool:
        """Whether the model runs the next call in any case, so that nothing is made ready for it."""
        return self.prepared is None and (bool(self.refused) or self._left_alone > 0)

    def ready(self) -> Prepared:
        """The schedule, made ready if it is not; whatever ``prepare`` raises. Under the slot's lock."""
        if self.prepared is None:
            self.prepared = self._prepare()
            self.max_abs_error = self.prepared.max_abs_error
        return self.prepared

    def warm(self) -> None:
        """Make it ready now; whatever ``prepare`` raises."""
        with self._lock:
            self.ready()

    def run(
        self, tensors: Sequence[torch.Tensor], barred: Callable[[Prepared], str] | None = None
    ) -> list[torch.Tensor] | Exception | Refused:
        """Outputs, or what an operator raised, or why the schedule may not run.

        Args:
            barred: asked after a run why its outputs are not those of the call, with the model as it then was; empty if they are.
        """
        with self._lock:
            prepared = self.prepared
            try:
                if prepared is None:
                    if self.left_to_the_model:
                        return self._left()
                    prepared = self.ready()
                outcome = prepared.run(tensors)
                self._unsettled = 0
            except HalfWritten:
                raise
            except (NoLongerFits, *OPERATOR_ERRORS) as error:
                return self._may_not_run(error)
            if isinstance(outcome, str):
                return Refused("model", outcome)
            if not isinstance(outcome, Exception):
                if barred is not None and (reason := barred(prepared)):
                    return Refused("padding", reason)
                self.calls += 1
                self._short = 0
            return outcome

    def says(self, asked: Callable[[Prepared], bool]) -> bool | Refused:
        """What ``asked`` says of the schedule, with the model as it is now; or why the schedule may not run, as :meth:`run`."""
        with self._lock:
            try:
                if self.left_to_the_model:
                    return self._left()
                if reason := self.ready().follow():
                    return Refused("model", reason)
                return asked(self.ready())
            except (NoLongerFits, *OPERATOR_ERRORS) as error:
                return self._may_not_run(error)

    def refresh(self) -> Refused | None:
        """Read all parameters again, if the schedule is ready; try it once more, if it was given up for a change or for want of memory.

        Why it may not run any more, or nothing.

        Raises:
            InTheMidst: if nothing could be compared.
        """
        with self._lock:
            self._left_alone = 0
            try:
                if self.prepared is not None:
                    self.prepared.refresh()
                elif self.given_up:
                    self.ready()
                    self.refused, self.given_up, self._short = "", False, 0
            except InTheMidst:
                raise
            except ChangedMeanwhile:
                return None
            except InAnotherMode as error:
                # All is read when it is made ready again, at the first call in eval mode.
                self.prepared, self.refused, self.given_up = None, "", False
                return Refused("model", str(error), error)
            except NoLongerFits as error:
                return self._no_longer_fits(error)
            except AutoschedError as error:
                reason = f"the model was changed and its schedule no longer fits: {error}"
                return self._lacked(str(error), error) if lacks_memory(error) else self._retire("model", reason, error)
            return None

    def fail(self, reason: str, error: Exception) -> None:
        """An operator failed where the model did not: never run the schedule again, unless it lacked memory, as it may for a moment."""
        with self._lock:
            if not lacks_memory(error):
                self._retire("failure", reason, None)
                return
            self._short += 1
            if self._short > MOST_SHORT:
                self._retire("memory", reason, None)

    def after_fork(self, *, usable: bool) -> None:
        """Forget the calls of the parent's other threads; where not ``usable``, its schedule as well, which must not be given back here."""
        self._lock = threading.Lock()
        if not usable:
            # It may have been forgotten before: by the process that forked this one, which was forked itself.
            self._of_parent, self.prepared, self.given_up = self.prepared or self._of_parent, None, False
            self.refused = "it was loaded before this process was forked, and CUDA does not outlive a fork; load in each process"

    def _left(self) -> Refused:
        """Why the model runs a call that is left to it."""
        if self.refused:
            return Refused("retired", self.refused)
        self._left_alone -= 1
        return Refused("memory", self._shortage)

    def _may_not_run(self, error: Exception) -> Refused:
        """What becomes of a schedule that could not be made ready, or could not follow its model."""
        if isinstance(error, NoLongerFits):
            return self._no_longer_fits(error)
        if isinstance(error, ChangedMeanwhile):
            self._unsettled += 1
            return self._retire("model", str(error), error) if self._unsettled > _MOST_UNSETTLED else Refused("model", str(error), error)
        if isinstance(error, InAnotherMode | InTheMidst):
            return Refused("model", str(error), error)
        let_through(error)
        what = str(error) if isinstance(error, AutoschedError) else f"{type(error).__name__}: {error}"
        reason = f"the schedule for {self.label} is not used: {what}"
        return self._lacked(reason, error) if lacks_memory(error) else self._retire("prepare", reason, error)

    def _no_longer_fits(self, error: NoLongerFits) -> Refused:
        # The older schedule goes even so: whoever makes it ready again needs the memory, and it computes what the model was.
        if lacks_memory(error):
            reason = f"the model was changed, and there is no memory to make its schedule anew: {error.__cause__}"
            return self._lacked(reason, error.__cause__)
        return self._retire("model", str(error), error.__cause__)

    def _lacked(self, reason: str, error: BaseException | None) -> Refused:
        """There was no memory to make it ready: once more at a later call, unless it was so too often."""
        self._short += 1
        if self._short > MOST_SHORT:
            return self._retire("memory", reason, error)
        self.prepared, self.refused, self.given_up = None, "", False
        self._left_alone, self._shortage = left_alone(self._short), reason
        return Refused("memory", reason, error if isinstance(error, Exception) else None)

    def _retire(self, kind: str, reason: str, error: BaseException | None) -> Refused:
        self.refused = reason
        self.prepared = None
        self.given_up = kind != "failure"
        return Refused(kind, reason, error if isinstance(error, Exception) else None)


def reading_order(program: Program) -> list[int]:
    """Place among the call's leaves of each input that the caller gives."""
    place = {leaf.value: index for index, leaf in enumerate(program.input_leaves) if isinstance(leaf, Ref)}
    return [place[value] for value in program.given]


def read_by_stride(program: Program) -> dict[int, bool]:
    """Inputs whose memory the model itself reads by strides of its own, and whether from an offset of its own: a copy has other memory."""
    values = program.graph.values
    found: dict[int, bool] = {}
    for call in (call for operator in program.graph.operators for call in operator.calls if call.target == "aten::as_strided.default"):
        source = next(iter(call.args), None)
        offset = (*call.args[3:], *(item for name, item in call.kwargs if name == "storage_offset"))
        if isinstance(source, Ref) and (owner := values[source.value].storage) in program.given:
            place = program.given.index(owner)
            found[place] = found.get(place, False) or any(item is not None for item in offset)
    return found
