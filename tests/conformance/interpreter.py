"""Instructions carried out one after the other in plain Python: the double of every executor that runs them without the interpreter."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from autosched.core.program import Argument, Call, Many, Ref
from autosched.runtime.calls import compile_call
from autosched.runtime.instructions import Allocate, CallOperator, Expect, Instruction, Release, RunKernel, Same, Window
from autosched.runtime.kernels import BoundProgram

CPU = torch.device("cpu")


class Unexpected(Exception):
    """A tensor is not what an ``Expect`` says."""


def interpret(instructions: Sequence[Instruction], slots: dict[int, Any]) -> None:
    """Carry out ``instructions`` on ``slots``, in which an empty one is absent."""
    for item in instructions:
        match item:
            case CallOperator(call=call):
                _call(call, slots)
            case Allocate():
                slots[item.slot] = torch.empty_strided(item.size, item.stride, dtype=getattr(torch, item.dtype))
            case Window(slot=slot, of=of, size=size, stride=stride, offset=offset):
                slots[slot] = slots[of].as_strided(size, stride, slots[of].storage_offset() + offset)
            case Same(slot=slot, of=of):
                slots[slot] = slots[of]
            case RunKernel(address=address, tensors=tensors, fixed=fixed):
                given = [*(slots[slot] for slot in tensors), *fixed]
                ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(given))(address)(*[tensor.data_ptr() for tensor in given])
            case Expect():
                _expect(item, slots[item.slot])
            case Release():
                for slot in item.slots:
                    slots.pop(slot, None)


def _call(call: Call, slots: dict[int, Any]) -> None:
    # Slots of an operator's own are negative; those of a call are not.
    reads = call.reads()
    made = tuple(-1 if slot == -1 else len(reads) + place for place, slot in enumerate(call.outputs))
    args = tuple(_renamed(argument, reads) for argument in call.args)
    kwargs = tuple((name, _renamed(argument, reads)) for name, argument in call.kwargs)
    given: list[Any] = [*(slots[slot] for slot in reads), *(None for _ in call.outputs)]
    compile_call(Call(call.target, args, kwargs, made), CPU)(given)
    slots.update({slot: given[place] for slot, place in zip(call.outputs, made, strict=True) if place >= 0})


def _renamed(argument: Argument, reads: Sequence[int]) -> Argument:
    if isinstance(argument, Ref):
        return Ref(reads.index(argument.value))
    return Many(tuple(_renamed(item, reads) for item in argument.items)) if isinstance(argument, Many) else argument


def _expect(item: Expect, tensor: torch.Tensor | None) -> None:
    if tensor is None and item.dtype:
        return
    assert tensor is not None
    if item.dtype and tensor.dtype != getattr(torch, item.dtype):
        raise Unexpected(f"{tensor.dtype} is not {item.dtype}")
    size, stride = item.size, item.stride
    strides = zip(tensor.stride(), stride, size, strict=True) if tensor.shape == size and tensor.numel() else ()
    if tensor.shape != size or any(here != wanted and count > 1 for here, wanted, count in strides):
        raise Unexpected(f"{tuple(tensor.shape)} with strides {tensor.stride()} is not {size} with {stride}")


def slots_after(bound: BoundProgram, instructions: Sequence[Sequence[Instruction]], inputs: Sequence[torch.Tensor]) -> dict[int, Any]:
    """All slots once every operator's ``instructions`` were carried out in order, none released but those of operators themselves."""
    slots = {slot: tensor for slot, tensor in enumerate(bound.new_slots(inputs)) if tensor is not None}
    with torch.inference_mode():
        for items in instructions:
            interpret(items, slots)
    return slots
