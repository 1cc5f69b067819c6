"""On a CPU: products of one row as the sums that Inductor writes loops for; it would call a library for the product itself."""

from __future__ import annotations

from typing import Any

import torch

from autosched.core.graph import Operator, OpGraph
from autosched.core.program import Call, Ref
from autosched.core.row_products import LINEAR, is_row_product

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def row_product(call: Call, graph: OpGraph) -> tuple[int, int, int | None] | None:
    """The values of a product's row, matrix and bias; ``None`` if ``call`` is no product of one row."""
    if call.target != LINEAR:
        return None
    # As the schema orders them; capture gives none of them by name.
    given = (*call.args, None)[:3]
    if call.kwargs or not isinstance(given[0], Ref) or not isinstance(given[1], Ref):
        return None
    source, weight, bias = given[0].value, given[1].value, given[2].value if isinstance(given[2], Ref) else None
    specs = [graph.values[value].spec if value is not None else None for value in (source, weight, bias)]
    assert specs[0] is not None
    assert specs[1] is not None
    return (source, weight, bias) if is_row_product(call.target, specs[0], specs[1], specs[2]) else None


def has_row_product(operator: Operator, graph: OpGraph) -> bool:
    """Whether one of its calls is one."""
    return any(row_product(call, graph) is not None for call in operator.calls)


def add_row_product(graph: torch.fx.Graph, row: Any, matrix: Any, bias: Any | None, dtype: torch.dtype) -> Any:
    """Append ``row [.., inputs] @ matrix [outputs, inputs].T (+ bias)`` to ``graph``, summed in float32 or wider, as the libraries do.

    Args:
        row, matrix, bias: nodes of ``graph``.

    Returns:
        The node of the product, of ``dtype``.
    """
    aten = torch.ops.aten
    wide = _WIDE.get(dtype)

    def widened(node: Any) -> Any:
        return graph.call_function(torch.ops.prims.convert_element_type.default, (node, wide)) if wide is not None else node

    factors = graph.call_function(aten.mul.Tensor, (graph.call_function(aten.unsqueeze.default, (widened(row), -2)), widened(matrix)))
    made = graph.call_function(aten.sum.dim_IntList, (factors, [-1]))
    if bias is not None:
        made = graph.call_function(aten.add.Tensor, (made, widened(bias)))
    return graph.call_function(torch.ops.prims.convert_element_type.default, (made, dtype)) if wide is not None else made
