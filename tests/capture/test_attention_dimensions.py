"""Attention of other than four dimensions, on a CPU: which is joined, and what it computes then."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from autosched.capture.draft import Draft
from autosched.capture.export import capture, draft_of
from autosched.capture.passes.attention import attend_in_place
from autosched.capture.passes.attention_dimensions import attend_in_four_dimensions
from autosched.core.program import Ref
from autosched.core.variants import Lowering, Variant
from autosched.runtime.kernels import bind
from tests.conformance.apply import Apply
from tests.conformance.own_kernels import bound_with

BATCHES, QUERIES, KEYS, WIDTH = (2, 3, 4), 12, 20, 16


def tensors(*batches: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(*batches, rows, WIDTH) for rows in (QUERIES, KEYS, KEYS))


def check(given: tuple[torch.Tensor, ...], expected: int, *, error: float = 1e-5, **options: Any) -> Draft:
    def attend(_, query, key, value, mask=None):
        return scaled_dot_product_attention(query, key, value, mask, **options)

    model = Apply(attend).eval()
    draft = draft_of(model, given)
    assert attend_in_four_dimensions(draft) == expected
    (leaf,), made = draft.output_leaves, draft.observe()
    assert isinstance(leaf, Ref)
    with torch.no_grad():
        torch.testing.assert_close(made[leaf.value].clone(), model(*given), rtol=error, atol=error)
    return draft


@pytest.mark.parametrize("batches", [(6,), (1, 3, 4), (2, 3, 4), (2, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"scale": 0.5}, {"is_causal": True}], ids=str)
def test_batches_are_joined_but_for_the_heads(batches: tuple[int, ...], options: dict[str, Any]) -> None:
    draft = check(tensors(*batches), 1, **options)
    query = next(node.args[0] for node in draft.nodes if node.kind == "aten::scaled_dot_product_attention")
    ahead = (6, 1) if len(batches) == 1 else (math.prod(batches[:-1]), batches[-1])
    assert draft.specs[query.value].shape == (*ahead, QUERIES, WIDTH)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batches", [(6,), (2, 3, 4)], ids=str)
def test_in_sixteen_bits_they_are_joined_as_well(batches: tuple[int, ...], dtype: torch.dtype) -> None:
    check(tuple(each.to(dtype) for each in tensors(*batches)), 1, error=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize(
    "shape", [(QUERIES, KEYS), (4, QUERIES, 1), (1, 1, 4, 1, KEYS), (*BATCHES, QUERIES, KEYS), (2, 3, 1, 1, KEYS)], ids=str
)
def test_a_mask_is_joined_as_well(shape: tuple[int, ...], seen: bool) -> None:
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    check((*tensors(*BATCHES), mask > -1.0 if seen else mask), 1)


@pytest.mark.parametrize("shape", [(QUERIES, KEYS), (1, QUERIES, KEYS), (6, 1, KEYS)], ids=str)
def test_a_mask_of_three_dimensions_is_of_batches(shape: tuple[int, ...]) -> None:
    draft = check((*tensors(6), torch.randn(shape, generator=torch.Generator().manual_seed(1))), 1)
    assert draft.specs[draft.output_values()[0]].strides == (QUERIES * WIDTH, WIDTH, 1)


def test_a_query_that_sees_nothing_gets_what_it_got() -> None:
    mask = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    mask[3] = False
    check((*tensors(*BATCHES), mask), 1)


def test_others_stay() -> None:
    check(tensors(2, 3), 0)
    check((*tensors(*BATCHES), torch.randn(3, 4, QUERIES, KEYS)), 0)
    check((*tensors(*BATCHES), torch.randn(2, 1, 4, QUERIES, KEYS)), 0)
    check(tuple(each.double() for each in tensors(*BATCHES)), 0)
    query, key, value = tensors(*BATCHES)
    check((query, key[:1], value[:1]), 0)
    check((query, key[:, :, :2], value[:, :, :2]), 0, enable_gqa=True)
    check(tensors(*BATCHES), 0, is_causal=True, scale=-0.5)


def test_a_view_of_the_answer_copies_where_it_must() -> None:
    model = Apply(lambda _, *given: scaled_dot_product_attention(*given).view(2, 3, 4 * QUERIES, WIDTH)).eval()
    given = tuple(each.transpose(2, 3).contiguous().transpose(2, 3) for each in tensors(*BATCHES))
    captured = capture(model, given)
    with torch.no_grad():
        torch.testing.assert_close(
            bind(captured.program, captured.constants).run(list(given))[0].clone(), model(*given), rtol=1e-5, atol=1e-5
        )


def test_windows_of_a_picture_are_computed_by_a_kernel_of_our_own() -> None:
    """As timm's Hiera has it."""

    def windows(_, x):
        query, key, value = x.reshape(1, QUERIES, 4, 3, 2, WIDTH).permute(3, 0, 4, 2, 1, 5).unbind(0)
        return scaled_dot_product_attention(query, key, value).transpose(1, 3).reshape(1, -1, 2 * WIDTH)

    model, x = Apply(windows).eval(), torch.randn(1, QUERIES * 4, 3 * 2 * WIDTH)
    for lowering in (Lowering.REWRITTEN, Lowering.FUSED):
        captured = capture(model, (x,), lowering=lowering)
        bound, offered = bound_with(captured, Variant.OWN_ATTENTION)
        assert len(offered) == 1
        with torch.no_grad():
            made = bound.run([x])[0]
            torch.testing.assert_close(made.clone(), model(x), rtol=1e-5, atol=1e-5)


