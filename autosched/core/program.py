"""What an operator computes, as data: ATen calls, their arguments, and where constants come from.

A :class:`Program` is all that is needed, beside the model's own parameters, to run a captured
model: it is written to a bundle and rebuilt at load without capturing the model again.
Nothing here imports torch; ``runtime.kernels`` turns these values into callables.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from autosched.core.graph import OpGraph


class Ref(msgspec.Struct, frozen=True, tag="ref", forbid_unknown_fields=True):
    """An argument that is a tensor of the value table."""

    value: int


class TorchLiteral(msgspec.Struct, frozen=True, tag="torch", forbid_unknown_fields=True):
    """A dtype, layout, memory format or device; a device is replaced by the one the program is bound to."""

    kind: Literal["dtype", "layout", "memory_format", "device"]
    name: str


class NonFinite(msgspec.Struct, frozen=True, tag="float", forbid_unknown_fields=True):
    """A float that JSON cannot write."""

    name: Literal["inf", "-inf", "nan"]


class Many(msgspec.Struct, frozen=True, tag="list", forbid_unknown_fields=True):
    """A list argument, such as the tensors of a concatenation."""

    items: tuple[bool | int | float | str | Ref | TorchLiteral | NonFinite | Many | None, ...]


Argument = None | bool | int | float | str | Ref | TorchLiteral | NonFinite | Many


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one operator overload.

    Args:
        target: ``namespace::name.overload``, for example ``aten::convolution.default``.
        args: positional arguments.
        kwargs: keyword arguments, sorted by name.
        outputs: value index of each tensor returned; -1 where a returned item is not used.
    """

    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    outputs: tuple[int, ...]

    def reads(self) -> tuple[int, ...]:
        """Value indices of every tensor argument, in order, without repetition."""
        return tuple(dict.fromkeys(self.tensors()))

    def tensors(self) -> Iterator[int]:
        """Value index of every tensor argument, in order, as often as it is given."""
        for argument in (*self.args, *(argument for _, argument in self.kwargs)):
            yield from refs_in(argument)


def fits_64_bits(number: int) -> bool:
    """Whether a program may hold ``number``: operators take no others."""
    return -(2**63) <= number < 2**63


def refs_in(argument: Argument) -> Iterator[int]:
    """Value index of every tensor in an argument, in order."""
    if isinstance(argument, Ref):
        yield argument.value
    elif isinstance(argument, Many):
        for item in argument.items:
            yield from refs_in(item)


class ConstantSource(enum.StrEnum):
    """Where the tensor of a constant comes from."""

    PARAMETER = "parameter"  # model.get_parameter(name)
    BUFFER = "buffer"  # model.get_buffer(name)
    LITERAL = "literal"  # a tensor written in the model's code; it travels with the program


@dataclass(frozen=True, slots=True)
class Binding:
    """Constant value ``value`` is the tensor called ``name`` of ``source``."""

    value: int
    source: ConstantSource
    name: str


@dataclass(frozen=True, slots=True)
class Decision:
    """A tensor of the model's own that it asks, in a call, what is to run.

    Args:
        source: where it is, a parameter or a buffer.
        name: what it is called there.
        digest: of its numbers when the program was captured (``core.decided.digest_of``): the program is for them alone.
    """

    source: ConstantSource
    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class WriteBack:
    """After a run, the contents of graph input ``target`` become those of ``value``, an output of the graph.

    The target is a tensor of the caller's, or one of the model's (``Program.state``).
    """

    target: int
    value: int


@dataclass(frozen=True, slots=True)
class InputSpec:
    """How to make a random input like the example: integers stay within ``[low, high]`` of the example.

    ``value`` indexes the value table. ``low`` and ``high`` are 0 and 0 for floating point, which is drawn
    from a normal distribution with the example's ``mean`` and ``std``; otherwise it is drawn as whole numbers within ``[low, high]``,
    for the model makes indices of it.
    """

    value: int
    low: int
    high: int
    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class Program:
    """A captured model.

    Args:
        graph: the operators that are scheduled.
        prologue: calls evaluated once, from parameters (folded batch norms, packed weights).
        bindings: constants taken from the model.
        inputs: one entry for each tensor among the flattened user inputs.
        input_tree: ``torch.utils._pytree.treespec_dumps`` of ``(args, kwargs)``.
        output_tree: the same of the model's output.
        input_leaves: for each flattened input leaf, its value index, or a literal the call must repeat.
        output_leaves: for each flattened output leaf, the value returned, or a literal.
        lowering: the name of the operator granularity, for example ``aten`` or ``rewritten``.
        source: for a lowering whose operators are compiled again wherever they run (``variants.WHOLE``), the JSON of the program they are
            compiled from (``program_json.encode_program``); else empty.
        frozen: for such a lowering on a GPU, whether Inductor computed with the constants; since bundle schema 4. On a CPU it always does.
        choices: for such a lowering whose kernels were chosen by timing: each question in the order asked (operation, types and shapes),
            and the kernel taken, or an empty string where that is not known; since bundle schema 4.
        state: the graph's last inputs, in order: what the model changes of its own, read from it at each call; since bundle schema 5.
        writes: what the model changes in place, in the order of writing: the graph itself changes nothing; since bundle schema 5.
        decided: by which of its own tensors the model decides what runs; since bundle schema 7.
    """

    graph: OpGraph
    prologue: tuple[Call, ...]
    bindings: tuple[Binding, ...]
    inputs: tuple[InputSpec, ...]
    input_tree: str
    output_tree: str
    input_leaves: tuple[Argument, ...]
    output_leaves: tuple[Argument, ...]
    lowering: str
    source: str = ""
    frozen: bool = False
    choices: tuple[tuple[str, str], ...] = ()
    state: tuple[Binding, ...] = ()
    writes: tuple[WriteBack, ...] = ()
    decided: tuple[Decision, ...] = ()

    @property
    def given(self) -> tuple[int, ...]:
        """The graph's inputs that the caller gives, in order."""
        inputs = self.graph.inputs
        return inputs[: len(inputs) - len(self.state)]
