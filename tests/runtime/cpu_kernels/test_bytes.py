"""Products of whole numbers in eight bits, and the numbers that are made of their sums."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autosched
from autosched.capture.export import capture
from autosched.core.variants import Lowering, Variant
from autosched.runtime.cpu_kernels.library import kernel_library
from autosched.runtime.cpu_kernels.weights import of_bytes
from autosched.runtime.instructions import RunKernel, instructions_of
from autosched.runtime.kernels import BoundProgram
from autosched.runtime.regions.pieces import offered_variants
from tests.conformance.own_kernels import assert_instructions_and_lanes_agree, bound_with, save_with
from tests.runtime.cpu_kernels.test_halves import FOLLOWING, assert_rounded_once

PRODUCT = Variant.OWN_PRODUCT


@pytest.fixture(autouse=True)
def bytes_kernel(kernel: None) -> None:
    mine = kernel_library()
    assert not isinstance(mine, str)
    if not mine.bytes:
        pytest.skip("the processor does not multiply numbers in eight bits")


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """All that eight bits can be, the smallest and the largest more often."""
    made = torch.randint(-160, 160, shape, generator=torch.Generator().manual_seed(seed))
    return made.clamp(-128, 127).to(torch.int8)


class Rounded(nn.Module):
    """A linear layer of weights in eight bits and rows that are given so, as libraries spell it; what makes numbers of sums is optional."""

    def __init__(
        self, inputs: int, outputs: int, follows: nn.Module | None = None, *, dtype: torch.dtype = torch.float32, without: str = ""
    ) -> None:
        super().__init__()
        seeded = torch.Generator().manual_seed(1)
        self.register_buffer("weight", numbers(outputs, inputs, seed=2))
        self.register_buffer("scale", (torch.rand(outputs, generator=seeded) * 0.01 + 0.001).to(dtype))
        self.register_buffer("bias", torch.randn(outputs, generator=seeded).to(dtype))
        self.follows = follows or nn.Identity()
        self.dtype, self.without = dtype, without

    def forward(self, rows: torch.Tensor, scales: torch.Tensor) -> Any:
        made = torch._int_mm(rows.flatten(0, -2), self.weight.t())
        if "numbers" in self.without:
            return made
        made = made.to(self.dtype if self.dtype is torch.float64 else torch.float32)
        if "rows" not in self.without:
            made = made * scales.reshape(-1, 1)
        made = made.to(self.dtype)
        if "features" not in self.without:
            made = made * self.scale
        made = made.unflatten(0, rows.shape[:-1])
        return self.follows(made if "bias" in self.without else made + self.bias)


def given(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(*shape), torch.rand(*shape[:-1], 1, generator=torch.Generator().manual_seed(3)) * 0.01 + 0.001


def exact(model: Rounded, *inputs: torch.Tensor) -> torch.Tensor:
    dtype, model.dtype = model.dtype, torch.float64
    with torch.no_grad():
        made: torch.Tensor = model.to(torch.float64)(inputs[0], inputs[1].double())
    model.to(dtype).dtype = dtype
    return made


def kernels_of(bound: BoundProgram, index: int) -> list[str]:
    return [item.name for item in instructions_of(bound.kernels[index]) or () if isinstance(item, RunKernel)]


# Rows, inputs, outputs: sums by vectors and, where the processor has them, by tiles; blocks that are not full; few and many of each.
SHAPES = [(1, 16, 16), (5, 100, 40), (17, 64, 33), (33, 320, 70), (70, 36, 96), (130, 704, 48), (9, 64, 4096), (1100, 128, 24)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_exact_whatever_the_number_of_threads(shape: tuple[int, int, int]) -> None:
    rows, inputs, outputs = shape
    model, x = Rounded(inputs, outputs, without="numbers").eval(), given(rows, inputs)
    wanted = x[0].long() @ model.weight.long().t()
    found = capture(model, x, lowering=Lowering.REWRITTEN)
    for width in (1, 2, 3):
        bound, [index] = bound_with(found, PRODUCT, width)
        assert kernels_of(bound, index) == ["autosched_bytes0"]
        [got] = bound.run(list(x))
        assert got.dtype is torch.int32
        assert torch.equal(got.long(), wanted)


WITHOUT = [" ".join(left) for count in range(4) for left in itertools.combinations(("rows", "features", "bias"), count)]


@pytest.mark.parametrize("without", WITHOUT)
def test_numbers_are_made_as_the_calls_make_them(without: str) -> None:
    model, x = Rounded(72, 50, without=without).eval(), given(2, 13, 72)
    found = capture(model, x, lowering=Lowering.FUSED)
    bound, [index] = bound_with(found, PRODUCT)
    assert kernels_of(bound, index) == [f"autosched_bytes{3 - len(without.split())}"]
    assert torch.equal(bound.run(list(x))[0], model(*x))


@pytest.mark.parametrize("name", FOLLOWING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_they_are_rounded_once_when_all_is_done(dtype: torch.dtype, name: str) -> None:
    model, x = Rounded(64, 300, FOLLOWING[name], dtype=dtype).eval(), given(40, 64)
    found = capture(model, x, lowering=Lowering.FUSED)
    bound, offered = bound_with(found, PRODUCT)
    assert len(found.program.graph) == len(offered) == 1
    [got] = bound.run(list(x))
    assert got.dtype is dtype
    assert_rounded_once(got, exact(model, *x), 2e-6)


def test_the_whole_layer_is_one_operator_and_what_rounds_the_next_rows_another() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Rounded(64, 128, nn.GELU()), Rounded(128, 64)

        def forward(self, x: torch.Tensor) -> Any:
            for layer in (self.first, self.second):
                scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-7) / 127
                x = layer((x / scales).round().to(torch.int8), scales)
            return x

    model, x = Two().eval(), torch.randn(2, 10, 64)
    found = capture(model, (x,), lowering=Lowering.FUSED)
    bound, offered = bound_with(found, PRODUCT)
    assert len(found.program.graph) == 4
    assert len(offered) == 2
    assert torch.allclose(bound.run([x])[0], model(x), rtol=1e-5)
    assert_instructions_and_lanes_agree(bound, x)


def offered(model: nn.Module, *inputs: torch.Tensor) -> bool:
    found = capture(model.eval(), inputs, lowering=Lowering.FUSED)
    return any(PRODUCT in row for row in offered_variants(found.program, "cpu"))


def test_what_others_read_too_is_made() -> None:
    class Both(Rounded):
        def forward(self, rows: torch.Tensor, scales: torch.Tensor) -> Any:
            sums = torch._int_mm(rows, self.weight.t())
            made = sums * scales * self.scale
            return made + self.bias, made.sum(), sums.amax()

    model, x = Both(64, 48).eval(), given(20, 64)
    bound, _ = bound_with(capture(model, x, lowering=Lowering.FUSED), PRODUCT)
    for got, wanted in zip(bound.run(list(x)), model(*x), strict=True):
        assert torch.allclose(got, wanted)


def test_others_are_left_to_the_library() -> None:
    class Given(nn.Module):
        def forward(self, rows: torch.Tensor, weight: torch.Tensor) -> Any:
            return torch._int_mm(rows, weight.t())

    assert offered(Rounded(64, 48, without="numbers"), *given(20, 64))
    assert not offered(Rounded(66, 48, without="numbers"), *given(20, 66))
    assert not offered(Rounded(64, 15, without="numbers"), *given(20, 64))
    assert not offered(Given(), numbers(20, 64), numbers(48, 64))


def test_scales_in_another_dtype_stay_calls() -> None:
    model, x = Rounded(64, 48).eval(), given(20, 64)
    model.scale = model.scale.double()
    bound, _ = bound_with(capture(model, x, lowering=Lowering.FUSED), PRODUCT)
    [got] = bound.run(list(x))
    assert got.dtype is torch.float64
    assert torch.allclose(got, model(*x))


def test_weights_lie_as_the_kernel_reads_them() -> None:
    weight = numbers(20, 8)
    made = of_bytes(weight, 4)
    assert torch.equal(made[:16].view(torch.int8).reshape(2, 8, 4), weight[:8].reshape(8, 2, 4).transpose(0, 1))
    assert torch.equal(made[32:40].view(torch.int8).reshape(2, 4, 4), weight[16:].reshape(4, 2, 4).transpose(0, 1))
    assert torch.equal(made[40:], weight.sum(1, dtype=torch.int32) * -128)


def test_a_file_that_uses_them_is_loaded_and_follows_the_models_weights(tmp_path: Path) -> None:
    model, x = Rounded(64, 48).eval(), given(20, 64)
    save_with(tmp_path / "net.autosched", capture(model, x, lowering=Lowering.FUSED), PRODUCT)
    fast = autosched.load(tmp_path / "net.autosched", model, strict=True)
    with torch.no_grad():
        assert torch.equal(fast(*x), model(*x))
        model.weight.copy_(numbers(48, 64, seed=9))
        model.scale.mul_(2)
        assert torch.equal(fast(*x), model(*x))
