"""Kernels of operators that have something computed by code of our own: bias, residual and limits before a result is written, another
activation after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autosched.config import (
    own_attention_wanted,
    own_convolutions_wanted,
    own_pooling_wanted,
    own_products_wanted,
    own_recurrence_wanted,
    winograd_wanted,
)
from autosched.core.from_outside import let_through
from autosched.core.graph import Operator, OpGraph
from autosched.core.program import Call
from autosched.core.variants import Variant
from autosched.runtime.calls import Kernel, Slots, compile_call
from autosched.runtime.cpu_kernels import attention, chain, direct, pooling, recurrent, winograd
from autosched.runtime.cpu_kernels.byte_linear import ByteLinear, geometry_of_bytes, may_be_bytes, read_bytes
from autosched.runtime.cpu_kernels.convolution import Convolution
from autosched.runtime.cpu_kernels.following import read_product
from autosched.runtime.cpu_kernels.library import Entry, Library, kernel_library, kernels_built, kernels_obstacle
from autosched.runtime.cpu_kernels.linear import Linear, geometry_of_halves, may_be_linear
from autosched.runtime.cpu_kernels.weights import in_blocks, of_bytes, of_halves, summed, transformed
from autosched.runtime.examples import example_of, same_strides
from autosched.runtime.inductor.common import Refused, first_line
from autosched.runtime.instructions import (
    FIRST_SCRATCH,
    Allocate,
    CallOperator,
    Expect,
    Instruction,
    Release,
    RunKernel,
    Window,
    carrying,
    instructions_of,
)
from autosched.runtime.kernels import BoundProgram, dtype_name, joined
from autosched.runtime.numerics import compare
from autosched.runtime.one_copy import one_copy
from autosched.runtime.thread_state import inference_mode

Weights = MutableMapping[tuple[tuple[int, ...], int, bool, int], torch.Tensor]
"""Weights as a kernel multiplies with them: by the values that hold them otherwise, the variant, whether they are turned, and groups."""


Computed = Convolution | chain.Chain | Linear | ByteLinear | recurrent.Recurrence | attention.Attention | pooling.Pooling
"""What a kernel computes in the place of a call, or of two."""


@dataclass(frozen=True, slots=True)
class _Way:
    """How a variant computes.

    Args:
        wanted: whether the user has not switched it off, by ``switch``.
        read: what a call computes, if this can, of those of an operator.
        packed: the weights as the library reads them; None if there are none.
        numbers: the shapes as the kernel reads them, for a graph and a number of threads.
        entry: of the library.
        only: what else is refused.
    """

    wanted: Callable[[], bool]
    switch: str
    read: Callable[[Call, OpGraph, _Calls], Any]
    packed: Callable[[Any, list[torch.Tensor], Library], torch.Tensor] | None
    numbers: Callable[[Any, OpGraph, int], torch.Tensor]
    entry: Callable[[Library, Any], Entry]
    only: str


def _winograd(outputs: int) -> _Way:
    return _Way(
        winograd_wanted,
        "AUTOSCHED_WINOGRAD",
        lambda call, graph, calls: winograd.read_winograd(call, graph),
        lambda item, weights, library: transformed(weights[0], outputs, library.lanes, item.groups),
        lambda item, graph, width: winograd.geometry(item, graph, width, outputs),
        lambda library, item: library.winograd[_beside(item)],
        "only 3x3 convolutions of float32 with stride 1, groups of 16 channels and features or more, and channels last are computed so",
    )


def _beside(item: Convolution | Linear) -> tuple[bool, bool]:
    """Whether there is a bias, and whether there is a residual."""
    return item.bias is not None, item.residual is not None


def _factors(item: Linear | ByteLinear, weights: list[torch.Tensor], library: Library) -> torch.Tensor:
    if isinstance(item, ByteLinear):
        return of_bytes(weights[0].t(), library.lanes)
    weight = weights[0].t() if item.turned else weights[0]
    if item.in_halves:
        return of_halves(weight, library.lanes, pairs=library.pairs and item.dtype == "bfloat16")
    return in_blocks(weight.t().unsqueeze(0), library.lanes)


def _sizes(item: Linear | ByteLinear, graph: OpGraph, width: int) -> torch.Tensor:
    if isinstance(item, ByteLinear):
        return geometry_of_bytes(item, width)
    return geometry_of_halves(item, width) if item.in_halves else direct.geometry_of_linear(item, width)


def _multiplying(library: Library, item: Linear | ByteLinear) -> Entry:
    if isinstance(item, ByteLinear):
        return library.bytes[len(item.beside)]
    return library.halves[item.bias is not None] if item.in_halves else library.direct[_beside(item)]


_POOLING = _Way(
    own_pooling_wanted,
    "AUTOSCHED_POOLING",
    lambda call, graph, calls: pooling.read_pooling(call, graph),
    None,
    pooling.geometry,
    lambda library, item: library.pooling,
    "only pictures of float32, channels last, are pooled so",
)


WAYS: Mapping[int, _Way] = {
    Variant.WINOGRAD_2: _winograd(2),
    Variant.WINOGRAD_4: _winograd(4),
    Variant.OWN_CONVOLUTION: _Way(
        own_convolutions_wanted,
        "AUTOSCHED_CONVOLUTIONS",
        lambda call, graph, calls: direct.read_scaled(call, graph, calls.made_for(call)),
        lambda item, weights, library: summed(weights[0], library.lanes, groups=item.groups, turned=item.turned),
        direct.geometry,
        lambda library, item: (library.direct if item.scale is None else library.scaled)[_beside(item)],
        "only convolutions of float32 with constant weights, and groups that fill vectors of the processor, are computed so",
    ),
    Variant.OWN_CHAIN: _Way(
        own_convolutions_wanted,
        "AUTOSCHED_CONVOLUTIONS",
        lambda call, graph, calls: chain.read_chain(call, graph, calls.made_for(call)),
        lambda item, weights, library: chain.packed(item, weights, library.lanes),
        chain.geometry,
        lambda library, item: library.chain,
        "only convolutions of float32 with constant weights and one group, each with one behind it that has a group for each channel, "
        "are computed so",
    ),
    Variant.OWN_PRODUCT: _Way(
        own_products_wanted,
        "AUTOSCHED_PRODUCTS",
        lambda call, graph, calls: read_product(call, graph, calls.calls, calls.writes, calls.windows),
        _factors,
        _sizes,
        _multiplying,
        "only products of some rows with constant weights, in float32 or sixteen bits, and a vector of outputs or more, are computed so",
    ),
    Variant.OWN_RECURRENCE: _Way(
        own_recurrence_wanted,
        "AUTOSCHED_RECURRENCE",
        lambda call, graph, calls: recurrent.read_recurrence(call, graph),
        lambda item, weights, library: recurrent.packed(weights, item, library.lanes),
        lambda item, graph, width: recurrent.geometry(item, width),
        lambda library, item: library.gru if item.cell is None else library.lstm,
        "only layers of GRU and LSTM in float32 with constant weights, and as many units as fill whole vectors, are computed so",
    ),
    Variant.OWN_ATTENTION: _Way(
        own_attention_wanted,
        "AUTOSCHED_ATTENTION",
        lambda call, graph, calls: attention.read_attention(call, graph, calls.windows),
        None,
        attention.geometry,
        lambda library, item: library.attention[item.mask is not None],
        "only attention in float32 or sixteen bits, with some queries and not too many keys, is computed so",
    ),
    Variant.OWN_POOLING: _POOLING,
}
"""By variant."""


def missing_kernel(variant: int) -> str:
    """Why nothing is computed by ``variant`` of :data:`WAYS` here, as far as can be told without trying; empty if nothing is in the way."""
    way = WAYS[variant]
    if not way.wanted():
        return f"switched off by {way.switch}=0"
    return "" if kernels_built() else kernels_obstacle()


def own_variants(operator: Operator, graph: OpGraph) -> tuple[Variant, ...]:
    """Those that may pay for ``operator`` on a CPU."""
    found: list[Variant] = []
    if winograd.may_be_winograd(operator, graph):
        found += [Variant.WINOGRAD_2, Variant.WINOGRAD_4]
    if direct.may_be_direct(operator, graph):
        found.append(Variant.OWN_CONVOLUTION)
    if chain.may_be_chain(operator, graph):
        found.append(Variant.OWN_CHAIN)
    if may_be_linear(operator, graph) or may_be_bytes(operator, graph):
        found.append(Variant.OWN_PRODUCT)
    if recurrent.may_be_recurrent(operator, graph):
        found.append(Variant.OWN_RECURRENCE)
    if attention.may_be_attention(operator, graph):
        found.append(Variant.OWN_ATTENTION)
    if pooling.may_be_pooling(operator, graph):
        found.append(Variant.OWN_POOLING)
    return tuple(found)


def packed_by_own(graph: OpGraph, variants: Sequence[int]) -> frozenset[int]:
    """All values that operators read which kernels of our own may compute: these keep the numbers of some as weights of their own.

    Args:
        variants: of each operator.
    """
    own = (
        operator
        for operator, variant in zip(graph.operators, variants, strict=True)
        if variant in WAYS and WAYS[variant].packed is not None
    )
    return frozenset(value for operator in own for value in operator.reads)


def own_kernel(operator: Operator, bound: BoundProgram, width: int, variant: int, weights: Weights) -> Kernel | Refused:
    """The operator as :data:`WAYS` has it computed, or why it cannot be had.

    Args:
        bound: the program that it belongs to, as it is bound on a CPU for ``width`` threads.
        variant: one of :data:`WAYS`.
        weights: what was made of those in ``bound`` before; what is missing is added.
    """
    way = WAYS[variant]
    if not way.wanted():
        return Refused(f"switched off by {way.switch}=0")
    library = kernel_library()
    if isinstance(library, str):
        return Refused(library)
    graph = bound.program.graph
    read = _read(bound.kernels[operator.index], operator, variant, graph)
    if read is None:
        return Refused("what this operator does besides is not known here")
    calls, found = read
    if not found:
        return Refused(way.only)
    if not library.bytes and any(isinstance(item, ByteLinear) for item in found.values()):
        return Refused("the processor has no instructions for products in eight bits (AVX512-VNNI)")
    if any(slot <= FIRST_SCRATCH for call in calls.calls if call not in found for slot in (*call.reads(), *call.outputs)):
        return Refused("what this operator does besides has memory of its own")
    steps: list[Kernel] = []
    done = _done_with(found)
    for call in calls.calls:
        if call in done:
            continue
        if (item := found.get(call)) is None:
            steps.append(compile_call(call, bound.device))
            continue
        its = _POOLING if isinstance(item, pooling.Pooling) else way
        factors = _packed(item, its, bound, variant, library, weights)
        if isinstance(factors, str):
            return Refused(factors)
        entry = its.entry(library, item)
        kernel = RunKernel(entry.name, entry.address, _tensors(item), library, (*factors, its.numbers(item, graph, width)))
        steps.append(_step(item, graph, kernel, entry.call))
        if item.after is not None:
            steps.append(compile_call(item.after, bound.device))
    made = joined(steps, operator)
    why = _difference(operator, bound, made)
    return Refused(why) if why else made


def without_replaced(bound: BoundProgram, replaced: Mapping[int, int]) -> Slots:
    """The constants of ``bound`` without the weights that nobody reads once operators run by :func:`own_kernel`.

    Args:
        replaced: those operators, and the variant of each.
    """
    graph, constants = bound.program.graph, bound.constants.copy()
    gone: set[int] = set()
    others = {value for operator in graph.operators if operator.index not in replaced for value in operator.reads}
    for index, variant in sorted(replaced.items()):
        read = _read(bound.kernels[index], graph.operators[index], variant, graph)
        if read is None:
            continue
        calls, found = read
        gone.update(value for item in found.values() for value in item.replaced)
        # The weights of one may be the rows of another.
        others.update(slot for item in found.values() for slot in _tensors(item))
        # Beside what is replaced, an operator may have calls that read what that one has weights from.
        others.update(value for call in calls.calls if call not in found and call not in _done_with(found) for value in call.reads())
    for value in gone - others - set(graph.outputs):
        constants[value] = None
    return constants


@dataclass(frozen=True, slots=True)
class _Calls:
    """What a kernel does: calls, the views of values that those read, by slots of the operator's own, and what others read."""

    calls: tuple[Call, ...]
    windows: Mapping[int, Window]
    writes: tuple[int, ...]

    def made_for(self, call: Call) -> dict[int, Call]:
        """The calls that make what ``call`` reads and nobody else."""
        others = {value for other in self.calls if other is not call for value in other.reads()}.union(self.writes)
        return {value: other for other in self.calls for value in other.outputs if value in call.reads() and value not in others}


