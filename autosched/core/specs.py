"""What a graph says of a tensor."""

from __future__ import annotations

import torch

from autosched.core.graph import TensorSpec


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Shape, dtype and strides (none for opaque layouts)."""
    strides = tuple(tensor.stride()) if tensor.layout is torch.strided else ()
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), strides)
