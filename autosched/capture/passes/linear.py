"""A linear layer, whichever of ATen's spellings it has."""

from __future__ import annotations

from dataclasses import dataclass

from autosched.capture.draft import Node


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: ``source [..., inputs] @ weight [+ bias]``; ``by_rows`` if the weight is stored ``[inputs, outputs]``."""

    source: int
    weight: int
    bias: int | None
    by_rows: bool


def read_linear(node: Node) -> Linear | None:
    """The linear layer that ``node`` is, or None."""
    if node.target == "aten::linear.default":
        source, weight, bias = node.tensor("input"), node.tensor("weight"), node.tensor("bias")
        return Linear(source, weight, bias, False) if source is not None and weight is not None else None
    if node.target in ("aten::mm.default", "aten::matmul.default"):
        source, weight = node.tensor("self"), node.tensor("mat2" if node.kind == "aten::mm" else "other")
        return Linear(source, weight, None, True) if source is not None and weight is not None else None
    if node.target == "aten::addmm.default" and node.argument("beta") == 1 and node.argument("alpha") == 1:
        bias, source, weight = node.tensor("self"), node.tensor("mat1"), node.tensor("mat2")
        return Linear(source, weight, bias, True) if source is not None and weight is not None else None
    return None
