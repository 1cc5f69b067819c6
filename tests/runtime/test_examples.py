"""Made-up tensors lie in memory as their specs say, and hold numbers by which a wrong computation shows."""

from __future__ import annotations

import pytest
import torch

from autosched.core.graph import TensorSpec
from autosched.runtime.examples import example_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((4, 1, 64), (0, 64, 1)), ((2, 3), (1, 2)), ((5,), (3,)), ((3, 4), (1, 0)), ((0, 4), (0, 1)), ((), ())],
)
@pytest.mark.parametrize("dtype", ["float32", "int64", "int8", "bool", "bfloat16"])
def test_it_lies_in_memory_as_the_spec_says(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> None:
    made = example_of(TensorSpec(shape, dtype, strides), CPU, 0)
    assert made.shape == shape
    assert made.stride() == strides
    assert made.dtype == getattr(torch, dtype)


def test_weights_in_eight_bits_and_masks_are_not_all_alike_and_indices_exist() -> None:
    for dtype in ("int8", "bool"):
        assert example_of(TensorSpec((8, 8), dtype, (8, 1)), CPU, 0).unique().numel() > 1
    for dtype in ("int64", "int32", "uint8"):
        assert not example_of(TensorSpec((8, 8), dtype, (8, 1)), CPU, 0).any()