def _read(kernel: Kernel, operator: Operator, variant: int, graph: OpGraph) -> tuple[_Calls, Mapping[Call, Computed]] | None:
    """What ``kernel`` does for ``operator``, if it is nothing else, and what of it is computed by ``variant``."""
    if variant == Variant.OWN_PRODUCT and (whole := read_bytes(operator, graph)) is not None:
        return _Calls(operator.calls, {}, operator.writes), dict([whole])
    calls = _calls(kernel, operator)
    return None if calls is None else (calls, _found(calls, WAYS[variant], graph))


def _calls(kernel: Kernel, operator: Operator) -> _Calls | None:
    """What ``kernel`` does for ``operator``, if it is nothing else."""
    items = instructions_of(kernel)
    if items is None:
        return None
    windows = {item.slot: item for item in items if isinstance(item, Window) and item.slot <= FIRST_SCRATCH and item.of >= 0}
    # What is released is made by the calls, and is again.
    if any(not isinstance(item, CallOperator | Release) and item not in windows.values() for item in items):
        return None
    return _Calls(tuple(item.call for item in items if isinstance(item, CallOperator)), windows, operator.writes)


def _found(calls: _Calls, way: _Way, graph: OpGraph) -> dict[Call, Computed]:
    """What is computed so; and with it what is pooled, whatever the way."""

    def those(of: _Way) -> dict[Call, Computed]:
        return {call: item for call in calls.calls if (item := of.read(call, graph, calls)) is not None}

    found = those(way)
    return {**those(_POOLING), **found} if found else {}


