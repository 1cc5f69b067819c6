"""On a CPU: products of one row as the sums that Inductor writes loops for; it would call a library for the product itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autosched.core.graph import Operator, OpGraph
from autosched.core.program import Call, Ref
from autosched.core.row_products import BATCHED, LINEAR, matrix_of

# As many as a vector register of AVX512 holds, of float32 or of two bytes: Inductor's loops step by a register of the narrowest floats.
_BLOCK, _LOW_BLOCK = 16, 32
_BLOCKS = 4  # two gain less, eight no more
# Below Inductor's own limits, of 4 reads and 30 instructions; a call is a few.
_MOST_READ, _MOST_CALLS = 3, 8
_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def is_row_product(call: Call, graph: OpGraph) -> bool:
    """Whether ``call`` is a product of a matrix with one row."""
    return _matrix(call, graph) is not None


def has_row_product(operator: Operator, graph: OpGraph) -> bool:
    """Whether one of its calls is one."""
    return any(is_row_product(call, graph) for call in operator.calls)


def add_row_product(graph: torch.fx.Graph, nodes: Mapping[int, torch.fx.Node], call: Call, values: OpGraph) -> torch.fx.Node:
    """Append a product of one row to ``graph``, summed in float32 or wider, as the libraries do.

    Args:
        nodes: of the values that ``call`` reads.

    Returns:
        The node of the product.
    """
    aten: Any = torch.ops.aten
    operands = [item.value for item in call.args if isinstance(item, Ref)]
    dtype: torch.dtype = getattr(torch, values.values[operands[0]].spec.dtype)

    def call_of(overload: Any, *arguments: Any) -> torch.fx.Node:
        return graph.call_function(overload, arguments)

    def converted(node: torch.fx.Node, wanted: torch.dtype) -> torch.fx.Node:
        return call_of(torch.ops.prims.convert_element_type.default, node, wanted) if dtype in _WIDE else node

    wide = [converted(nodes[value], _WIDE.get(dtype, dtype)) for value in operands]
    inputs = values.values[operands[0]].spec.shape[-1]
    if call.target == LINEAR:
        made = _sums(graph, call_of(aten.unsqueeze.default, wide[0], -2), wide[1], inputs, dtype)
        if len(wide) > 2:
            made = call_of(aten.add.Tensor, made, wide[2])
        return converted(made, dtype)
    turned = call_of(aten.transpose.int, wide[1], 1, 2)
    # One row on the left makes rows, one column on the right makes columns.
    made = _sums(graph, wide[0], turned, values.values[operands[0]].spec.shape[2], dtype)
    return converted(call_of(aten.unsqueeze.default, made, 2 if _matrix(call, values) == 0 else 1), dtype)


def _sums(graph: torch.fx.Graph, first: torch.fx.Node, second: torch.fx.Node, inputs: int, dtype: torch.dtype) -> torch.fx.Node:
    """Append the sums of ``first * second`` over their last dimension of ``inputs``.

    Inductor's loop adds to one vector register, and each addition waits for the one before. Numbers from a cache come faster than that,
    so neighbouring blocks are added up before they reach the register.
    """
    aten: Any = torch.ops.aten
    length = _BLOCKS * (_LOW_BLOCK if dtype in _WIDE else _BLOCK)
    if inputs % length or not (_is_read_often(first) and _is_read_often(second)):
        return graph.call_function(aten.sum.dim_IntList, (graph.call_function(aten.mul.Tensor, (first, second)), [-1]))
    shape = [inputs // length, _BLOCKS, length // _BLOCKS]
    split = [graph.call_function(aten.unflatten.int, (node, -1, shape)) for node in (first, second)]
    added: list[torch.fx.Node] = []
    for place in range(_BLOCKS):
        blocks = [graph.call_function(aten.select.int, (node, -2, place)) for node in split]
        added.append(graph.call_function(aten.mul.Tensor, tuple(blocks)))
    while len(added) > 1:
        pairs = zip(added[::2], added[1::2], strict=True)
        added = [graph.call_function(aten.add.Tensor, pair) for pair in pairs]
    return graph.call_function(aten.sum.dim_IntList, (added[0], [-2, -1]))


def _is_read_often(node: torch.fx.Node) -> bool:
    """Whether Inductor computes ``node`` anew for each of several readers. Of much work it would keep the wide result in memory instead."""
    found: dict[torch.fx.Node, None] = {}
    pending = [node]
    while pending:
        one = pending.pop()
        found[one] = None
        pending += [item for item in one.all_input_nodes if item not in found]
    given = sum(item.op == "placeholder" for item in found)
    return given <= _MOST_READ and len(found) - given <= _MOST_CALLS


def _matrix(call: Call, graph: OpGraph) -> int | None:
    """The place of the matrix among the tensors; as the schema orders them, capture gives none of them by name."""
    if call.target not in (LINEAR, BATCHED) or call.kwargs or not all(isinstance(item, Ref) for item in call.args[:2]):
        return None
    return matrix_of(call.target, [graph.values[item.value].spec if isinstance(item, Ref) else None for item in call.args])
