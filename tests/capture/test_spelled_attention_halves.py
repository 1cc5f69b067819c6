"""Attention that a model spells out in sixteen bits becomes one call on a CPU, whatever of it is float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autosched.capture.export import capture
from autosched.core.variants import Lowering
from autosched.runtime.kernels import bind
from tests.capture.test_spelled_attention import FOUND, KEYS, QUERIES, Net, attention_of, inputs_of, joined

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def check(spelled: Callable[..., Any], dtype: torch.dtype, expected: int = 1) -> None:
    """Whether so much becomes one call, whose results are as near to those in float64 as the model's are."""
    torch.manual_seed(1)
    model, inputs = Net(spelled).eval().to(dtype), tuple(tensor.to(dtype) for tensor in inputs_of())
    found = capture(model, inputs, lowering=Lowering.REWRITTEN)
    assert len(attention_of(found)) == expected
    [got] = bind(found.program, found.constants, "cpu").run(list(inputs))
    with torch.no_grad():
        wanted = model(*inputs)
        exact = model.double()(*(tensor.double() for tensor in inputs))
    assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    mine, theirs = (got - exact).abs(), (wanted - exact).abs()
    assert float(mine.mean()) <= float(theirs.mean())
    assert float(mine.max()) <= 2 * float(theirs.max())


@HALVES
@pytest.mark.parametrize("name", FOUND)
def test_what_is_found_in_float32_is_found_in_sixteen_bits(name: str, dtype: torch.dtype) -> None:
    check(FOUND[name][0], dtype)


def _with_bias_in_float32(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.mT) * 0.25 + q.new_ones(QUERIES, KEYS, dtype=torch.float32).triu(8) * -2.3
    return joined(scores.softmax(-1).to(q.dtype) @ v)


def _products_in_float32(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As transformers' GPT-J has it."""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) / 4.0 + m.bias
    return joined(torch.matmul(torch.softmax(scores, -1).to(v.dtype), v))


PARTLY_FLOAT32: dict[str, Callable[..., Any]] = {
    "the softmax": lambda m, q, k, v: joined(torch.softmax(q @ k.mT * 0.25, -1, dtype=torch.float32).to(q.dtype) @ v),
    "scores, as T5 has it": lambda m, q, k, v: joined(((s := q @ k.mT + m.bias).float().softmax(-1).type_as(s)) @ v),
    "scores before they are scaled": lambda m, q, k, v: joined(((q @ k.mT).float() * 0.25 + m.bias).softmax(-1).to(q.dtype) @ v),
    "a mask": _with_bias_in_float32,
    "one mask of two": lambda m, q, k, v: joined((q @ k.mT + m.bias + m.bias.float() * 0.3).softmax(-1).to(q.dtype) @ v),
    "products": _products_in_float32,
    "products of scaled queries": lambda m, q, k, v: joined(((q.float() * 0.5) @ k.float().mT).softmax(-1).to(q.dtype) @ v),
    "products of queries scaled before": lambda m, q, k, v: joined(((q * 0.5).float() @ k.float().mT).softmax(-1).to(q.dtype) @ v),
    "products of keys turned before": lambda m, q, k, v: joined((q.float() @ k.mT.float()).softmax(-1).to(q.dtype) @ v),
    "all but a softmax": lambda m, q, k, v: joined((q.float() @ k.float().mT).softmax(-1, dtype=q.dtype) @ v),
}


@HALVES
@pytest.mark.parametrize("name", PARTLY_FLOAT32)
def test_what_is_float32_on_the_way_is_no_other_attention(name: str, dtype: torch.dtype) -> None:
    check(PARTLY_FLOAT32[name], dtype)


LEFT_ALONE: dict[str, Callable[..., Any]] = {
    "powers rounded to other bits": lambda m, q, k, v: joined((q @ k.mT).softmax(-1).to(torch.float8_e5m2).to(q.dtype) @ v),
    "scores rounded to other bits": lambda m, q, k, v: joined((q @ k.mT).to(torch.float8_e5m2).to(q.dtype).softmax(-1) @ v),
    "a softmax in float64": lambda m, q, k, v: joined((q @ k.mT).softmax(-1, dtype=torch.float64).to(q.dtype) @ v),
    "a mask of float64": lambda m, q, k, v: joined((q @ k.mT + m.bias.double()).softmax(-1).to(q.dtype) @ v),
    "heads scaled in float32": lambda m, q, k, v: joined((q @ k.mT * (m.bias[:, :1, :1].float() + 1)).softmax(-1).to(q.dtype) @ v),
    "values in float32": lambda m, q, k, v: joined((q @ k.mT).float().softmax(-1) @ v.float()),
    "queries that were float32": lambda m, q, k, v: joined(((q.float() + 0.1) @ k.float().mT).softmax(-1).to(q.dtype) @ v),
}


@HALVES
@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_looks_alike_stays_as_it_is(name: str, dtype: torch.dtype) -> None:
    check(LEFT_ALONE[name], dtype, 0)


def test_a_mask_of_the_other_sixteen_bits_stays() -> None:
    """Their sum is float32."""
    check(lambda m, q, k, v: joined((q @ k.mT + m.bias.half()).softmax(-1).to(q.dtype) @ v), torch.bfloat16, 0)


def test_in_float32_nothing_is_rounded_on_its_way() -> None:
    for spelled in (
        lambda m, q, k, v: joined((q @ k.mT).bfloat16().float().softmax(-1) @ v),
        lambda m, q, k, v: joined((q @ k.mT).bfloat16().softmax(-1, dtype=torch.float32) @ v),
        lambda m, q, k, v: joined((q @ k.mT).softmax(-1).bfloat16().float() @ v),
    ):
        assert not attention_of(capture(Net(spelled).eval(), inputs_of(), lowering=Lowering.REWRITTEN))


def test_attention_in_float32_of_sixteen_bits_stays_float32() -> None:
    model = Net(lambda m, q, k, v: joined((q.float() @ k.float().mT).softmax(-1) @ v.float())).eval()
    inputs = tuple(tensor.bfloat16() for tensor in inputs_of())
    found = capture(model, inputs, lowering=Lowering.REWRITTEN)
    assert len(attention_of(found)) == 1
    assert torch.allclose(bind(found.program, found.constants, "cpu").run(list(inputs))[0], model(*inputs), atol=2e-6)


def test_the_lowest_number_of_bfloat16_hides_no_more_than_it_did() -> None:
    """A query from which it hides everything sees everything alike."""

    def spelled(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(QUERIES, KEYS, dtype=q.dtype)
        hidden[:, 10:], hidden[3] = torch.finfo(q.dtype).min, torch.finfo(q.dtype).min
        return joined((q @ k.mT + hidden).softmax(-1) @ v)

    check(spelled, torch.bfloat16)