def _done_with(found: Mapping[Call, Computed]) -> set[Call]:
    """The calls that need not run, since what they make is part of what others compute."""
    return {call for item in found.values() if isinstance(item, chain.Chain | Convolution | Linear | ByteLinear) for call in item.before}


def _packed(
    item: Computed, way: _Way, bound: BoundProgram, variant: int, library: Library, weights: Weights
) -> tuple[torch.Tensor, ...] | str:
    """Its weights, if it has any, also in ``weights`` from now on; or why they cannot be had."""
    if way.packed is None:
        return ()
    known = item.weights, variant, item.turned, item.groups
    if known in weights:
        return (weights[known],)
    plain: list[torch.Tensor] = []
    try:
        for slot in item.weights:
            given, expected = bound.constants[slot], bound.program.graph.values[slot].spec
            plain.append(given if given.layout is torch.strided else given.to_dense())
            if dtype_name(plain[-1].dtype) != expected.dtype or tuple(plain[-1].shape) != expected.shape:
                return f"its weights are {plain[-1].dtype}{tuple(plain[-1].shape)}; expected torch.{expected.dtype}{expected.shape}"
        weights[known] = one_copy(way.packed(item, plain, library), ())
    except Exception as error:
        # They take memory, Winograd's several times as much as what is packed otherwise.
        let_through(error)
        return f"its weights cannot be made ready: {first_line(error)}"
    return (weights[known],)


