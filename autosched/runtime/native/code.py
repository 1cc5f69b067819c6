"""What ``native/reading.h`` reads: steps and the instructions of their kernels as numbers, with tables of what is no whole number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch

from autosched.core.program import Argument, Call, Many, NonFinite, Ref, TorchLiteral
from autosched.runtime.instructions import (
    FIRST_SCRATCH,
    Allocate,
    CallOperator,
    Expect,
    Instruction,
    Release,
    RunKernel,
    Same,
    Window,
    scratch,
    slots_of,
)

# The numbers of native/program.h and native/reading.h.
_CALL, _ALLOCATE, _WINDOW, _SAME, _RUN, _RELEASE, _EXPECT = range(7)
_NONE, _BOOL, _INT, _FLOAT, _STRING, _SLOT, _LIST, _DTYPE, _MEMORY_FORMAT, _LAYOUT, _DEVICE = range(11)
_OF_TORCH = {"memory_format": _MEMORY_FORMAT, "layout": _LAYOUT}


class NotNative(Exception):
    """Something that only Python can run; the message says why."""


@dataclass(frozen=True, slots=True)
class NativeStep:
    """As ``plan.Step``, with what there is to do.

    Args:
        index: of the flag that it raises if it ``records``, and of its times.
        instructions: done ``repeats`` times.
        places: where each slot lies that is not scratch, also those in ``frees``; ``None`` where it is.
        delay_us: how long it is held back: for tests that look for missing waits.
    """

    index: int
    width: int
    instructions: tuple[Instruction, ...]
    waits: tuple[int, ...] = ()
    records: bool = False
    frees: tuple[int, ...] = ()
    repeats: int = 1
    places: Mapping[int, int] | None = None
    delay_us: float = 0.0


@dataclass(frozen=True, slots=True)
class NativeCode:
    """Phases of lanes of steps: all lanes of a phase have ended before the next one begins.

    Args:
        phases: one of a single lane is the calling thread's.
        flags: one more than the largest index of a step.
        spin_us: how long a lane that waits asks again before it sleeps.
        constants: what the slots hold when a run begins, but for inputs.
        inputs, outputs: slots.
        team: how many threads walk a phase of several lanes, where those are the calling thread's OpenMP team; always as many as its
            widest operator has, because a team that shrinks ends its threads.
    """

    phases: tuple[tuple[tuple[NativeStep, ...], ...], ...]
    flags: int
    spin_us: float
    constants: Sequence[torch.Tensor | None]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    team: int = 0

    @property
    def lanes(self) -> int:
        """The most lanes of a phase."""
        return max(len(phase) for phase in self.phases)


class Writer:
    """Writes it down.

    Raises:
        NotNative: if a slot begins with something that is no tensor.
    """

    def __init__(self, native: NativeCode) -> None:
        self.code: list[int] = []
        self.reals: list[float] = []
        self.texts: list[str] = []
        self.dtypes: list[torch.Tensor] = []
        self.constants: list[torch.Tensor] = []
        self.kept: list[object] = []  # libraries of compiled kernels, and what their addresses are of
        self._text_places: dict[str, int] = {}
        self._dtype_places: dict[str, int] = {}
        self._places: Mapping[int, int] | None = None
        values = len(native.constants)
        each = max((_scratch_slots(step.instructions) for phase in native.phases for lane in phase for step in lane), default=0)
        filled = [place for place, tensor in enumerate(native.constants) if tensor is not None]
        for place in filled:
            constant = native.constants[place]
            if not isinstance(constant, torch.Tensor):
                raise NotNative(f"a constant is a {type(constant).__name__}, not a tensor")
            self.constants.append(constant)
        self.code += [values + each * native.lanes, native.flags, round(native.spin_us * 1000.0), native.team]
        self._many(native.inputs)
        self._many(native.outputs)
        self._many(filled)
        self.code.append(len(native.phases))
        for phase in native.phases:
            self.code.append(len(phase))
            for lane, steps in enumerate(phase):
                # Each lane has its own scratch: operators of two lanes run at the same time.
                self._scratch_base = values + each * lane
                self.code.append(len(steps))
                for step in steps:
                    self._step(step)

    def _step(self, step: NativeStep) -> None:
        self._places = step.places
        self.code += [step.index, step.width, int(step.records), round(step.delay_us * 1000.0), step.repeats]
        self._many(step.waits)
        self._slots(step.frees)
        used = _scratch_slots(step.instructions)
        # An operator's own tensors end with it, whether or not it says so.
        ending = (Release(tuple(scratch(number) for number in range(used))),) if used else ()
        self.code.append(len(step.instructions) + len(ending))
        for item in (*step.instructions, *ending):
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
            case RunKernel(_, address, tensors, library, fixed):
                self.code += [_RUN, _signed(address)]
                self._slots(tensors)
                self._many([_signed(tensor.data_ptr()) for tensor in fixed])
                self.kept += [library, *fixed]
            case Expect(slot, size, stride, dtype):
                self.code.append(_EXPECT)
                self._slots((slot,))
                self._many(size)
                self._many(stride)
                self.code += [1, self._dtype(dtype)] if dtype else [0]
            case Release(slots):
                self.code.append(_RELEASE)
                self._slots(slots)
            case _:
                assert_never(item)

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
        if slot <= FIRST_SCRATCH:
            return self._scratch_base + FIRST_SCRATCH - slot
        return slot if slot < 0 or self._places is None else self._places[slot]

    def _text(self, text: str) -> int:
        if text not in self._text_places:
            self._text_places[text] = len(self.texts)
            self.texts.append(text)
        return self._text_places[text]

    def _dtype(self, name: str) -> int:
        if name not in self._dtype_places:
            self._dtype_places[name] = len(self.dtypes)
            # Only its dtype is looked at.
            self.dtypes.append(torch.empty(0, dtype=getattr(torch, name), device="cpu"))
        return self._dtype_places[name]


def _scratch_slots(instructions: Sequence[Instruction]) -> int:
    """How many slots of its own an operator uses."""
    return max((FIRST_SCRATCH + 1 - slot for item in instructions for slot in slots_of(item) if slot <= FIRST_SCRATCH), default=0)


def _signed(address: int) -> int:
    return address - (1 << 64) if address >= 1 << 63 else address
