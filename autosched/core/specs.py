"""What a graph says of a tensor."""

from __future__ import annotations

import torch

from autosched.core.graph import TensorSpec

TENSOR_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Shape, dtype and strides (none for opaque layouts)."""
    strides = tuple(tensor.stride()) if tensor.layout is torch.strided else ()
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), strides)


def is_dense(spec: TensorSpec) -> bool:
    """Whether its elements lie one behind the other."""
    if len(spec.strides) != len(spec.shape):
        return False
    step = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def only_adds_to_tensors(tensor: torch.Tensor) -> bool:
    """Whether its class is another, of a library's own (an image that knows what it is), around the memory of a plain tensor.

    What a model computes from one may be of that class, too, so no schedule takes it. Those that PyTorch hands its operators to
    (fake and quantised tensors) have no such memory.
    """
    kind = type(tensor)
    return kind not in TENSOR_TYPES and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