def heads_of(x: torch.Tensor, lay_out: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """As CoAtNet has it: a picture's channels are heads of queries, keys and values."""
    return [lay_out(part.transpose(-1, -2)) for part in x.reshape(2, 3, 3 * WIDTH, 20).chunk(3, 2)]


def test_heads_that_a_convolution_lays_out_are_read_where_they_lie() -> None:
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(8, 9 * WIDTH, 1)
    model = Apply(lambda m, x: scaled_dot_product_attention(*heads_of(m.conv(x), torch.Tensor.contiguous)), conv=conv).eval()
    x = torch.randn(2, 8, 4, 5)
    for lowering in (Lowering.REWRITTEN, Lowering.FUSED):
        found = capture(model, (x,), lowering=lowering)
        assert {item.name: item.applied for item in found.rewrites}["attend_in_place"] == 3
        calls = {value: call for operator in found.program.graph.operators for call in operator.calls for value in call.outputs}
        [attention] = [call for call in calls.values() if call.target == "aten::scaled_dot_product_attention.default"]
        assert {calls[item.value].target for item in attention.args if isinstance(item, Ref)} == {"aten::transpose.int"}
        with torch.no_grad():
            torch.testing.assert_close(bind(found.program, found.constants, "cpu").run([x])[0], model(x), rtol=1e-5, atol=1e-5)


def test_heads_whose_rows_lie_apart_or_change_are_copied() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 9 * WIDTH, 4, 5)
    apart = Apply(lambda m, x: scaled_dot_product_attention(*heads_of(x, torch.Tensor.contiguous))).eval()
    assert attend_in_place(draft_of(apart, (x,))) == 0
    whole = Apply(lambda m, x: scaled_dot_product_attention(*heads_of(x, torch.clone))).eval()
    assert attend_in_place(draft_of(whole, (x.contiguous(memory_format=torch.channels_last),))) == 3

    def changed(m: Apply, x: torch.Tensor) -> torch.Tensor:
        kept = x.clone()
        x += 1
        return scaled_dot_product_attention(kept, kept, kept)

    model, rows = Apply(changed).eval(), torch.randn(2, 3, 20, WIDTH)
    found = capture(model, (rows.clone(),), lowering=Lowering.REWRITTEN)
    got = bind(found.program, found.constants, "cpu").run([rows.clone()])
    torch.testing.assert_close(got[0], model(rows.clone()), rtol=1e-5, atol=1e-5)
