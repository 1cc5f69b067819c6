"""Attention that a model spells out becomes one call on a CPU: which is found, and what it computes then."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.export import Captured, capture
from autosched.capture.passes import spelled_attention
from autosched.core.program import Call, Ref
from autosched.core.variants import Lowering, Variant
from autosched.runtime.kernels import bind
from tests.conformance.own_kernels import bound_with, having

BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 4, 12, 20, 16


class Net(nn.Module):
    """``spelled`` of queries, keys, values ``[batch, heads, rows, width]`` and what ``spelled`` takes from the module."""

    def __init__(self, spelled: Callable[..., Any]) -> None:
        super().__init__()
        self.spelled = spelled
        self.bias = nn.Parameter(torch.randn(HEADS, QUERIES, KEYS))
        self.register_buffer("low", torch.tensor(-1e9))
        self.register_buffer("seen", torch.ones(64, 64).tril()[None, None])

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        return self.spelled(self, query, key, value)


def inputs_of(keys: int = KEYS) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(BATCH, rows, HEADS, WIDTH).transpose(1, 2) for rows in (QUERIES, keys, keys))


def attention_of(found: Captured) -> list[Call]:
    calls = [call for operator in found.program.graph.operators for call in operator.calls]
    return [call for call in calls if call.target == "aten::scaled_dot_product_attention.default"]


def joined(x: torch.Tensor) -> torch.Tensor:
    """The heads side by side, as models go on."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def _windows(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As torchvision's Swin has it for shifted windows."""
    scores = (q * 0.25).matmul(k.transpose(-2, -1)) + m.bias.unsqueeze(0)
    shifted = q.new_zeros(QUERIES, KEYS)
    shifted[:3, :4] = -100.0
    scores = scores.view(1, BATCH, HEADS, QUERIES, KEYS) + torch.stack([shifted, -shifted]).unsqueeze(1).unsqueeze(0)
    return joined(nn.functional.dropout(scores.view(-1, HEADS, QUERIES, KEYS).softmax(-1), 0.1, training=False).matmul(v))


