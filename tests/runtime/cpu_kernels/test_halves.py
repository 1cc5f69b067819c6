"""Products and attention in sixteen bits: sums are float32, and rounded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autosched
from autosched.capture.export import Captured, capture
from autosched.core.variants import Lowering, Variant
from autosched.pipeline.inductor_capture import capture_inductor
from autosched.runtime.cpu_kernels.weights import of_halves
from autosched.runtime.instructions import RunKernel, instructions_of
from autosched.runtime.regions.pieces import offered_variants
from tests.conformance.own_kernels import assert_instructions_and_lanes_agree, bound_with, save_with
from tests.runtime.cpu_kernels.test_attention import CASES, Block, Net, inputs_of

HALVES = (torch.bfloat16, torch.float16)
PRODUCT, ATTENTION = Variant.OWN_PRODUCT, Variant.OWN_ATTENTION

pytestmark = [pytest.mark.usefixtures("kernel"), pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])]


def assert_rounded_once(got: torch.Tensor, exact: torch.Tensor, error: float) -> None:
    """Whether ``got`` is ``exact``, float64, but for half a step of its dtype, and for what sums in float32 may be off: ``error``."""
    step = torch.finfo(got.dtype)
    allowed = exact.abs() * (step.eps / 2) + step.smallest_normal * step.eps + error
    assert bool(((got.double() - exact).abs() <= allowed).all())


def layer(inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).eval()


def rows_of(rows: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)


def exact(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    dtype = next((parameter.dtype for parameter in model.parameters()), None)
    with torch.no_grad():
        made = model.double()(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs))
    if dtype is not None:
        model.to(dtype)
    return made


# Rows, inputs, outputs: blocks and vectors that are not full, more rows than are worked on at a time, few and many of each.
SHAPES = [
    (1, 16, 16), (3, 16, 40), (13, 48, 80), (57, 130, 33), (2, 1536, 48), (200, 64, 96), (12, 48, 4096), (700, 18, 17), (600, 32, 4096),
]  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_rounded_once(shape: tuple[int, int, int], bias: bool, dtype: torch.dtype) -> None:
    rows, inputs, outputs = shape
    model, x = layer(inputs, outputs, dtype, bias=bias), rows_of(rows, inputs, dtype)
    found = capture(model, (x,), lowering=Lowering.REWRITTEN)
    bound, [index] = bound_with(found, PRODUCT, 2)
    name = "autosched_halves" + "_bias" * bias
    assert any(isinstance(item, RunKernel) and item.name == name for item in instructions_of(bound.kernels[index]) or ())
    [got] = bound.run([x])
    assert got.dtype == dtype
    assert_rounded_once(got, exact(model, x), 2e-6)


def test_no_bit_depends_on_the_number_of_threads(dtype: torch.dtype) -> None:
    """Whether features or rows are divided among them."""
    for rows, inputs, outputs in ((12, 48, 16384), (900, 96, 64)):
        x = rows_of(rows, inputs, dtype)
        found = capture(layer(inputs, outputs, dtype), (x,), lowering=Lowering.REWRITTEN)
        outputs_of = [bound_with(found, PRODUCT, width)[0].run([x])[0] for width in (1, 2, 3, 8)]
        assert all(torch.equal(outputs_of[0], other) for other in outputs_of[1:])


FOLLOWING: dict[str, nn.Module] = {
    "relu": nn.ReLU(), "silu": nn.SiLU(), "gelu": nn.GELU(), "gelu by tanh": nn.GELU(approximate="tanh"), "tanh": nn.Tanh(),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWING)
def test_what_follows_is_done_before_a_result_is_rounded(name: str, dtype: torch.dtype) -> None:
    x, model = rows_of(20, 64, dtype), nn.Sequential(layer(64, 512, dtype), FOLLOWING[name]).eval()
    for found in (capture(model, (x,), lowering=Lowering.REWRITTEN), capture_inductor(model, (x,))):
        assert isinstance(found, Captured)
        bound, offered = bound_with(found, PRODUCT)
        assert offered
        assert_rounded_once(bound.run([x])[0], exact(model, x), 2e-6)


def test_every_number_is_read_and_written_as_it_is(dtype: torch.dtype) -> None:
    """Multiplied with one; those that are too small to be normal may become nothing where the processor multiplies bfloat16 itself."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = every[every.isfinite()]
    x = x[: x.numel() // 16 * 16].reshape(-1, 16)
    model = layer(16, 16, dtype, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(16))
    [got] = bound_with(capture(model, (x,), lowering=Lowering.REWRITTEN), PRODUCT)[0].run([x])
    normal = (x.abs() >= torch.finfo(dtype).smallest_normal) | (x == 0)
    assert torch.equal(got[normal], x[normal])
    small = got[~normal]
    assert bool(((small == x[~normal]) | (small == 0)).all())
    assert dtype is torch.bfloat16 or torch.equal(got, x)


def test_numbers_that_are_not_finite_and_results_too_large(dtype: torch.dtype) -> None:
    model, x = layer(64, 48, dtype), rows_of(20, 64, dtype)
    x[3, 5], x[7, 0] = float("nan"), float("inf")
    x[9] = torch.finfo(dtype).max
    with torch.no_grad():
        # Some products are too large: no others may make a sum of them smaller again, in whatever order they are added up.
        model.weight[:24].abs_()
        model.weight[24:].abs_().neg_()
    [got] = bound_with(capture(model, (x,), lowering=Lowering.REWRITTEN), PRODUCT)[0].run([x])
    with torch.no_grad():
        wanted = model(x)
    assert got[3].isnan().all()
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.isinf(), wanted.isinf())
    assert torch.equal(got.nan_to_num() > 0, wanted.nan_to_num() > 0)
    assert torch.allclose(got[:3], wanted[:3], rtol=torch.finfo(dtype).eps)