def _tensors(item: Computed) -> tuple[int, ...]:
    return item.source, item.made, *item.beside


def _step(item: Computed, graph: OpGraph, kernel: RunKernel, call: Callable[..., None]) -> Kernel:
    made = graph.values[item.made].spec
    given = (item.source, *item.beside)
    specs = {slot: graph.values[slot].spec for slot in given}
    checks = [Expect(slot, spec.shape, spec.strides, spec.dtype) for slot, spec in specs.items()]
    items: list[Instruction] = [*checks, kernel]
    over = item.made in item.beside
    if not over:
        items.insert(-1, Allocate(item.made, made.shape, made.strides, made.dtype))
    addresses, dtype = tuple(tensor.data_ptr() for tensor in kernel.fixed), getattr(torch, made.dtype)

    def run(slots: Slots) -> None:
        for check in checks:
            _look(check, slots[check.slot])
        if not over:
            slots[item.made] = torch.empty_strided(made.shape, made.strides, dtype=dtype, device="cpu")
        call(*(slots[slot].data_ptr() for slot in kernel.tensors), *addresses)

    return carrying(run, items)


def _look(check: Expect, tensor: torch.Tensor) -> None:
    """As the instruction does."""
    same = tuple(tensor.shape) == check.size and dtype_name(tensor.dtype) == check.dtype
    if not same or not same_strides(tensor, check.stride):
        found = f"{tensor.dtype}{tuple(tensor.shape)} with strides {tensor.stride()}"
        raise RuntimeError(f"value {check.slot} is {found}; expected {check.size} with {check.stride}")


def _difference(operator: Operator, bound: BoundProgram, made: Kernel) -> str:
    """Run an operator both ways on made-up inputs: what is wrong with the new way, empty if nothing."""
    graph, constants = bound.program.graph, bound.constants
    touched = [value for value in (*operator.reads, *operator.mutates) if constants[value] is None]

    def outputs(kernel: Kernel, given: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        slots: list[Any] = constants.copy()
        for value, tensor in given.items():
            slots[value] = tensor.clone() if value in operator.mutates else tensor
        kernel(slots)
        return [slots[value] for value in (*operator.writes, *operator.mutates)]

    try:
        given = {value: example_of(graph.values[value].spec, bound.device, place) for place, value in enumerate(touched)}
        with inference_mode(True):
            wanted, got = outputs(bound.kernels[operator.index], given), outputs(made, given)
    except Exception as error:
        let_through(error)
        return f"code of our own does not run: {first_line(error)}"
    if any(mine.stride() != theirs.stride() for mine, theirs in zip(got, wanted, strict=True)):
        return "code of our own returns other strides"
    agreement = compare(got, wanted)
    return "" if agreement.within_tolerance else f"code of our own computes something else: {agreement.reason}"
