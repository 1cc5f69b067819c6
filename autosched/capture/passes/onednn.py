"""Which dtypes oneDNN has packed weights for on this processor. What PyTorch is asked is private, the same in PyTorch 2.11 to 2.15."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

_ASKED = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}


@lru_cache(maxsize=1)
def packable_dtypes() -> frozenset[str]:
    """Names of the dtypes whose weights are worth packing; none where PyTorch is built without oneDNN.

    Elsewhere products in sixteen bits are computed in float32, and their weights converted at each call whatever their layout.
    """
    if not torch._C._has_mkldnn:
        return frozenset()
    return frozenset({"float32", *(dtype for dtype, question in _ASKED.items() if _answered_yes(question))})


def _answered_yes(question: str) -> bool:
    operators: Any = torch.ops.mkldnn
    try:
        return bool(getattr(operators, question)())
    except (AttributeError, RuntimeError):
        return False
