"""Fold what each feature of a convolution, a linear layer or a batch norm is multiplied with, and what is added to it, into its weight
and bias.

Frozen batch norms are spelled so in detectors, and layer scales in transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.batch_norm import is_fixed_norm
from autosched.capture.passes.convolution import read_convolution
from autosched.core.program import Ref

aten = torch.ops.aten
_DTYPES = ("float32", "float64")


@dataclass(frozen=True, slots=True)
class _Product:
    """A layer: its constants, and in which dimensions of the weight and of the result its features are."""

    weight: int
    bias: int | None
    in_weight: int
    in_result: int


def fold_channel_scales(draft: Draft) -> int:
    """``conv(x, w, b) * c`` becomes ``conv(x, w c, b c)``, and ``conv(x, w, b) + c`` becomes ``conv(x, w, b + c)``; how many did.

    ``c`` has a number for each feature. Where features are pictures or lines it may also be one number for all.
    """
    folded, plain = 0, set(draft.constants)
    while changed := _fold_once(draft, plain):
        # A sum may follow a product.
        folded += changed
    return folded


def _fold_once(draft: Draft, plain: set[int]) -> int:
    fixed, alone = draft.fixed_values(), draft.made_for_one()
    mapping: dict[int, int] = {}
    for node in draft.nodes:
        if node.target not in ("aten::mul.Tensor", "aten::add.Tensor") or (node.kind == "aten::add" and node.argument("alpha") != 1):
            continue
        pair = [node.argument("self"), node.argument("other")]
        for given, constant in (pair, pair[::-1]):
            made = given.value if isinstance(given, Ref) else None
            before = alone.get(made) if made is not None else None
            if made is None or before is None or (isinstance(constant, Ref) and constant.value not in fixed):
                continue
            product = _product(before, draft, fixed, plain)
            if product is not None and made not in mapping.values() and _of_features(draft, node, made, constant, product):
                plain.add(_write(draft, before, product, node.kind, constant))
                mapping[node.outputs[0]] = made
    draft.substitute(mapping)
    draft.remove_dead()
    return len(mapping)


def _product(node: Node, draft: Draft, fixed: set[int], plain: set[int]) -> _Product | None:
    found: _Product | None = None
    if node.target == "aten::linear.default":
        weight = node.tensor("weight")
        # One that is computed otherwise than here may be of numbers of few bits, which a loop reads as they are. One of one dimension makes
        # a number of each row.
        if weight in plain and len(draft.specs[weight].shape) == 2:
            found = _Product(weight, node.tensor("bias"), 0, len(draft.specs[node.outputs[0]].shape) - 1)
    elif is_fixed_norm(node, fixed):
        weight = node.tensor("weight")
        found = None if weight is None else _Product(weight, node.tensor("bias"), 0, 1)
    elif (convolution := read_convolution(node)) is not None and not (convolution.transposed and convolution.groups > 1):
        batched = len(draft.specs[convolution.source].shape) == len(draft.specs[convolution.weight].shape)
        found = _Product(convolution.weight, convolution.bias, int(convolution.transposed), int(batched))
    if found is None or found.weight not in fixed or not (found.bias is None or found.bias in fixed):
        return None
    return found


def _of_features(draft: Draft, node: Node, made: int, constant: object, product: _Product) -> bool:
    """Whether the constant has one number for each feature, or is one for all, and nothing else of the result changes."""
    result, given = draft.specs[node.outputs[0]], draft.specs[made]
    if isinstance(constant, int | float):
        # A layer of which one row is multiplied reads its weights where the model has them.
        return product.in_result < len(result.shape) - 1 and result.dtype == given.dtype and result.dtype in _DTYPES
    if not isinstance(constant, Ref):
        return False
    spec = draft.specs[constant.value]
    behind = len(result.shape) - product.in_result
    shape = (1,) * (behind - len(spec.shape)) + spec.shape
    wanted = (1,) * (len(shape) - behind) + (given.shape[product.in_result],) + (1,) * (behind - 1)
    alike = result.shape == given.shape and result.dtype == given.dtype == spec.dtype == draft.specs[product.weight].dtype
    return alike and spec.dtype in _DTYPES and shape == wanted


def _write(draft: Draft, node: Node, product: _Product, kind: str, constant: object) -> int:
    """Give ``node`` its new weight and bias; returns the weight."""

    def emit(op: OpOverload[..., Any], *args: object) -> Ref:
        return Ref(draft.prepare(node, "folded", op, *args))

    if isinstance(constant, Ref):
        flat = emit(aten.reshape.default, constant, [-1])
    else:
        flat = emit(aten.new_full.default, Ref(product.weight), [draft.specs[node.outputs[0]].shape[product.in_result]], constant)
    weight, bias = Ref(product.weight), None if product.bias is None else Ref(product.bias)
    if kind == "aten::mul":
        dimensions = len(draft.specs[product.weight].shape)
        column = emit(aten.reshape.default, flat, [-1 if place == product.in_weight else 1 for place in range(dimensions)])
        draft.specs[(scaled := emit(aten.mul.Tensor, weight, column)).value] = draft.specs[product.weight]
        weight, bias = scaled, None if bias is None else emit(aten.mul.Tensor, bias, flat)
    else:
        bias = flat if bias is None else emit(aten.add.Tensor, bias, flat)
    node.become(node, weight.value, None if bias is None else bias.value)
    return weight.value
