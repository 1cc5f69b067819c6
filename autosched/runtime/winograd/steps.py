"""Kernels of operators whose convolutions are computed by Winograd's algorithm: bias, residual and relu before a result is written, another
activation after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch

from autosched.core.from_outside import let_through
from autosched.core.graph import Operator, OpGraph
from autosched.core.program import Call
from autosched.core.variants import Variant
from autosched.runtime.calls import Kernel, Slots, compile_call
from autosched.runtime.examples import example_of, same_strides
from autosched.runtime.inductor.common import Refused, first_line
from autosched.runtime.instructions import Allocate, CallOperator, Expect, Instruction, Release, RunKernel, carrying, instructions_of
from autosched.runtime.kernels import BoundProgram, joined
from autosched.runtime.numerics import compare
from autosched.runtime.one_copy import one_copy
from autosched.runtime.thread_state import inference_mode
from autosched.runtime.winograd.calls import Convolution, read_convolution
from autosched.runtime.winograd.library import Library, winograd_library
from autosched.runtime.winograd.weights import transformed

OUTPUTS: Mapping[int, int] = {Variant.WINOGRAD_2: 2, Variant.WINOGRAD_4: 4}
"""Results of a tile in one dimension, by variant."""

Weights = MutableMapping[tuple[int, int], torch.Tensor]
"""Weights as the algorithm multiplies with them, by the value that holds them otherwise, and results of a tile."""


def winograd_kernel(operator: Operator, bound: BoundProgram, width: int, variant: int, weights: Weights) -> Kernel | Refused:
    """The operator with its convolutions by Winograd's algorithm, or why it cannot be had.

    Args:
        bound: the program that it belongs to, as it is bound on a CPU for ``width`` threads.
        variant: one of :data:`OUTPUTS`.
        weights: what was made of those in ``bound`` before; what is missing is added.
    """
    library = winograd_library()
    if isinstance(library, str):
        return Refused(library)
    calls = _calls(bound.kernels[operator.index])
    if calls is None:
        return Refused("what this operator does besides its convolution is not known here")
    graph = bound.program.graph
    found = {call: convolution for call in calls if (convolution := read_convolution(call, graph)) is not None}
    if not found:
        return Refused("only 3x3 convolutions of float32 with stride 1, one group and channels last are computed so")
    outputs = OUTPUTS[variant]
    for convolution in found.values():
        if why := _transform(convolution, bound, outputs, library, weights):
            return Refused(why)
    steps: list[Kernel] = []
    for call in calls:
        if (item := found.get(call)) is None:
            steps.append(compile_call(call, bound.device))
            continue
        steps.append(_step(item, graph, library, (weights[item.weight, outputs], geometry(item, graph, width, outputs))))
        if item.after is not None:
            steps.append(compile_call(item.after, bound.device))
    made = joined(steps, operator)
    why = _difference(operator, bound, made)
    return Refused(why) if why else made


def without_replaced(bound: BoundProgram, transformed: Collection[int]) -> Slots:
    """The constants of ``bound`` without the weights that nobody reads once ``transformed`` operators run by :func:`winograd_kernel`."""
    graph, constants = bound.program.graph, bound.constants.copy()
    calls = [call for index in sorted(transformed) for call in _calls(bound.kernels[index]) or ()]
    found = {call: item for call in calls if (item := read_convolution(call, graph)) is not None}
    others = {value for operator in graph.operators if operator.index not in transformed for value in operator.reads}
    # Beside a convolution, an operator may have calls that read what that one has weights from.
    others |= {value for call in calls if call not in found for value in call.reads()}
    for value in {item.weight for item in found.values()} - others - set(graph.outputs):
        constants[value] = None
    return constants


def geometry(convolution: Convolution, graph: OpGraph, width: int, outputs: int) -> torch.Tensor:
    """Numbers in the order of ``Geometry`` in ``convolution.cpp``, int64."""
    source, made = graph.values[convolution.source].spec, graph.values[convolution.made].spec
    batch, channels, height, wide = source.shape
    between = (source.strides[0], source.strides[2], source.strides[3])
    results = (made.shape[1], *convolution.padding, *made.shape[2:], int(convolution.relu))
    numbers = (outputs, width, batch, channels, height, wide, *between, *results)
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _calls(kernel: Kernel) -> tuple[Call, ...] | None:
    """What ``kernel`` does, if that is calls between values of the program and nothing else."""
    items = instructions_of(kernel)
    calls = [item.call for item in items or () if isinstance(item, CallOperator)]
    # What is released is made by the calls, and is again.
    others = [item for item in items or () if not isinstance(item, CallOperator | Release)]
    if items is None or others or any(slot < -1 for call in calls for slot in (*call.reads(), *call.outputs)):
        return None
    return tuple(calls)


def _transform(convolution: Convolution, bound: BoundProgram, outputs: int, library: Library, weights: Weights) -> str:
    """Have its weights in ``weights``; or why they cannot be had."""
    known = convolution.weight, outputs
    if known in weights:
        return ""
    packed: torch.Tensor = bound.constants[convolution.weight]
    expected = bound.program.graph.values[convolution.weight].spec.shape
    try:
        plain = packed if packed.layout is torch.strided else packed.to_dense()
        if plain.dtype != torch.float32 or tuple(plain.shape) != expected:
            return f"its weights are {plain.dtype}{tuple(plain.shape)}; expected torch.float32{expected}"
        weights[known] = one_copy(transformed(plain, outputs, library.lanes), ())
    except Exception as error:
        # They take several times the memory of what is packed.
        let_through(error)
        return f"its weights cannot be transformed: {first_line(error)}"
    return ""


def _step(convolution: Convolution, graph: OpGraph, library: Library, fixed: tuple[torch.Tensor, ...]) -> Kernel:
    entry = library.entries[convolution.bias is not None, convolution.residual is not None]
    source, bias, residual, slot = convolution.source, convolution.bias, convolution.residual, convolution.made
    made = graph.values[slot].spec
    given = [item for item in (source, bias, residual) if item is not None]
    checks = [Expect(item, graph.values[item].spec.shape, graph.values[item].spec.strides, made.dtype) for item in given]
    tensors = tuple(item for item in (source, slot, bias, residual) if item is not None)
    items: list[Instruction] = [*checks, RunKernel(entry.name, entry.address, tensors, library, fixed)]
    over = slot == residual
    if not over:
        items.insert(-1, Allocate(slot, made.shape, made.strides, made.dtype))
    addresses = tuple(item.data_ptr() for item in fixed)

    def run(slots: Slots) -> None:
        for check in checks:
            _look(check, slots[check.slot])
        if not over:
            slots[slot] = torch.empty_strided(made.shape, made.strides, dtype=torch.float32, device="cpu")
        entry.call(*(slots[item].data_ptr() for item in tensors), *addresses)

    return carrying(run, items)


def _look(check: Expect, tensor: torch.Tensor) -> None:
    """As the instruction does."""
    same = tuple(tensor.shape) == check.size and tensor.dtype == torch.float32
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
        return f"Winograd's algorithm does not run: {first_line(error)}"
    if any(mine.stride() != theirs.stride() for mine, theirs in zip(got, wanted, strict=True)):
        return "Winograd's algorithm returns other strides"
    agreement = compare(got, wanted)
    return "" if agreement.within_tolerance else f"Winograd's algorithm computes something else: {agreement.reason}"
