"""An output is judged by the coarsest dtype on its way, whatever dtype it ends in; what only weights and inputs have counts not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.variants import Lowering
from autosched.runtime.numerics import compare
from autosched.runtime.rounding import coarsest_of


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layer(x)
        return y.float() * 2, x * 2, y.argmax(1)


class Weights(nn.Module):
    """Few bits in weights and inputs alone: both are exact."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-4, 4, (8, 8)).to(dtype))

    def forward(self, x: Any) -> Any:
        return x.float() @ self.weight.t().to(torch.float32)


class Eight(nn.Module):
    """Activations rounded to ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Any) -> Any:
        return (x * 3).to(self.dtype).to(torch.float32) * 0.5


class FakeQuantised(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127) + 1, (x * 2).round() / 2


def coarsest(model: nn.Module, *args: torch.Tensor, lowering: Lowering = Lowering.ATEN) -> tuple[torch.dtype | None, ...]:
    return coarsest_of(capture(model, args, lowering=lowering).program.graph)


@pytest.mark.parametrize("lowering", [Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED])
def test_an_output_made_in_bfloat16_is_judged_so_and_its_neighbour_is_not(lowering: Lowering) -> None:
    assert coarsest(Autocast(), torch.randn(4, 8), lowering=lowering) == (torch.bfloat16, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_weights_and_inputs_in_few_bits_are_exact(dtype: torch.dtype) -> None:
    x = torch.randn(4, 8)
    assert coarsest(Weights(dtype), x) == (torch.float32,)
    assert coarsest(Weights(dtype), x.bfloat16()) == (torch.float32,)


@pytest.mark.parametrize(
    ("dtype", "judged"),
    [
        (torch.int8, torch.bfloat16), (torch.float8_e4m3fn, torch.float8_e4m3fn), (torch.float8_e5m2, torch.float8_e5m2),
        (torch.float16, torch.float16), (torch.float64, torch.float32),
    ],
)  # fmt: skip
def test_rounded_activations_decide(dtype: torch.dtype, judged: torch.dtype) -> None:
    assert coarsest(Eight(dtype), torch.randn(4, 8)) == (judged,)


def test_rounding_to_steps_counts_although_the_dtype_stays() -> None:
    assert coarsest(FakeQuantised(), torch.randn(4, 8)) == (torch.bfloat16, torch.bfloat16)


def test_a_coarser_way_allows_more_and_a_finer_one_not_less() -> None:
    reference = torch.linspace(1, 2, 100)
    off = reference * 1.01
    assert not compare([off], [reference]).within_tolerance
    assert not compare([off], [reference], coarsest=[torch.float32]).within_tolerance
    assert not compare([off], [reference], coarsest=[None]).within_tolerance
    assert compare([off], [reference], coarsest=[torch.bfloat16]).within_tolerance
    assert not compare([reference * 1.2], [reference], coarsest=[torch.bfloat16]).within_tolerance
    assert compare([off.bfloat16()], [reference.bfloat16()], coarsest=[torch.float32]).within_tolerance
    # Integers are equal or not.
    assert not compare([torch.tensor([3])], [torch.tensor([4])], coarsest=[torch.bfloat16]).within_tolerance


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_floats_of_eight_bits_may_be_one_step_apart_and_no_more(dtype: torch.dtype) -> None:
    reference = torch.tensor([1.0, 0.5, -8.0]).to(dtype)
    bits = reference.view(torch.uint8)
    same = compare([reference.clone()], [reference])
    assert same.bitwise
    assert same.within_tolerance
    step = compare([(bits + 1).view(dtype)], [reference])
    assert step.within_tolerance
    assert not step.bitwise
    assert not compare([(bits + 3).view(dtype)], [reference]).within_tolerance
    nan = torch.full((3,), float("nan")).to(dtype)
    assert not compare([nan], [reference]).within_tolerance


def test_what_has_no_arithmetic_at_all_must_be_equal() -> None:
    four = torch.randint(0, 256, (8,), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    other = (four.view(torch.uint8) ^ 1).view(torch.float4_e2m1fn_x2)
    assert compare([four.clone()], [four]).bitwise
    assert not compare([other], [four]).within_tolerance
    scales = torch.tensor([1.0, 2.0, 4.0]).to(torch.float8_e8m0fnu)
    assert compare([scales.clone()], [scales]).bitwise
    assert not compare([scales.float().flip(0).to(scales.dtype)], [scales]).within_tolerance
