"""Made-up tensors for trying one operator alone, and whether two lie in memory alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autosched.core.extents import lie_alike
from autosched.core.graph import TensorSpec
from autosched.runtime.thread_state import inference_mode


def example_of(spec: TensorSpec, device: torch.device, place: int) -> torch.Tensor:
    """A tensor like ``spec``, the same for the same ``place``: normal numbers; small ones in ``int8``, which holds weights; true or false.

    Zero for other integers, an index that always exists, and where several places share memory.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)
    generator = torch.Generator().manual_seed(place)
    with inference_mode(False):
        made = torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device=device)
        if dtype in (torch.int8, torch.bool) and 0 not in spec.strides:
            ends = (-9, 10) if dtype is torch.int8 else (0, 2)
            return made.copy_(torch.randint(*ends, spec.shape, generator=generator, device="cpu"))
        if not dtype.is_floating_point or dtype is torch.float4_e2m1fn_x2 or 0 in spec.strides:
            return torch.zeros(made.untyped_storage().nbytes() // made.itemsize, dtype=dtype, device=device).as_strided(
                spec.shape, spec.strides
            )
        return made.copy_(torch.randn(spec.shape, generator=generator, device="cpu").to(dtype))


def same_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether ``tensor`` lies in memory as ``strides`` say; those of dimensions with one element do not count."""
    return lie_alike(tensor.shape, tensor.stride(), strides)
