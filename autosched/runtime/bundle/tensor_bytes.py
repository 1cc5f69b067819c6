"""Tensors of dtypes that not every safetensors has a name for, as plain bytes in its files."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_NAMED = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
        torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
    }
)  # fmt: skip


def to_stored(tensor: torch.Tensor) -> torch.Tensor:
    """What to write for a dense ``tensor``: itself, or its bytes ``[n]`` if its dtype has no name."""
    return tensor if tensor.dtype in _NAMED else tensor.contiguous().reshape(-1).view(torch.uint8)


def from_stored(stored: torch.Tensor, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of :func:`to_stored`, for the dtype (by name) and shape that are expected; what is no such bytes comes back as it is."""
    wanted: torch.dtype = getattr(torch, dtype)
    if wanted in _NAMED or stored.dtype is not torch.uint8 or stored.shape != (math.prod(shape) * wanted.itemsize,):
        return stored
    # Read from a file, they may begin anywhere; a copy does not.
    return stored.clone().view(wanted).reshape(tuple(shape))
