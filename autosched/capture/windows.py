"""What a model writes through ``unfold``: as slices and views, for of what is written so PyTorch makes zeros beside the windows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from autosched.capture.functional import call_before, may_alias, tensor_of
from autosched.capture.sources import source_of
from autosched.core.errors import UnsupportedGraph

aten = torch.ops.aten


def spell_out_windows(graph: Graph) -> None:
    """Put other views for the windows of an exported graph that something is written through.

    *Why:* ``run_decompositions`` takes the gradient of ``unfold`` for its inverse, which knows nothing of the elements between the windows
    and adds up those that are in several.

    Raises:
        UnsupportedGraph: if such windows overlap, or the elements behind the last are too few to be one step.
    """
    for node in _written_through(graph):
        if node.target is not aten.unfold.default or (given := tensor_of(node.args[0])) is None or given.dim() == 0:
            continue
        dim, size, step = (item for item in node.args[1:4] if isinstance(item, int))
        with graph.inserting_before(node):
            other = _as_views(graph, node, given, dim % given.dim(), size, step)
        node.replace_all_uses_with(other)
        graph.erase_node(node)


def _as_views(graph: Graph, node: Node, given: torch.Tensor, dim: int, size: int, step: int) -> Node:
    length = given.shape[dim]
    count = (length - size) // step + 1
    # Of one window, how far away the next would be does not matter.
    step = size if count == 1 else step
    if step < size or count * step > length:
        source = source_of(node.meta.get("stack_trace"))
        raise UnsupportedGraph(
            f"the model writes through unfold({dim}, {size}, {step}) of a tensor of shape {list(given.shape)}"
            f"{f' at {source}' if source else ''}, whose windows overlap or leave less than a step behind the last. Expected windows "
            "that do neither. Write through slices."
        )
    shape = [*given.shape[:dim], count, step, *given.shape[dim + 1 :]]
    order = [place for place in range(len(shape)) if place != dim + 1] + [dim + 1]
    whole = call_before(graph, node, aten.slice.Tensor, (node.args[0], dim, 0, count * step))
    cut = call_before(graph, node, aten.view.default, (whole, shape))
    windows = call_before(graph, node, aten.slice.Tensor, (cut, dim + 1, 0, size))
    return call_before(graph, node, aten.permute.default, (windows, order))


def _written_through(graph: Graph) -> list[Node]:
    """The nodes whose results share memory with what an operator writes, as far as its arguments tell; in the order of the graph."""
    pending = [item for node in graph.nodes for item in _written(node)]
    found: set[Node] = set()
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += may_alias(node)
    return [node for node in graph.nodes if node in found]


def _written(node: Node) -> Iterator[Node]:
    if not isinstance(node.target, OpOverload):
        return
    for place, argument in enumerate(node.target._schema.arguments):
        item = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(item, Node):
            yield item