def _windows_of_a_batch(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same of more than one picture: four parts, two of each."""
    q, k, v = (torch.cat([x, -x]) for x in (q, k, v))
    shifted = torch.stack([m.bias[0], -m.bias[1]])
    scores = (q @ k.mT).view(2, 2, HEADS, QUERIES, KEYS) + shifted.unsqueeze(1).unsqueeze(0)
    return joined(scores.view(-1, HEADS, QUERIES, KEYS).softmax(-1) @ v)


def _heads_parted_for_a_mask(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As fairseq hides what is no word, with all heads in one dimension."""
    query, key, value = (x.reshape(BATCH * HEADS, -1, WIDTH) for x in (q, k, v))
    hidden = torch.stack([m.bias[0, 0], -m.bias[0, 0]]) > 1.0
    scores = torch.bmm(query, key.mT).view(BATCH, HEADS, QUERIES, KEYS).masked_fill(hidden[:, None, None], -math.inf)
    made = torch.bmm(scores.view(BATCH * HEADS, QUERIES, KEYS).softmax(-1), value)
    return made.transpose(0, 1).contiguous().view(QUERIES, BATCH, -1)


def _flat(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """All heads of a batch in one dimension, as fairseq has it."""
    query, key, value = (x.reshape(BATCH * HEADS, -1, WIDTH) for x in (q, k, v))
    made = torch.bmm(nn.functional.softmax(torch.bmm(query, key.transpose(1, 2)) / 4.0 + m.bias.repeat(BATCH, 1, 1), dim=-1), value)
    return made.transpose(0, 1).contiguous().view(QUERIES, BATCH, -1)


def _causal(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As nanoGPT has it."""
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(m.seen[:, :, : q.size(2), : k.size(2)] == 0, float("-inf"))
    return joined(nn.functional.softmax(scores, dim=-1) @ v)


def _masked_product(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **factors: float) -> torch.Tensor:
    """As ``torch.nn.MultiheadAttention`` has it."""
    query, key, value = (x.reshape(BATCH * HEADS, -1, WIDTH) for x in (q, k, v))
    weights = torch.baddbmm(m.bias[:1], 0.25 * query, key.transpose(-2, -1), **factors).softmax(-1)
    return torch.bmm(weights, value).transpose(0, 1).contiguous().view(QUERIES, BATCH, -1)


def _joined_for_the_values(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As DeBERTa has it, with what a table of places adds."""
    query, key, value = (x.reshape(BATCH * HEADS, -1, WIDTH) for x in (q, k, v))
    scores = torch.bmm(query, key.mT / torch.tensor(4.0)) + m.bias.repeat(2, 1, 1)
    hidden = torch.stack([m.bias[0], -m.bias[0]])[:, None] > 1.0
    weights = scores.view(BATCH, HEADS, QUERIES, KEYS).masked_fill(hidden, torch.finfo(q.dtype).min).softmax(-1)
    made = torch.bmm(weights.view(-1, QUERIES, KEYS), value)
    return joined(made.view(BATCH, HEADS, QUERIES, WIDTH))


def _keys_changed_afterwards(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keys = k * 2
    turned = keys.mT.contiguous()
    keys.mul_(2)
    return joined((q @ turned).softmax(-1) @ v) + keys.mean()


FOUND: dict[str, tuple[Callable[..., Any], float]] = {
    "plain": (lambda m, q, k, v: joined((q @ k.transpose(-2, -1)).softmax(-1) @ v), 1.0),
    "queries scaled": (lambda m, q, k, v: joined(((q * 0.5) @ k.transpose(-2, -1)).softmax(-1) @ v), 0.5),
    "scores scaled": (lambda m, q, k, v: joined((q @ k.transpose(-2, -1) * 0.5 / 4).softmax(3) @ v), 0.125),
    "both scaled": (lambda m, q, k, v: joined(((q / 2.0) @ k.mT / 2).softmax(-1) @ v), 0.25),
    "heads scaled": (lambda m, q, k, v: joined((q @ k.mT * m.bias[:, :1, :1].exp() + m.bias).softmax(-1) @ v), 1.0),
    "one head scaled by a part of the queries": (
        lambda m, q, k, v: joined(((q * 0.5) @ k.mT * q[:, :1, :1, :1].exp()).softmax(-1) @ v), 0.5),
    "a mask": (lambda m, q, k, v: joined((q @ k.transpose(2, 3) * 0.5 + m.bias).softmax(-1) @ v), 0.5),
    "a mask before the scores": (lambda m, q, k, v: joined((m.bias[0] + q @ k.transpose(2, 3)).softmax(-1) @ v), 1.0),
    "two masks": (lambda m, q, k, v: joined((q @ k.transpose(2, 3) + m.bias + m.bias[0, :1]).softmax(-1) @ v), 1.0),
    "a mask made of the queries": (lambda m, q, k, v: joined((q @ k.mT + q.sum(-1, keepdim=True)).softmax(-1) @ v), 1.0),
    "causal": (_causal, 0.25),
    "hidden, four dimensions": (
        lambda m, q, k, v: joined((q @ k.mT).masked_fill(m.bias[None] > 2.0, -math.inf).softmax(-1) @ v), 1.0),
    "windows": (_windows, 0.25),
    "windows of a batch": (_windows_of_a_batch, 1.0),
    "heads parted for a mask": (_heads_parted_for_a_mask, 1.0),
    "heads parted otherwise for a mask": (
        lambda m, q, k, v: joined(((q @ k.mT).view(1, 8, QUERIES, KEYS) + m.bias.repeat(2, 1, 1)).view_as(q @ k.mT).softmax(-1) @ v), 1.0),
    "hidden by a number": (lambda m, q, k, v: joined((q @ k.mT).masked_fill(m.bias > 0, -5e4).softmax(-1) @ v), 1.0),
    "added to and hidden": (
        lambda m, q, k, v: joined(((q @ k.mT) + m.bias).masked_fill(m.bias > 1, -math.inf).softmax(-1) @ v), 1.0),
    "added to and hidden by a number": (
        lambda m, q, k, v: joined(((q @ k.mT) + m.bias).masked_fill(m.bias[:1, :, :1] > 0, -5e4).softmax(-1) @ v), 1.0),
    "hidden where it is chosen": (
        lambda m, q, k, v: joined(torch.where(m.bias > 0, q @ k.mT * 0.5, torch.finfo(q.dtype).min).softmax(-1) @ v), 0.5),
    "hidden where it is not chosen": (lambda m, q, k, v: joined(torch.where(m.bias > 0, -1e4, q @ k.mT).softmax(-1) @ v), 1.0),
    "hidden by minus infinity where it is chosen": (
        lambda m, q, k, v: joined(torch.where(m.bias > 0, q @ k.mT, -math.inf).softmax(-1) @ v), 1.0),
    "hidden by a number that is filled in": (
        lambda m, q, k, v: joined(torch.where(m.bias > 0, q @ k.mT, torch.full([], -1e9, dtype=q.dtype)).softmax(-1) @ v), 1.0),
    "heads joined for the values": (_joined_for_the_values, 1.0),
    "views between": (
        lambda m, q, k, v: joined((q @ k.mT).flatten(0, 1).softmax(-1).unflatten(0, (BATCH, HEADS)) @ v), 1.0),
    "flat": (_flat, 0.25),
    "flat, a mask in the product": (_masked_product, 0.25),
    "flat, a mask in a product that is scaled": (lambda m, q, k, v: _masked_product(m, q, k, v, alpha=2), 0.5),
    "flat, a mask that counts for nothing": (lambda m, q, k, v: _masked_product(m, q, k, v, beta=0), 0.25),
    "nothing added": (lambda m, q, k, v: joined(((q @ k.mT + 0 + m.bias) * 0.5).softmax(-1) @ v), 0.5),
    "a mask with a factor": (lambda m, q, k, v: joined(torch.add(q @ k.mT, m.bias, alpha=2).softmax(-1) @ v), 1.0),
    "a mask that is taken away": (lambda m, q, k, v: joined((q @ k.mT - 3.0 * m.bias.exp()).softmax(-1) @ v), 1.0),
    "a mask that is taken away with a factor": (
        lambda m, q, k, v: joined(torch.sub(q @ k.mT, m.bias[:1], alpha=0.5).softmax(-1) @ v), 1.0),
    "a mask that is scaled": (lambda m, q, k, v: joined(((q @ k.mT * 0.5 + m.bias) * 0.25 + m.bias).softmax(-1) @ v), 0.125),
    "turned by permute": (lambda m, q, k, v: joined((q @ k.permute(0, 1, 3, 2)).softmax(-1) @ v), 1.0),
    "turned otherwise": (lambda m, q, k, v: joined((q @ k.transpose(1, 2).permute(0, 2, 3, 1)).softmax(-1) @ v), 1.0),
    "keys laid out anew": (lambda m, q, k, v: joined((q @ k.transpose(-2, -1).contiguous() + m.bias).softmax(-1) @ v), 1.0),
    "keys laid out anew, then changed": (_keys_changed_afterwards, 1.0),
    "in float32": (lambda m, q, k, v: joined(torch.softmax(q @ k.mT, -1, dtype=torch.float32).to(q.dtype) @ v), 1.0),
    "in float32, as T5 has it": (lambda m, q, k, v: joined(((s := q @ k.mT).float().softmax(-1).type_as(s)) @ v), 1.0),
    "head by head": (lambda m, q, k, v: ((q @ k.mT).softmax(-1) @ v).view(BATCH * HEADS, -1), 1.0),
    "as it is": (lambda m, q, k, v: (q @ k.mT).softmax(-1) @ v, 1.0),
    "flat, and then a batch": (
        lambda m, q, k, v: torch.bmm(
            torch.bmm(q.reshape(-1, QUERIES, WIDTH), k.reshape(-1, KEYS, WIDTH).mT).softmax(2), v.reshape(-1, KEYS, WIDTH)
        ).view(BATCH, HEADS, QUERIES, WIDTH).transpose(1, 2).reshape(BATCH, QUERIES, -1), 1.0),
    "the same for keys and values": (lambda m, q, k, v: joined((q @ k.mT).softmax(-1) @ k), 1.0),
}  # fmt: skip


@pytest.mark.parametrize("lowering", [Lowering.REWRITTEN, Lowering.FUSED])
@pytest.mark.parametrize("name", FOUND)
def test_it_becomes_one_call(name: str, lowering: Lowering) -> None:
    spelled, scale = FOUND[name]
    model, inputs = Net(spelled).eval(), inputs_of()
    found = capture(model, inputs, lowering=lowering)
    [call] = attention_of(found)
    assert dict(call.kwargs)["scale"] == pytest.approx(scale)
    others = [call.target for operator in found.program.graph.operators for call in operator.calls]
    gone = {"aten::softmax.int", "aten::matmul.default", "aten::bmm.default", "aten::where.ScalarOther"}
    assert not gone & set(others)
    [got] = bind(found.program, found.constants, "cpu").run(list(inputs))
    with torch.no_grad():
        wanted = model(*inputs)
    assert torch.allclose(got, wanted, atol=2e-6)
    assert (got.shape, got.stride()) == (wanted.shape, wanted.stride())


def test_a_mask_of_parameters_alone_is_made_once_and_the_results_need_no_copy() -> None:
    model = Net(lambda m, q, k, v: _windows(m, q, k, v).relu()).eval()
    found = capture(model, inputs_of(), lowering=Lowering.REWRITTEN)
    calls = [call for operator in found.program.graph.operators for call in operator.calls]
    assert [call.target.removeprefix("aten::").split(".")[0] for call in calls] == [
        "scaled_dot_product_attention", "transpose", "_unsafe_view", "relu",
    ]  # fmt: skip
    [call] = attention_of(found)
    mask = call.args[3]
    assert isinstance(mask, Ref)
    assert mask.value in {output for call in found.program.prologue for output in call.outputs}


@pytest.mark.parametrize("low", [-math.inf, -1e9])
def test_a_causal_mask_that_cannot_change_is_said_so(low: float) -> None:
    def spelled(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return joined((q @ k.mT).masked_fill(q.new_ones(QUERIES, QUERIES).triu(1) > 0, low).softmax(-1) @ v)

    [call] = attention_of(capture(Net(spelled).eval(), inputs_of(keys=QUERIES), lowering=Lowering.REWRITTEN))
    assert call.args[3:] == (None,)
    assert dict(call.kwargs) == {"scale": 1.0, "is_causal": True}


@pytest.mark.parametrize("fixed", [True, False])
def test_layers_share_a_mask(fixed: bool) -> None:
    """It is made once for all of them, in the prologue if it is the same in every run."""

    def spelled(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        hidden = m.bias > 1.0 if fixed else (q[:, :, :, :1] > 1.0)
        return joined(
            ((q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1) @ v)
            + ((k[:, :, :QUERIES] @ k.mT).masked_fill(hidden, -math.inf).softmax(-1) @ v)
        )

    found = capture(Net(spelled).eval(), inputs_of(), lowering=Lowering.REWRITTEN)
    assert len({str(call.args[3]) for call in attention_of(found)}) == 1
    calls = [call for operator in found.program.graph.operators for call in operator.calls]
    made = [call.target for call in (found.program.prologue if fixed else calls)]
    assert made.count("aten::logical_not.default") == 1


def test_a_mask_is_laid_out_as_kernels_read_it() -> None:
    """A table of places and heads, as T5 has it, has numbers of one head apart."""

    def spelled(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return joined((q @ k.mT + m.bias.view(QUERIES, KEYS, HEADS).permute(2, 0, 1)).softmax(-1) @ v)

    model, inputs = Net(spelled).eval(), inputs_of()
    found = capture(model, inputs, lowering=Lowering.REWRITTEN)
    bound, offered = bound_with(found, Variant.OWN_ATTENTION)
    assert len(offered) == 1
    assert torch.allclose(bound.run(list(inputs))[0], model(*inputs), atol=2e-6)


@pytest.mark.parametrize("fits", [False, True])
def test_narrow_values_are_for_the_kernel_of_our_own_alone(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has no fused kernel for them."""

    def spelled(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return joined((q[:, :, :7] @ k.mT).softmax(-1) @ v[..., :8])

    if not fits:
        monkeypatch.setattr(spelled_attention, "fit_own_kernel", lambda queries, keys: False)
    found = capture(Net(spelled).eval(), inputs_of(), lowering=Lowering.REWRITTEN)
    assert len(attention_of(found)) == fits
    assert bool(having(found, Variant.OWN_ATTENTION)) == fits


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_causal_mask_stays_one_where_the_scale_is_not_above_zero(scale: float) -> None:
    """PyTorch's own kernel makes NaN of these if it is said that they are causal."""

    def spelled(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return joined((q @ k.mT * scale).masked_fill(q.new_ones(QUERIES, QUERIES).triu(1) > 0, -math.inf).softmax(-1) @ v)

    model, inputs = Net(spelled).eval(), inputs_of(keys=QUERIES)
    found = capture(model, inputs, lowering=Lowering.REWRITTEN)
    assert len(attention_of(found)) == 1
    assert torch.allclose(bind(found.program, found.constants, "cpu").run(list(inputs))[0], model(*inputs), atol=2e-6)


def _returns_weights(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = (q @ k.mT).softmax(-1)
    return joined(weights @ v), weights


def _uses_scores_twice(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT
    return joined(scores.softmax(-1) @ v) * scores.mean()


LEFT_ALONE: dict[str, Callable[..., Any]] = {
    "weights that leave the model": _returns_weights,
    "scores that are read again": _uses_scores_twice,
    "hidden by a small number": lambda m, q, k, v: joined((q @ k.mT).masked_fill(m.bias > 0, -100.0).softmax(-1) @ v),
    "hidden by a number of the model's": lambda m, q, k, v: joined(torch.where(m.bias > 0, q @ k.mT, m.low).softmax(-1) @ v),
    "hidden by a number, then added to": lambda m, q, k, v: joined(((q @ k.mT).masked_fill(m.bias > 2, -1e9) + m.bias).softmax(-1) @ v),
    "hidden by others": lambda m, q, k, v: joined(torch.where(m.bias > 0, q @ k.mT, m.bias).softmax(-1) @ v),
    "over the queries": lambda m, q, k, v: joined((q @ k.mT).softmax(-2) @ v),
    "hidden, then scaled": lambda m, q, k, v: joined(((q @ k.mT).masked_fill(m.bias > 0, -math.inf) * 0.5).softmax(-1) @ v),
    "a mask with a factor in the product": lambda m, q, k, v: _masked_product(m, q, k, v, beta=2),
    "all moved": lambda m, q, k, v: joined(((q @ k.mT + 2.0) * 0.5).softmax(-1) @ v),
    "taken from a mask": lambda m, q, k, v: joined((m.bias - q @ k.mT).softmax(-1) @ v),
    "added to a mask with a factor": lambda m, q, k, v: joined(torch.add(m.bias[None].expand(BATCH, -1, -1, -1), q @ k.mT, alpha=2)
        .softmax(-1) @ v),
    "a mask of one dimension": lambda m, q, k, v: joined((q @ k.mT + m.bias[0, 0]).softmax(-1) @ v),
    "another power": lambda m, q, k, v: joined(torch.sigmoid(q @ k.mT) @ v),
    "keys that lie turned": lambda m, q, k, v: joined((q @ k.mT.contiguous().tanh()).softmax(-1) @ v),
    "values that lie turned": lambda m, q, k, v: joined((q @ k.mT).softmax(-1) @ v.mT.contiguous().mT),
    "one item of keys for a batch": lambda m, q, k, v: joined((q @ k[:1].mT).softmax(-1) @ v),
    "divided by nothing": lambda m, q, k, v: joined((q @ k.mT / 0.0).softmax(-1) @ v),
    "weights multiplied by themselves": lambda m, q, k, v: torch.matmul(*[(q @ q.mT).softmax(-1)] * 2),
    "two dimensions": lambda m, q, k, v: (q[0, 0] @ k[0, 0].mT).softmax(-1) @ v[0, 0],
    "five dimensions": lambda m, q, k, v: (q[None] @ k[None].mT).softmax(-1) @ v[None],
    "one item of values for a batch": lambda m, q, k, v: joined((q @ k.mT).softmax(-1) @ v[:1]),
    "no keys": lambda m, q, k, v: joined((q @ k[:, :, :0].mT).softmax(-1) @ v[:, :, :0]),
    "a mask of another type": lambda m, q, k, v: joined((q @ k.mT + m.bias.half()).softmax(-1) @ v),
    "a mask for more heads than there are": lambda m, q, k, v: joined((q[:, :1] @ k[:, :1].mT + m.bias).softmax(-1) @ v),
    "hidden in more heads than there are": lambda m, q, k, v: joined(
        (q[:, :1] @ k[:, :1].mT).masked_fill(m.bias > 2, -math.inf).softmax(-1) @ v),
    "hidden twice": lambda m, q, k, v: joined(
        (q @ k.mT).masked_fill(m.bias > 2, -math.inf).masked_fill(m.bias < -2, -math.inf).softmax(-1) @ v),
    "hidden, then added to": lambda m, q, k, v: joined(((q @ k.mT).masked_fill(m.bias > 2, -math.inf) + m.bias).softmax(-1) @ v),
    "added to themselves": lambda m, q, k, v: joined((lambda scores: scores + scores)(q @ k.mT).softmax(-1) @ v),
    "rounded": lambda m, q, k, v: joined((q @ k.mT).div(2.0, rounding_mode="floor").softmax(-1) @ v),
    "queries scaled one by one": lambda m, q, k, v: joined((q @ k.mT * m.bias[:, :, :1]).softmax(-1) @ v),
    "heads scaled twice": lambda m, q, k, v: joined((q @ k.mT * m.bias[:, :1, :1] * m.bias[:, 1:2, :1]).softmax(-1) @ v),
    "a mask that is scaled by heads": lambda m, q, k, v: joined(((q @ k.mT + m.bias) * m.bias[:, :1, :1]).softmax(-1) @ v),
    "heads parted to be scaled": lambda m, q, k, v: (
        (q.flatten(0, 1) @ k.flatten(0, 1).mT).view(BATCH, HEADS, QUERIES, KEYS) * m.bias[:, :1, :1]
    ).view(-1, QUERIES, KEYS).softmax(-1) @ v.flatten(0, 1),
    "scaled by a tensor": lambda m, q, k, v: joined((q @ k.mT * m.bias[0, 0, 0]).softmax(-1) @ v),
    "divided by a number": lambda m, q, k, v: joined((2.0 / (q @ k.mT)).softmax(-1) @ v),
    "heads parted for the values": lambda m, q, k, v: joined(
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(BATCH, HEADS, QUERIES, KEYS).softmax(-1) @ v),
    "heads joined for the values": lambda m, q, k, v: torch.bmm(
        (q[:1] @ k[:1].mT).view(HEADS, QUERIES, KEYS).softmax(-1), v[0].contiguous()),
    "batches and heads parted otherwise for the values": lambda m, q, k, v: (
        (q @ k.mT).view(HEADS, BATCH, QUERIES, KEYS).softmax(-1) @ v.transpose(0, 1).contiguous()),
    "other rows between": lambda m, q, k, v: joined((q @ k.mT).softmax(-1).view(BATCH, HEADS, KEYS, QUERIES).mT @ v),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_looks_alike_stays_as_it_is(name: str) -> None:
    model, inputs = Net(LEFT_ALONE[name]).eval(), inputs_of()
    found = capture(model, inputs, lowering=Lowering.REWRITTEN)
    assert not attention_of(found)
    with torch.no_grad():
        wanted = model(*inputs)
    got = bind(found.program, found.constants, "cpu").run(list(inputs))
    assert all(
        torch.allclose(mine, theirs, atol=2e-6, equal_nan=True)
        for mine, theirs in zip(got, wanted if isinstance(wanted, tuple) else (wanted,), strict=True)
    )


def test_float64_stays_as_it_is() -> None:
    model = Net(FOUND["plain"][0]).eval().double()
    assert not attention_of(capture(model, tuple(tensor.double() for tensor in inputs_of()), lowering=Lowering.REWRITTEN))


def test_for_a_gpu_it_stays_as_it_is() -> None:
    assert not attention_of(capture(Net(FOUND["plain"][0]).eval(), inputs_of(), lowering=Lowering.REWRITTEN, target="cuda"))


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    """Where the model makes NaN."""

    def spelled(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return joined((q @ k.mT).masked_fill(k.sum(-1).unsqueeze(-2) > -1e9, -math.inf).softmax(-1) @ v)

    model, inputs = Net(spelled).eval(), inputs_of()
    found = capture(model, inputs, lowering=Lowering.REWRITTEN)
    assert len(attention_of(found)) == 1
    assert model(*inputs).isnan().all()
    assert not bind(found.program, found.constants, "cpu").run(list(inputs))[0].any()


@pytest.mark.parametrize("own", [False, True])
def test_a_query_from_which_a_number_hides_everything_sees_all_keys_alike(own: bool) -> None:
    """As in the model: rows of padding that every key is hidden from."""

    def spelled(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT * 20
        return joined(scores.masked_fill(torch.cat([q[..., :6, :1] > -9, q[..., 6:, :1] > 0], dim=2), -1e9).softmax(-1) @ v)

    model, inputs = Net(spelled).eval(), inputs_of()
    found = capture(model, inputs, lowering=Lowering.REWRITTEN)
    assert len(attention_of(found)) == 1
    bound = bound_with(found, Variant.OWN_ATTENTION)[0] if own else bind(found.program, found.constants, "cpu")
    [got] = bound.run(list(inputs))
    assert torch.allclose(got, model(*inputs), atol=1e-5)
    assert torch.allclose(got[0, 0], inputs[2][0].mean(1).flatten(), atol=1e-5)