def test_instructions_do_what_the_kernels_do_also_without_the_interpreter(dtype: torch.dtype) -> None:
    x = torch.randn(2, 33, 64).to(dtype)
    found = capture(Block().to(dtype).eval(), (x,), lowering=Lowering.REWRITTEN)
    for variant in (PRODUCT, ATTENTION):
        bound, offered = bound_with(found, variant)
        assert offered
        assert_instructions_and_lanes_agree(bound, x)


def test_odd_inputs_and_columns_are_left_to_libraries(dtype: torch.dtype) -> None:
    for model, x in (
        (layer(33, 48, dtype), rows_of(8, 33, dtype)),
        (layer(48, 48, dtype), rows_of(48, 8, dtype).t()),
        (layer(48, 15, dtype), rows_of(8, 48, dtype)),
    ):
        found = capture(model, (x,), lowering=Lowering.REWRITTEN)
        assert not any(PRODUCT in row for row in offered_variants(found.program, "cpu"))


def test_weights_lie_as_the_kernel_reads_them(dtype: torch.dtype) -> None:
    weight = torch.arange(20 * 6.0).to(dtype).reshape(20, 6)
    single = of_halves(weight, 4, pairs=False).view(dtype)
    assert torch.equal(single[:48].reshape(6, 8), weight[:8].t())
    assert torch.equal(single[96:].reshape(6, 4), weight[16:].t())
    double = of_halves(weight, 4, pairs=True).view(dtype)
    assert torch.equal(double[:48].reshape(3, 8, 2), weight[:8].reshape(8, 3, 2).transpose(0, 1))
    assert torch.equal(double[96:].reshape(3, 4, 2), weight[16:].reshape(4, 3, 2).transpose(0, 1))


@pytest.mark.parametrize("name", [name for name in CASES if "as far as float32 goes" not in name])
def test_attention_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    shape, mask, options = CASES[name]
    given = inputs_of(shape, mask)
    inputs = tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in given)
    model: nn.Module = Net(**options)
    bound, offered = bound_with(capture(model, inputs, lowering=Lowering.REWRITTEN), ATTENTION)
    assert len(offered) == 1
    [got] = bound.run(list(inputs))
    assert_rounded_once(got, exact(model, *inputs), 4e-6)
    assert got.stride() == model(*inputs).stride()


FLOAT32_MASKS = [name for name, (_, mask, _) in CASES.items() if mask is not None and mask.dtype == torch.float32]


@pytest.mark.parametrize("name", FLOAT32_MASKS)
def test_a_mask_of_float32_is_not_rounded(name: str, dtype: torch.dtype) -> None:
    shape, mask, options = CASES[name]
    assert mask is not None
    inputs = (*(tensor.to(dtype) for tensor in inputs_of(shape)), mask)
    model: nn.Module = Net(**options)
    bound, offered = bound_with(capture(model, inputs, lowering=Lowering.REWRITTEN), ATTENTION)
    assert len(offered) == 1
    assert_rounded_once(bound.run(list(inputs))[0], exact(model, *inputs), 4e-6)


@pytest.mark.parametrize("queries", [4, 40])
def test_not_a_number_stays_in_its_rows(queries: int, dtype: torch.dtype) -> None:
    inputs: Any = [tensor.to(dtype) for tensor in inputs_of((1, 2, 2, queries, 50, 32, 32))]
    inputs[0][0, 0, 3, 3], inputs[2][0, 1, 9, 4] = float("nan"), float("nan")
    [got] = bound_with(capture(Net(), tuple(inputs), lowering=Lowering.REWRITTEN), ATTENTION)[0].run(inputs)
    expected = torch.zeros_like(got, dtype=torch.bool)
    expected[0, 0, 3], expected[0, 1, :, 4] = True, True
    assert torch.equal(got.isnan(), expected)


def test_a_file_that_uses_them_is_loaded_and_follows_the_models_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    model, x = Block().to(dtype).eval(), torch.randn(2, 33, 64).to(dtype)
    found = capture(model, (x,), lowering=Lowering.REWRITTEN)
    save_with(tmp_path / "net.autosched", found, PRODUCT)
    fast = autosched.load(tmp_path / "net.autosched", model, strict=True)
    close = 4 * torch.finfo(dtype).eps
    with torch.no_grad():
        first = fast(x)
        assert torch.allclose(first, model(x), atol=close)
        for parameter in model.parameters():
            parameter.mul_(-0.5)
        assert torch.allclose(fast(x), model(x), atol=close)
        assert not torch.allclose(fast(x), first, atol=close)
