"""A plan as a program for ``native/lanes.cpp``: every lane is one call without the interpreter, where all of its kernels say what they do.

Python threads cost what they cost at every operator: whoever ends one needs the interpreter's lock, and where another lane holds it, that
is a sleep and a wake-up. Here the lock is given up once for each lane and run. Threads and their queues stay those of ``lane_pool``.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from autosched.core.program import Argument, Call, Many, NonFinite, Ref, TorchLiteral
from autosched.runtime.instructions import Allocate, CallOperator, Instruction, Release, RunKernel, Same, Window, instructions_of
from autosched.runtime.kernels import BoundProgram
from autosched.runtime.lane_pool import LanePool, Signals
from autosched.runtime.native_build import Library
from autosched.runtime.plan import Step

if TYPE_CHECKING:
    from autosched.runtime.lanes import Trace

# The numbers of lanes.cpp.
_CALL, _ALLOCATE, _WINDOW, _SAME, _RUN, _RELEASE = range(6)
_NONE, _BOOL, _INT, _FLOAT, _STRING, _SLOT, _LIST, _DTYPE, _MEMORY_FORMAT, _LAYOUT, _DEVICE = range(11)
_OF_TORCH = {"memory_format": _MEMORY_FORMAT, "layout": _LAYOUT}
_FIRST_SCRATCH = -2


class NotNative(Exception):
    """A plan that only Python can run; the message says why."""


class NativePlan:
    """One plan of one bound program. May be run from several threads at once: what a run changes is its own.

    Args:
        library: what was built of ``lanes.cpp``.
        bound: the program, on the CPU.
        lanes: the steps of each lane; the caller's thread takes the first.
        spin_us: how long a lane that waits asks again before it sleeps.
        delays_us: how long an operator is held back, by index: for tests that look for missing waits.

    Raises:
        NotNative: if a kernel does not say what it does, or says something that cannot be done natively.
    """

    def __init__(
        self,
        library: Library,
        bound: BoundProgram,
        lanes: Sequence[Sequence[Step]],
        spin_us: float,
        delays_us: Mapping[int, float] | None = None,
    ) -> None:
        written = _Writer(bound, lanes, spin_us, delays_us or {})
        try:
            with torch.inference_mode():
                self._handle: int = library.compile(written.code, written.reals, written.texts, written.dtypes, written.constants)
        except (RuntimeError, IndexError) as error:
            raise NotNative(str(error).splitlines()[0]) from None
        self._library = library
        self._lanes = len(lanes)
        self._operators = len(bound.kernels)
        self._code = written.kept
        weakref.finalize(self, library.delete_program, self._handle).atexit = False

    def run(self, inputs: Sequence[torch.Tensor], trace: Trace | None, pool: LanePool) -> list[torch.Tensor]:
        """Run the plan on the calling thread, which is in inference mode, and as many of the pool's as it has other lanes.

        Returns:
            The tensors of the graph's outputs, in order.

        Raises:
            BaseException: what the first failing operator raised; the other lanes have stopped by then.
        """
        # Zeros: an operator that did not run has none.
        times = torch.zeros(2, self._operators, dtype=torch.int64) if trace is not None else None
        try:
            if self._lanes == 1:
                outputs, unfinished = self._library.run_alone(self._handle, inputs, times)
                if unfinished:
                    outputs = self._walked(_Run(self._library, unfinished), pool)
            else:
                outputs = self._walked(_Run(self._library, self._library.begin(self._handle, inputs, times)), pool)
        finally:
            if trace is not None and times is not None:
                trace.start_ns, trace.end_ns = times.tolist()
        made: list[torch.Tensor] = outputs
        return made

    def _walked(self, run: _Run, pool: LanePool) -> Any:
        try:
            if self._lanes == 1:
                run.walk(0)
            else:
                signals = _NativeSignals(run, self._lanes)
                pool.run(signals.walk, self._lanes, signals, 0)
            return run.finish()
        except BaseException:
            run.abandon()
            raise


class _Run:
    """One run; its memory is given back with the last reference, which every lane has while it may still look at it."""

    __slots__ = ("_handle", "_library")

    def __init__(self, library: Library, handle: int) -> None:
        self._library = library
        self._handle = handle

    def walk(self, lane: int) -> None:
        """Walk a lane to its end. It comes back to Python now and then, so that signals are heard."""
        while not self._library.walk(self._handle, lane):
            pass

    def stop(self) -> None:
        """Let every lane stop before its next operator."""
        self._library.stop(self._handle)

    def finish(self) -> Any:
        """The outputs, or the first error; every lane has ended."""
        return self._library.finish(self._handle)

    def abandon(self) -> None:
        """Let go of all tensors, as soon as no lane uses them."""
        self._library.abandon(self._handle)

    def __del__(self) -> None:
        self._library.delete_run(self._handle)


class _NativeSignals(Signals):
    """The pool's side of a native run: one flag for the end of each lane, and errors of Python's own, such as an interrupt."""

    __slots__ = ("_ended", "_run")

    def __init__(self, run: _Run, lanes: int) -> None:
        super().__init__(lanes)
        self._run = run
        self._ended = False

    def walk(self, lane: int) -> None:
        """The task of a lane."""
        self._run.walk(lane)
        if lane == 0:
            # It ends after all others.
            self._ended = True

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._run.stop()

    def join(self, index: int) -> None:
        # That the threads of other lanes come back to Python as well is nothing to wait for.
        if not self._ended:
            super().join(index)


class _Writer:
    """Turns steps and their kernels' instructions into numbers, with tables of what is no whole number."""

    def __init__(self, bound: BoundProgram, lanes: Sequence[Sequence[Step]], spin_us: float, delays_us: Mapping[int, float]) -> None:
        graph = bound.program.graph
        self.code: list[int] = []
        self.reals: list[float] = []
        self.texts: list[str] = []
        self.dtypes: list[torch.Tensor] = []
        self.constants: list[torch.Tensor] = []
        self.kept: list[object] = []  # libraries of compiled kernels
        self._text_places: dict[str, int] = {}
        self._dtype_places: dict[str, int] = {}
        self._values = len(graph.values)
        self._delays_us = delays_us
        programs = [[(step, _instructions(bound, step)) for step in lane] for lane in lanes]
        scratch = max((_scratch_slots(todo) for lane in programs for _, todo in lane), default=0)
        filled = [place for place, tensor in enumerate(bound.constants) if tensor is not None]
        for place in filled:
            if not isinstance(bound.constants[place], torch.Tensor):
                raise NotNative(f"a constant is a {type(bound.constants[place]).__name__}, not a tensor")
            self.constants.append(bound.constants[place])
        self.code += [self._values + scratch * len(lanes), len(bound.kernels), round(spin_us * 1000.0)]
        self._many(graph.inputs)
        self._many(graph.outputs)
        self._many(filled)
        self.code.append(len(lanes))
        for lane, steps in enumerate(programs):
            # Each lane has its own scratch: operators of two lanes run at the same time.
            self._scratch_base = self._values + scratch * lane
            self.code.append(len(steps))
            for step, todo in steps:
                self._step(step, todo)

    def _step(self, step: Step, todo: Sequence[Instruction]) -> None:
        delay_ns = round(self._delays_us.get(step.operator, 0.0) * 1000.0)
        self.code += [step.operator, step.width, int(step.records), delay_ns]
        self._many(step.waits)
        self._many(step.frees)
        used = _scratch_slots(todo)
        # An operator's own tensors end with it, whether or not it says so.
        todo = (*todo, Release(tuple(_FIRST_SCRATCH - number for number in range(used)))) if used else todo
        self.code.append(len(todo))
        for item in todo:
            self._instruction(item)

    def _instruction(self, item: Instruction) -> None:
        match item:
            case CallOperator(call):
                self._call(call)
            case Allocate(slot, size, stride, dtype):
                self.code.append(_ALLOCATE)
                self._slots((slot,))
                self._many(size)
                self._many(stride)
                self.code.append(self._dtype(dtype))
            case Window(slot, of, size, stride, offset):
                self.code.append(_WINDOW)
                self._slots((slot, of))
                self._many(size)
                self._many(stride)
                self.code.append(offset)
            case Same(slot, of):
                self.code.append(_SAME)
                self._slots((slot, of))
            case RunKernel(_, address, tensors, library):
                self.code += [_RUN, _signed(address)]
                self._slots(tensors)
                self.kept.append(library)
            case Release(slots):
                self.code.append(_RELEASE)
                self._slots(slots)

    def _call(self, call: Call) -> None:
        name, _, overload = call.target.rpartition(".")
        self.code += [_CALL, self._text(name), self._text("" if overload == "default" else overload), len(call.args)]
        for argument in call.args:
            self._literal(argument)
        self.code.append(len(call.kwargs))
        for keyword, argument in call.kwargs:
            self.code.append(self._text(keyword))
            self._literal(argument)
        # -1 is a result that nobody uses.
        self._slots(call.outputs)

    def _literal(self, argument: Argument) -> None:
        match argument:
            case None:
                self.code.append(_NONE)
            case bool():
                self.code += [_BOOL, int(argument)]
            case int():
                self.code += [_INT, argument]
            case float():
                self._real(argument)
            case NonFinite(name):
                self._real(float(name))
            case str():
                self.code += [_STRING, self._text(argument)]
            case Ref(value):
                self.code += [_SLOT, self._place(value)]
            case Many(items):
                self.code += [_LIST, len(items)]
                for item in items:
                    self._literal(item)
            case TorchLiteral("device", _):
                self.code.append(_DEVICE)
            case TorchLiteral("dtype", name):
                self.code += [_DTYPE, self._dtype(name)]
            case TorchLiteral(kind, name):
                self.code += [_OF_TORCH[kind], self._text(name)]

    def _real(self, number: float) -> None:
        self.code += [_FLOAT, len(self.reals)]
        self.reals.append(number)

    def _many(self, items: Sequence[int]) -> None:
        self.code.append(len(items))
        self.code += items

    def _slots(self, slots: Sequence[int]) -> None:
        self._many([self._place(slot) for slot in slots])

    def _place(self, slot: int) -> int:
        return slot if slot > _FIRST_SCRATCH else self._scratch_base + _FIRST_SCRATCH - slot

    def _text(self, text: str) -> int:
        if text not in self._text_places:
            self._text_places[text] = len(self.texts)
            self.texts.append(text)
        return self._text_places[text]

    def _dtype(self, name: str) -> int:
        if name not in self._dtype_places:
            self._dtype_places[name] = len(self.dtypes)
            # Only its dtype is looked at.
            self.dtypes.append(torch.empty(0, dtype=getattr(torch, name)))
        return self._dtype_places[name]


def _instructions(bound: BoundProgram, step: Step) -> tuple[Instruction, ...]:
    found = instructions_of(bound.kernels[step.operator])
    if found is None:
        raise NotNative(f"operator {bound.program.graph.operators[step.operator].name} can only be called from Python")
    return found


def _scratch_slots(instructions: Sequence[Instruction]) -> int:
    """How many slots of its own an operator uses."""
    return max((_FIRST_SCRATCH + 1 - slot for item in instructions for slot in _touched(item)), default=0)


def _touched(item: Instruction) -> tuple[int, ...]:
    match item:
        case CallOperator(call):
            return tuple(slot for slot in (*call.outputs, *call.reads()) if slot <= _FIRST_SCRATCH)
        case Allocate(slot, _, _, _):
            found: tuple[int, ...] = (slot,)
        case Window(slot, of, _, _, _) | Same(slot, of):
            found = (slot, of)
        case RunKernel(_, _, tensors, _):
            found = tensors
        case Release(slots):
            found = slots
    return tuple(slot for slot in found if slot <= _FIRST_SCRATCH)


def _signed(address: int) -> int:
    return address - (1 << 64) if address >= 1 << 63 else address
