"""Products and attention in bfloat16 by tiles: by the processor's own where it has them, and emulated, which other processors can run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.variants import Lowering, Variant
from autosched.runtime.cpu_kernels import library
from autosched.runtime.cpu_kernels.library import Library, kernel_library, kernels_recipe
from tests.conformance.own_kernels import bound_with
from tests.runtime.cpu_kernels.test_attention import CASES, Net, inputs_of
from tests.runtime.cpu_kernels.test_bytes import Rounded, given
from tests.runtime.cpu_kernels.test_halves import FOLLOWING, assert_rounded_once, exact, layer, rows_of

DTYPE = torch.bfloat16

pytestmark = pytest.mark.usefixtures("tiles")


def tiled(made: Library) -> bool:
    """Whether the processor, or what stands for it, lets this process multiply tiles."""
    return bool(made.loaded.autosched_tiles())  # type: ignore[attr-defined]


@pytest.fixture(params=["the processor's", "emulated"])
def tiles(request: pytest.FixtureRequest, kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that compute by tiles."""
    mine = kernel_library()
    assert not isinstance(mine, str)
    if not mine.pairs:
        pytest.skip("the processor does not multiply pairs of numbers in bfloat16")
    if request.param == "emulated":
        plain = kernels_recipe()
        # Compiled in half the time.
        plainly = tuple("-O1" if option == "-O3" else option for option in plain.compile)
        recipe = replace(plain, compile=(*plainly, "-DAUTOSCHED_EMULATED_TILES"))
        made = recipe.find() or recipe.make(120.0)
        assert not isinstance(made, str), made
        mine = library._loaded(made)
        assert tiled(mine)
        monkeypatch.setattr(library._state, "found", mine)
    elif not tiled(mine):
        pytest.skip("the processor has no tiles, or this process may not use them")


# Rows, inputs, outputs: one tile and two, such that are not full, others that have rows in common; more rows than times some channels are
# near for; more than are worked on together; blocks and vectors of outputs that are not full; rows and outputs divided among threads.
SHAPES = [
    (1, 32, 16), (5, 64, 40), (16, 32, 96), (17, 96, 33), (31, 320, 48), (33, 64, 64), (70, 320, 80), (100, 608, 272), (700, 1024, 40),
    (9, 64, 8192), (1200, 32, 512),
]  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_rounded_once_whatever_the_number_of_threads(shape: tuple[int, int, int], bias: bool) -> None:
    rows, inputs, outputs = shape
    model, x = layer(inputs, outputs, DTYPE, bias=bias), rows_of(rows, inputs, DTYPE)
    found = capture(model, (x,), lowering=Lowering.REWRITTEN)
    made = [bound_with(found, Variant.OWN_PRODUCT, width)[0].run([x])[0] for width in (1, 2, 3)]
    assert_rounded_once(made[0], exact(model, x), 3e-6)
    assert all(torch.equal(made[0], other) for other in made[1:])


@pytest.mark.parametrize("name", FOLLOWING)
def test_what_follows_is_done_before_a_result_is_rounded(name: str) -> None:
    x, model = rows_of(40, 64, DTYPE), nn.Sequential(layer(64, 80, DTYPE), FOLLOWING[name]).eval()
    found = capture(model, (x,), lowering=Lowering.REWRITTEN)
    bound, offered = bound_with(found, Variant.OWN_PRODUCT)
    assert offered
    assert_rounded_once(bound.run([x])[0], exact(model, x), 2e-6)


@pytest.mark.parametrize("shape", [(5, 64, 40), (33, 320, 70), (130, 704, 48), (9, 64, 4096)], ids=str)
def test_sums_of_whole_numbers_are_exact(shape: tuple[int, int, int]) -> None:
    rows, inputs, outputs = shape
    model, x = Rounded(inputs, outputs, without="numbers").eval(), given(rows, inputs)
    bound, offered = bound_with(capture(model, x, lowering=Lowering.REWRITTEN), Variant.OWN_PRODUCT, 2)
    assert offered
    assert torch.equal(bound.run(list(x))[0].long(), x[0].long() @ model.weight.long().t())


@pytest.mark.parametrize("name", [name for name in CASES if "as far as float32 goes" not in name and "a query" not in name])
def test_attention_is_rounded_once_whatever_the_number_of_threads(name: str) -> None:
    shape, mask, options = CASES[name]
    inputs = tuple(tensor.to(DTYPE) if tensor.is_floating_point() else tensor for tensor in inputs_of(shape, mask))
    model: nn.Module = Net(**options)
    found = capture(model, inputs, lowering=Lowering.REWRITTEN)
    made = [bound_with(found, Variant.OWN_ATTENTION, width)[0].run(list(inputs))[0] for width in (1, 2, 3)]
    assert_rounded_once(made[0], exact(model, *inputs), 3e-5)
    assert all(torch.equal(made[0], other) for other in made[1:])


def test_threads_divide_attention() -> None:
    inputs = tuple(tensor.to(DTYPE) for tensor in inputs_of((2, 6, 3, 300, 310, 64, 80)))
    model = Net(enable_gqa=True)
    found = capture(model, inputs, lowering=Lowering.REWRITTEN)
    made = [bound_with(found, Variant.OWN_ATTENTION, width)[0].run(list(inputs))[0] for width in (1, 2, 5)]
    assert_rounded_once(made[0], exact(model, *inputs), 3e-5)
    assert all(torch.equal(made[0], other) for other in made[1:])


def test_numbers_that_are_not_finite_stay_where_they_are() -> None:
    model, x = layer(64, 48, DTYPE), rows_of(40, 64, DTYPE)
    x[3, 5], x[37, 0] = float("nan"), float("inf")
    [got] = bound_with(capture(model, (x,), lowering=Lowering.REWRITTEN), Variant.OWN_PRODUCT)[0].run([x])
    clean = torch.ones(40, dtype=torch.bool)
    clean[[3, 37]] = False
    assert got[3].isnan().all()
    assert got[37].isinf().all()
    assert got[clean].isfinite().all()
