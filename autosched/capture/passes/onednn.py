"""What oneDNN can do on this processor. What PyTorch is asked is private, the same in PyTorch 2.11 to 2.15."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from autosched.capture.draft import Draft, Node, is_dense
from autosched.core.program import Ref

_ASKED = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}


@lru_cache(maxsize=1)
def packable_dtypes() -> frozenset[str]:
    """Names of the dtypes whose weights are worth packing; none where PyTorch is built without oneDNN.

    Elsewhere products in sixteen bits are computed in float32, and their weights converted at each call whatever their layout.
    """
    if not torch._C._has_mkldnn:
        return frozenset()
    return frozenset({"float32", *(dtype for dtype, question in _ASKED.items() if _answered_yes(question))})


def as_dense(draft: Draft, node: Node, constant: int | None) -> Ref | None:
    """``constant`` for an operator of oneDNN's that stands for ``node``; a copy that the prologue makes where it has gaps or is transposed.

    Biases are handed over by their address alone, and so are the weights of recurrent layers: oneDNN would read what lies behind the first
    number, or behind the end.
    """
    if constant is None or is_dense(draft.specs[constant]):
        return None if constant is None else Ref(constant)
    made = draft.fresh()
    layout: dict[str, object] = {"memory_format": torch.contiguous_format}
    draft.prologue.append(Node(torch.ops.aten.clone.default, (Ref(constant),), layout, (made,), f"{node.name}_dense", node.source))
    return Ref(made)


@lru_cache(maxsize=1)
def adds_to_one_pixel() -> bool:
    """Whether a packed convolution whose picture is one pixel can add to its result: that of PyTorch 2.11 cannot."""
    operators: Any = torch.ops.mkldnn
    pixel, weight = torch.zeros(1, 4, 1, 1, device="cpu"), torch.zeros(4, 4, 1, 1, device="cpu")
    geometry = ([0, 0], [1, 1], [1, 1], 1)
    try:
        packed = operators._reorder_convolution_weight(weight, *geometry, [1, 4, 1, 1])
        operators._convolution_pointwise.binary(pixel, pixel, packed, None, *geometry, "add", 1.0, None, [], None)
    except RuntimeError:
        return False
    return True


def _answered_yes(question: str) -> bool:
    operators: Any = torch.ops.mkldnn
    try:
        return bool(getattr(operators, question)())
    except (AttributeError, RuntimeError):
        return False
