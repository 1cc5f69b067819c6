"""Outputs that Inductor lays out otherwise than the model, copied into the model's strides: code after the model may call ``view`` on them.

Inductor keeps the strides that its own account of the operators gives an output, and for some layouts that account is not what the
operators do: of a transposed tensor, batch norm makes a row-major one, of channels-last tensors with sizes of 1, ``cat``.
"""

from __future__ import annotations

from collections.abc import Mapping

from autosched.core.extents import lie_alike, reach_of
from autosched.core.graph import OpGraph, TensorSpec, ValueRole
from autosched.core.program import Program, Ref
from autosched.runtime.inductor.units import Unit


def layout_units(source: Program, returned: Mapping[int, str], made: Mapping[str, TensorSpec], kind: str) -> dict[int, Unit]:
    """By output of ``source``, a unit that makes it anew, in memory of its own with the strides of ``source``.

    Args:
        returned: by output of ``source``, what is to be returned for it.
        made: the specs of those, as they came out.
        kind: of device.
    """
    written = {item.value for item in source.writes}
    leaves = dict.fromkeys(leaf.value for leaf in source.output_leaves if isinstance(leaf, Ref))
    graph, found = source.graph, dict[int, Unit]()
    for value in leaves:
        name = returned.get(value, "")
        if name in made and value not in written and _owns(graph, value) and _differs(graph.values[value].spec, made[name]):
            found[value] = _unit(value, name, graph.values[value].spec, kind)
    return found


def _owns(graph: OpGraph, value: int) -> bool:
    """Whether an output shares memory with no other value that leaves the model, nor with anything that is the caller's or the model's."""
    home = graph.values[value].storage
    sharing = sum(graph.values[item].storage == home for item in graph.outputs)
    return sharing == 1 and graph.values[home].role is ValueRole.INTERMEDIATE


def _differs(wanted: TensorSpec, made: TensorSpec) -> bool:
    """Whether a dense output has other strides where those matter. One with gaps is a part of something, and left as it comes."""
    if wanted.shape != made.shape or len(made.strides) != len(made.shape) or not _dense(wanted):
        return False
    return not lie_alike(wanted.shape, wanted.strides, made.strides)


def _dense(spec: TensorSpec) -> bool:
    """Whether its elements lie side by side, in whatever order of dimensions; not if it has none."""
    if spec.overlaps or spec.elements == 0:
        return False
    return spec.elements == reach_of(spec.shape, spec.strides, 1)


def _unit(value: int, name: str, spec: TensorSpec, kind: str) -> Unit:
    # Named in every module that Inductor writes.
    made, allocation = f"laid_out_{value}", f"empty_strided_{kind}({spec.shape!r}, {spec.strides!r}, torch.{spec.dtype})"
    lines = [f"{made} = {allocation}", f"torch.ops.aten.copy_.default({made}, slots[{name!r}])"]
    return Unit(f"layout.{value}", "inductor::clone.layout", allocation, lines, {name: None}, {made: made})
