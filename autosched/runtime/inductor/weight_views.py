"""Outputs of a program that are views of the model's own tensors, such as the first rows of a table.

Inductor would take the tensor for an argument and leave the view to its caller. So the compiled code knows nothing of such outputs, and
units of their own make them.
"""

from __future__ import annotations

import hashlib

import torch

from autosched.core.graph import ValueRole
from autosched.core.program import Program
from autosched.runtime.inductor.source import Unrecognised
from autosched.runtime.inductor.units import Unit
from autosched.runtime.kernels import BoundProgram
from autosched.runtime.thread_state import inference_mode


def weight_views(program: Program) -> dict[int, int]:
    """The outputs of ``program`` that are views of the tensors of its bindings: value, and that of the binding."""
    values = program.graph.values
    own = {binding.value for binding in program.bindings}
    made = (values[value] for value in program.graph.outputs if values[value].role is not ValueRole.CONSTANT)
    return {item.index: item.storage for item in made if item.storage in own}


def weight_view_units(bound: BoundProgram) -> dict[int, Unit]:
    """For each of :func:`weight_views` a unit that makes it, of a tensor called :func:`weight_name`.

    Raises:
        Unrecognised: if one is no window of the tensor, in its dtype.
    """
    wanted = weight_views(bound.program)
    if not wanted:
        return {}
    graph, slots = bound.program.graph, bound.constants.copy()
    with inference_mode(True):
        for operator, kernel in zip(graph.operators, bound.kernels, strict=True):
            touched = {graph.values[value].storage for value in (*operator.reads, *operator.writes)}
            if touched <= set(wanted.values()):
                kernel(slots)
    return {value: _unit(value, of, slots) for value, of in wanted.items()}


def weight_name(value: int) -> str:
    """What the tensor of a binding, a value of the source program, is called in units of :func:`weight_view_units`."""
    return f"weight{value}"


def _unit(value: int, of: int, slots: list[torch.Tensor]) -> Unit:
    view, whole = slots[value], slots[of]
    if view.dtype != whole.dtype or view.is_conj() or view.is_neg():
        raise Unrecognised(f"an output is a view of a weight as another dtype, {view.dtype}")
    window = tuple(view.shape), view.stride(), view.storage_offset() - whole.storage_offset()
    target = f"inductor::view.{hashlib.sha256(repr(window).encode()).hexdigest()[:12]}"
    name, text = f"view_of_weight.{value}", "reinterpret_tensor({}, {}, {}, {})".format(f"slots['{weight_name(of)}']", *window)
    return Unit(name, target, text, [], {weight_name(of): None}, {name: text})
