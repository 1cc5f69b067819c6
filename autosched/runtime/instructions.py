"""What a kernel does, as data: for an executor that runs a whole lane without the interpreter (see ``native.lanes``).

A kernel is a callable on slots (``calls.Kernel``). One that carries instructions can also be run natively; a kernel that somebody
wraps or replaces carries none, and so is called. Slots are value indices of the program; ``scratch(k)`` are the operator's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

from autosched.core.program import Call

if TYPE_CHECKING:
    import torch

    from autosched.runtime.calls import Kernel  # which attaches them

FIRST_SCRATCH = -2  # -1 in ``Call.outputs`` is a result that nobody uses


@dataclass(frozen=True, slots=True)
class CallOperator:
    """Call a registered operator; its tensors are slots."""

    call: Call


@dataclass(frozen=True, slots=True)
class Allocate:
    """Put a new, uninitialised tensor into ``slot``. ``dtype`` as in ``TensorSpec``; ``stride`` in elements."""

    slot: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Window:
    """Put a view of the tensor in ``of`` into ``slot``: size and stride as given, begun ``offset`` elements after its own first one."""

    slot: int
    of: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Same:
    """Put the tensor in ``of`` into ``slot`` as well."""

    slot: int
    of: int


@dataclass(frozen=True, slots=True)
class RunKernel:
    """Call a compiled C++ function with the addresses of tensors.

    Args:
        name: for messages.
        address: of ``void name(T*...)``, every parameter a pointer.
        tensors: slots, in the order of its parameters.
        loaded: keeps the code where it is.
        fixed: tensors that come behind, the same ones in every run.
    """

    name: str
    address: int
    tensors: tuple[int, ...]
    loaded: object
    fixed: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Expect:
    """Stop the run unless the tensor in ``slot`` has this size and these strides, and this dtype if one is named.

    A stride is not looked at where the size is 1, nor any if there are no elements: as ``assert_size_stride`` in Inductor's code, which a
    region asks before its C++ indexes memory by shapes that come from a file. A dtype is named of what an operator made, which may be
    nothing at all: as ``assert_tensor_metadata``.
    """

    slot: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """Empty ``slots``."""

    slots: tuple[int, ...]


Instruction: TypeAlias = CallOperator | Allocate | Window | Same | RunKernel | Expect | Release


def slots_of(item: Instruction) -> tuple[int, ...]:
    """Every slot that ``item`` names, -1 among the results of a call included."""
    match item:
        case CallOperator(call):
            return (*call.reads(), *call.outputs)
        case Allocate(slot, _, _, _) | Expect(slot, _, _, _):
            return (slot,)
        case Window(slot, of, _, _, _) | Same(slot, of):
            return (slot, of)
        case RunKernel(tensors=slots) | Release(slots):
            return slots


def fixed_tensors(kernels: Iterable[Kernel]) -> list[torch.Tensor]:
    """What ``kernels`` hold themselves, beside the constants of their program."""
    items = chain.from_iterable(instructions_of(kernel) or () for kernel in kernels)
    return [tensor for item in items if isinstance(item, RunKernel) for tensor in item.fixed]


def scratch(number: int) -> int:
    """The slot of an operator's own ``number``-th tensor, from 0; nobody else sees it."""
    return FIRST_SCRATCH - number


def carrying(kernel: Kernel, instructions: Sequence[Instruction]) -> Kernel:
    """``kernel``, which does the same as ``instructions``; it carries them from now on."""
    # With whose they are: a decorator may copy a function's attributes.
    kernel.instructions = (id(kernel), tuple(instructions))  # type: ignore[attr-defined]
    return kernel


def instructions_of(kernel: Kernel) -> tuple[Instruction, ...] | None:
    """What ``kernel`` does; ``None`` if that can only be found out by calling it."""
    owner, instructions = getattr(kernel, "instructions", (0, None))
    return instructions if owner == id(kernel) else None


def carrying_all(kernel: Kernel, steps: Sequence[Kernel], *more: Instruction) -> Kernel:
    """``kernel``, which runs ``steps`` in order and then does ``more``; with one step that only Python can take it is called as a whole."""
    carried = [instructions_of(step) for step in steps]
    known = [item for item in carried if item is not None]
    return carrying(kernel, [*chain.from_iterable(known), *more]) if len(known) == len(carried) else kernel
