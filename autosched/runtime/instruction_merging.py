"""The same instructions in fewer: what is made only to be handed on is made where it is handed on to, and releases side by side are one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from autosched.core.program import Argument, Call, Many, Ref
from autosched.runtime.instructions import Allocate, CallOperator, Expect, Instruction, Release, RunKernel, Same, Window, slots_of


def merged(made: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The same instructions, shorter.

    >>> merged([Allocate(-2, (4,), (1,), "float32"), Same(7, -2), Release((-2,))])
    (Allocate(slot=7, size=(4,), stride=(1,), dtype='float32'),)
    """
    touched = Counter(slot for item in made for slot in slots_of(item))
    copies = [item for item in made if isinstance(item, Same)]
    copied = Counter(item.of for item in copies)
    # The one copy of a scratch slot, into a slot that nothing else here touches: the scratch slot may as well be that slot.
    moves = {item.of: item.slot for item in copies if item.of < 0 <= item.slot and copied[item.of] == 1 and touched[item.slot] == 1}
    shorter: list[Instruction] = []
    for item in made:
        if isinstance(item, Release):
            slots = tuple(slot for slot in item.slots if slot not in moves)
            if shorter and isinstance(before := shorter[-1], Release):
                shorter[-1] = Release((*before.slots, *slots))
            elif slots:
                shorter.append(Release(slots))
        elif not (isinstance(item, Same) and item.of in moves):
            shorter.append(_moved(item, moves) if moves else item)
    return tuple(shorter)


def _moved(item: Instruction, moves: Mapping[int, int]) -> Instruction:
    """``item`` with other slots; not a release."""

    def place(slot: int) -> int:
        return moves.get(slot, slot)

    match item:
        case CallOperator(call=call):
            args = tuple(_renamed(argument, moves) for argument in call.args)
            kwargs = tuple((name, _renamed(argument, moves)) for name, argument in call.kwargs)
            return CallOperator(Call(call.target, args, kwargs, tuple(map(place, call.outputs))))
        case Allocate() | Expect():
            return dataclasses.replace(item, slot=place(item.slot))
        case Window() | Same():
            return dataclasses.replace(item, slot=place(item.slot), of=place(item.of))
        case RunKernel():
            return dataclasses.replace(item, tensors=tuple(map(place, item.tensors)))
        case _:
            return item


def _renamed(argument: Argument, moves: Mapping[int, int]) -> Argument:
    if isinstance(argument, Ref):
        return Ref(moves.get(argument.value, argument.value))
    if isinstance(argument, Many):
        return Many(tuple(_renamed(item, moves) for item in argument.items))
    return argument
