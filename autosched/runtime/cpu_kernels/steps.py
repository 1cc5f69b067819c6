"""Kernels of operators that have something computed by code of our own (``ways``): bias, residual and limits before a result is written,
another activation after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from autosched.core.from_outside import let_through
from autosched.core.graph import Operator, OpGraph
from autosched.core.program import Call
from autosched.core.variants import Variant
from autosched.runtime.calls import Kernel, Slots, compile_call
from autosched.runtime.cpu_kernels import chain, pooling
from autosched.runtime.cpu_kernels.byte_linear import ByteLinear, read_bytes
from autosched.runtime.cpu_kernels.convolution import Convolution
from autosched.runtime.cpu_kernels.library import Library, kernel_library
from autosched.runtime.cpu_kernels.linear import Linear
from autosched.runtime.cpu_kernels.ways import POOLING, WAYS, Calls, Computed, Way
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
        its = POOLING if isinstance(item, pooling.Pooling) else way
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


def _read(kernel: Kernel, operator: Operator, variant: int, graph: OpGraph) -> tuple[Calls, Mapping[Call, Computed]] | None:
    """What ``kernel`` does for ``operator``, if it is nothing else, and what of it is computed by ``variant``."""
    if variant == Variant.OWN_PRODUCT and (whole := read_bytes(operator, graph)) is not None:
        return Calls(operator.calls, {}, operator.writes), dict([whole])
    calls = _calls(kernel, operator)
    return None if calls is None else (calls, _found(calls, WAYS[variant], graph))


def _calls(kernel: Kernel, operator: Operator) -> Calls | None:
    """What ``kernel`` does for ``operator``, if it is nothing else."""
    items = instructions_of(kernel)
    if items is None:
        return None
    windows = {item.slot: item for item in items if isinstance(item, Window) and item.slot <= FIRST_SCRATCH and item.of >= 0}
    # What is released is made by the calls, and is again.
    if any(not isinstance(item, CallOperator | Release) and item not in windows.values() for item in items):
        return None
    return Calls(tuple(item.call for item in items if isinstance(item, CallOperator)), windows, operator.writes)


def _found(calls: Calls, way: Way, graph: OpGraph) -> dict[Call, Computed]:
    """What is computed so; and with it what is pooled, whatever the way."""

    def those(of: Way) -> dict[Call, Computed]:
        return {call: item for call in calls.calls if (item := of.read(call, graph, calls)) is not None}

    found = those(way)
    return {**those(POOLING), **found} if found else {}


def _done_with(found: Mapping[Call, Computed]) -> set[Call]:
    """The calls that need not run, since what they make is part of what others compute."""
    return {call for item in found.values() if isinstance(item, chain.Chain | Convolution | Linear | ByteLinear) for call in item.before}


def _packed(
    item: Computed, way: Way, bound: BoundProgram, variant: int, library: Library, weights: Weights
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
