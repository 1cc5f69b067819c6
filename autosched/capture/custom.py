"""What a custom operator must show when it runs, and the layouts it is owed.

Its schema is its owner's word (``core.custom_operators.why_unfit`` reads it). Here it is run: twice on the same tensors, which must stay
as they are, with the same bits coming out. And it may read memory by strides that nobody declared, so it gets those of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from autosched.capture.arguments import refs_in
from autosched.capture.draft import Draft, Node
from autosched.capture.passes.identities import same_layout
from autosched.capture.passes.output_layout import format_of
from autosched.core.custom_operators import is_custom
from autosched.core.errors import UnsupportedGraph
from autosched.core.graph import TensorSpec
from autosched.core.program import Ref

Layouts = Mapping[str, tuple[TensorSpec, ...]]
"""For each custom call by name, the spec of each tensor it is given, in order."""


def custom_calls(draft: Draft) -> list[Node]:
    """The calls of the body that are custom operators."""
    return [node for node in draft.nodes if is_custom(node.kind)]


def run_twice(node: Node, tensors: Mapping[int, torch.Tensor], run: Callable[[], list[object]]) -> list[object]:
    """For ``Draft.observe``: what ``run`` returns; a custom operator is run twice.

    Raises:
        UnsupportedGraph: for one that changes what it is given, returns memory of it, or does not give the same bits again.
    """
    if not is_custom(node.kind):
        return run()
    given = {value: tensors[value] for value in node.reads()}
    before = {value: tensor.clone() for value, tensor in given.items()}
    made, again = run(), run()
    place = f"{node.kind} at {node.source or 'a place export did not record'} is a custom operator that"
    if any(not _same_bits(given[value], tensor) for value, tensor in before.items()):
        raise UnsupportedGraph(f"{place} changes its arguments, although its schema does not say so. Return new tensors instead.")
    homes = {tensor.untyped_storage().data_ptr() for tensor in given.values() if tensor.numel()}
    outputs = [item for item in made if isinstance(item, torch.Tensor)]
    if any(item.numel() and item.untyped_storage().data_ptr() in homes for item in outputs):
        raise UnsupportedGraph(f"{place} returns memory of its arguments, although its schema does not say so. Return a copy.")
    if any(not _same_bits(one, other) for one, other in zip(outputs, (item for item in again), strict=True)):
        raise UnsupportedGraph(
            f"{place} gave two results for the same tensors, so no schedule can be checked; expected the same bits again. Make it "
            "deterministic, or capture the model around it."
        )
    return made


def _same_bits(one: torch.Tensor, other: object) -> bool:
    if not isinstance(other, torch.Tensor) or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(_bytes_of(one), _bytes_of(other))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def layouts_of(draft: Draft) -> Layouts:
    """How what custom operators are given is laid out now."""
    return {node.name: tuple(draft.specs[value] for value in _given(node)) for node in custom_calls(draft)}


def restore_custom_layouts(draft: Draft, wanted: Layouts) -> int:
    """A copy before each custom operator of what a rewrite has laid out otherwise; returns how many.

    ``passes.views.may_give_strides_back`` keeps rewrites from changing layouts that no copy brings back.
    """
    restored = 0
    nodes: list[Node] = []
    for node in draft.nodes:
        if is_custom(node.kind):
            mapping: dict[int, int] = {}
            for value, spec in zip(_given(node), wanted[node.name], strict=True):
                layout = None if value in mapping or same_layout(draft.specs[value], spec) else format_of(spec)
                if layout is not None:
                    mapping[value] = draft.fresh()
                    options: dict[str, object] = {"memory_format": layout}
                    copy = torch.ops.aten.clone.default
                    nodes.append(Node(copy, (Ref(value),), options, (mapping[value],), f"{node.name}_layout", node.source))
            node.substitute(mapping)
            restored += len(mapping)
        nodes.append(node)
    draft.nodes = nodes
    return restored


def _given(node: Node) -> list[int]:
    return [*refs_in(list(node.args)), *refs_in(list(node.kwargs.values()))]
