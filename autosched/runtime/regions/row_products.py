"""On a CPU: products of one row as the sums that Inductor writes loops for; it would call a library for the product itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autosched.core.graph import Operator, OpGraph
from autosched.core.program import Call, Ref
from autosched.core.row_products import BATCHED, LINEAR, matrix_of

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
    if call.target == LINEAR:
        made = call_of(aten.sum.dim_IntList, call_of(aten.mul.Tensor, call_of(aten.unsqueeze.default, wide[0], -2), wide[1]), [-1])
        if len(wide) > 2:
            made = call_of(aten.add.Tensor, made, wide[2])
        return converted(made, dtype)
    turned = call_of(aten.transpose.int, wide[1], 1, 2)
    # One row on the left makes rows, one column on the right makes columns.
    made = call_of(aten.sum.dim_IntList, call_of(aten.mul.Tensor, wide[0], turned), [-1])
    return converted(call_of(aten.unsqueeze.default, made, 2 if _matrix(call, values) == 0 else 1), dtype)


def _matrix(call: Call, graph: OpGraph) -> int | None:
    """The place of the matrix among the tensors; as the schema orders them, capture gives none of them by name."""
    if call.target not in (LINEAR, BATCHED) or call.kwargs or not all(isinstance(item, Ref) for item in call.args[:2]):
        return None
    return matrix_of(call.target, [graph.values[item.value].spec if isinstance(item, Ref) else None for item in call.args])
