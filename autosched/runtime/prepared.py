"""A verified schedule that may run, and how it keeps up with its model between calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autosched.core.errors import AutoschedError, HalfWritten, InTheMidst, TooFewCores
from autosched.core.frames import empty_frames
from autosched.core.from_outside import let_through
from autosched.core.program import Program
from autosched.runtime.kernels import Begun
from autosched.runtime.unrest import Unrest
from autosched.runtime.weights import Change, ModelWatch, in_its_code
from autosched.runtime.write_back import WriteBacks

Runner = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]

_MODE = "a module of the model is in another mode (train or eval) than at load; call model.eval() to use the schedule"
_HOOKS = (
    "forward hooks were added to or removed from the model after load, and a schedule does not call them. Undo that, or call refresh() on "
    "the loaded model: if the outputs are still the same, the schedule runs again, without these hooks"
)

_ELSEWHERE = (
    "the model's weights are on {there} now, and its schedule was loaded where they were, on {here}: move the model back, or load the file "
    "again where it is"
)

_UNREST = (
    "the model was changed before each of its last calls ({what}), and to bind its schedule again takes longer than a call; it is tried "
    "again after some calls. Keep outside of the model what changes from call to call"
)

# What operators raise. Anything else comes from outside, such as the exception of a signal's handler that limits the time of a request,
# and is the caller's, not a reason to run the model as well.
OPERATOR_ERRORS = (
    RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError, AssertionError, AttributeError, AutoschedError,
)  # fmt: skip


class NoLongerFits(Exception):
    """The model was changed into one that its schedule does not compute; the cause says how."""


class InAnotherMode(AutoschedError):
    """A module of the model is in training mode: a comparison would run it, and a batch norm would count inputs that are made up."""

    def __init__(self) -> None:
        super().__init__(_MODE)


class ChangedMeanwhile(AutoschedError):
    """The model was changed, by another thread, while it was compared with its schedule: the next comparison may well find them alike."""


@dataclass(frozen=True, slots=True)
class Overwriting:
    """Of a runner that changes memory of the model's or the caller's while it runs.

    Args:
        begun: whether its last run has begun to.
        otherwise: makes a runner of the same schedule that changes nothing.
    """

    begun: Begun
    otherwise: Callable[[], Runner]


@dataclass(frozen=True, slots=True)
class Bound:
    """A schedule bound to the model as it is now.

    Args:
        runner: runs it on tensors in the order of ``program.graph.inputs``; called by one thread at a time.
        watch: notices changes of the model.
        intermediate_bytes: most intermediates alive at once.
        packed_bytes: of weights packed or folded, by their memory: other schedules may use the same.
        max_abs_error: largest difference from the model, if they were compared.
        writes: what it reads of the model's state and writes back, if there is anything.
        overwriting: if the runner itself changes such memory.
        without: what it runs without here, and why; empty if nothing.
    """

    runner: Runner
    watch: ModelWatch
    intermediate_bytes: int
    packed_bytes: Mapping[Hashable, int]
    max_abs_error: float | None
    writes: WriteBacks | None = None
    overwriting: Overwriting | None = None
    without: str = ""


class Prepared:
    """A schedule that was verified against its model and may run.

    ``seen`` stands for the model as it was seen last: after each change that is noticed it is another object.

    Args:
        program: what it computes.
        device: where inputs must be.
        bind: binds it to the model as it is now; raises on any doubt. Its argument says whether to compare with the model.
        offsets_matter: whether an operator addresses memory from the start of a storage.
        late_watch: look for changes of the model after the launch, while the device works, instead of before it. A schedule without
            write-backs changes no memory but its own, so what a stale launch computed is dropped and nobody sees it.

    Raises:
        Exception: whatever ``bind`` raises.
    """

    def __init__(
        self, program: Program, device: torch.device, bind: Callable[[bool], Bound], *, offsets_matter: bool, late_watch: bool = False
    ) -> None:
        self.program = program
        self.device = device
        self.offsets_matter = offsets_matter
        self.late_watch = late_watch
        self.max_abs_error = 0.0
        self._bind = bind
        self._careful = False  # whether a run may change nothing before it has succeeded
        self._unrest = Unrest()
        self._take(bind(True))

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | Exception | str:
        """Outputs, or what an operator raised, or why the schedule may not run now (the model is in another mode, say, or has other hooks).

        Raises:
            NoLongerFits: if the model was changed into another one.
            ChangedMeanwhile: if it is being changed.
            HalfWritten: if what the model changes was not changed in full.
        """
        if self.writes is None:
            return self._run(tensors)
        with self.writes.turn.lock:
            # A model that is found changed may have other buffers; it must be found before anything is written to them.
            if reason := self.follow():
                return reason
            writes = self.writes
            inputs = writes.inputs(tensors)
            if isinstance(inputs, str):
                return inputs
            outcome = self._overwrite(self.overwriting, inputs) if self.overwriting is not None else self._launch(inputs)
            return writes.finish(inputs, outcome) if isinstance(outcome, list) else outcome

    def _run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | Exception | str:
        if not self.late_watch:
            return self.follow() or self._launch(tensors)
        outcome = self._launch(tensors)
        change = self.watch.change()
        if change is Change.NONE:
            return outcome
        if self._harmless(change) and not isinstance(outcome, Exception):
            return outcome
        return self.follow() or self._launch(tensors)

    def _overwrite(self, overwriting: Overwriting, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | Exception | str:
        """Run it; what an operator raised, if nothing was changed by then, or why it may not run now.

        Raises:
            HalfWritten: if something was. The next call changes nothing before it has succeeded, so that it is seen who is to blame.
        """
        overwriting.begun.set(False)
        # Made now, and not when it is found that it will be needed: what making it raises must not hide what became of that run.
        outcome = self._launch(inputs, overwriting.otherwise() if self._careful else None)
        if isinstance(outcome, list):
            self._careful = False
        elif isinstance(outcome, Exception) and overwriting.begun.yes:
            self._careful = True
            raise HalfWritten(
                f"an operator failed after part of the model's state was changed ({type(outcome).__name__}: {outcome}); the model was not "
                "run, because it would change that part twice. Reset the model's state."
            ) from outcome
        return outcome

    def follow(self) -> str:
        """Keep up with changes of the model; why the schedule may not run, or nothing.

        Raises:
            NoLongerFits, ChangedMeanwhile: as :meth:`run`.
        """
        change = self.watch.change()
        if change is Change.NONE or self._harmless(change):
            if self._unrest.any:
                self._unrest.calm()
            return ""
        if change is Change.MODE:
            return _MODE
        if change is Change.HOOKS:
            return _HOOKS
        if there := self.watch.moved_to():
            # Parked, say, to be back soon: what it was bound to is not given up for that.
            return _ELSEWHERE.format(there=there, here=self.device)
        if self._unrest.leaves():
            return _UNREST.format(what=self.watch.what_changed() or "its weights")
        before = self.watch
        self._rebind(verify=change is Change.STRUCTURE)
        if change is Change.STRUCTURE:
            self.watch.learn(before)
        return ""

    @property
    def workspace_bytes(self) -> int:
        """Memory it takes beside the model's weights, if no other schedule takes part of that."""
        return self.intermediate_bytes + sum(self.packed_bytes.values())

    @property
    def copied_back_bytes(self) -> int:
        """Bytes that each run copies into memory that the model changes in place."""
        return self.writes.copied_bytes if self.writes is not None else 0

    def refresh(self) -> None:
        """Read all parameters again and compare with the model.

        Raises:
            NoLongerFits: if the model was changed into another one.
            ChangedMeanwhile: if it is being changed; the next call then sees that it was.
            InAnotherMode: if nothing was read, because it is in training mode.
        """
        self._rebind(verify=True)

    def close(self) -> None:
        """Give back what the runner holds, where it holds anything that needs giving back. Nothing may be running."""
        close = getattr(self.runner, "close", None)
        if close is not None:
            close()

    def _launch(self, tensors: Sequence[torch.Tensor], instead: Runner | None = None) -> list[torch.Tensor] | Exception | str:
        runner = instead or self.runner
        try:
            if not torch.is_grad_enabled():
                return runner(tensors)
            with torch.no_grad():
                return runner(tensors)
        except (InTheMidst, TooFewCores) as error:
            return str(error)
        except OPERATOR_ERRORS as error:
            let_through(error)
            empty_frames(error)
            return error

    def _harmless(self, change: Change) -> bool:
        if change is not Change.CONTENT or self.watch.reads_ahead or in_its_code(self.program, self.device.type):
            return False
        # Read where they are at every call, and nothing was computed from them ahead of time.
        self.watch.accept()
        self.seen = object()
        return True

    def _rebind(self, *, verify: bool) -> None:
        try:
            self._take(self._bind(verify))
        except (ChangedMeanwhile, InAnotherMode, InTheMidst):
            raise
        except Exception as error:
            let_through(error)
            raise NoLongerFits(f"the model was changed and its schedule no longer fits: {error}") from error

    def _take(self, bound: Bound) -> None:
        self.runner, self.watch, self.writes = bound.runner, bound.watch, bound.writes
        self.intermediate_bytes, self.packed_bytes = bound.intermediate_bytes, bound.packed_bytes
        self.overwriting, self.without = bound.overwriting, bound.without
        self._careful = False
        self.seen = object()
        if bound.max_abs_error is not None:
            self.max_abs_error = bound.max_abs_error
