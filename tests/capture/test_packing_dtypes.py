"""Packing for oneDNN in sixteen bits: where the processor has products in them, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.draft import Draft
from autosched.capture.export import capture, draft_of
from autosched.capture.passes import cpu_convolution, cpu_linear, onednn
from autosched.capture.passes.onednn import packable_dtypes
from autosched.core.program import Ref
from autosched.core.variants import Lowering
from tests.conformance.apply import Apply

SIXTEEN = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def needs(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    if name not in packable_dtypes():
        pytest.skip(f"oneDNN has no products in {name} on this processor")


def calls_of(draft: Draft) -> list[str]:
    return [node.target.removeprefix("mkldnn::") for node in draft.nodes if node.kind.startswith("mkldnn::")]


def check(model: nn.Module, x: torch.Tensor, rewrite: Any, tolerance: float) -> Draft:
    """Run one pass; the outputs agree with the model's, to rounding that is relative to the largest."""
    draft = draft_of(model.eval(), (x,))
    assert rewrite(draft) > 0
    made = draft.observe()
    with torch.no_grad():
        wanted = model(x)
    leaf = draft.output_leaves[0]
    assert isinstance(leaf, Ref)
    got = made[leaf.value]
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert float((got.double() - wanted.double()).abs().max()) <= tolerance * float(wanted.double().abs().max())
    return draft


@SIXTEEN
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_convolutions_are_packed_with_what_follows(dtype: torch.dtype, groups: int) -> None:
    needs(dtype)

    def run(m: Any, x: Any) -> Any:
        x = torch.relu(m.stem(x))
        return torch.relu(m.conv(x) + x)

    model = Apply(run, stem=nn.Conv2d(3, 8, 3, padding=1), conv=nn.Conv2d(8, 8, 3, padding=1, groups=groups)).to(dtype)
    draft = check(model, torch.randn(2, 3, 12, 12).to(dtype), cpu_convolution.pack_cpu_convolutions, 2e-2)
    # In groups, PyTorch adds by a call that it does not have in sixteen bits.
    assert calls_of(draft) == ["_convolution_pointwise.default", "_convolution_pointwise." + ("binary" if groups == 1 else "default")]
    assert len(draft.nodes) == (2 if groups == 1 else 4)


@SIXTEEN
def test_large_linears_are_packed(dtype: torch.dtype) -> None:
    needs(dtype)
    model = Apply(lambda m, x: torch.relu(m.lin(x)), lin=nn.Linear(512, 512)).to(dtype)
    draft = check(model, torch.randn(2, 32, 512).to(dtype), cpu_linear.pack_cpu_linears, 2e-2)
    assert calls_of(draft) == ["_linear_pointwise.default"]


@SIXTEEN
def test_a_linear_is_packed_where_pytorch_calls_onednn(dtype: torch.dtype) -> None:
    needs(dtype)
    for rows, size, packed in (
        (4, 32, 0),
        (8, 64, 1),
        (1, 256, int(dtype is torch.bfloat16)),
        (4, 2048, int(dtype is torch.bfloat16)),
        (64, 2048, 1),
    ):
        model = Apply(lambda m, x: m.lin(x), lin=nn.Linear(size, size)).to(dtype).eval()
        assert cpu_linear.pack_cpu_linears(draft_of(model, (torch.randn(rows, size).to(dtype),))) == packed, (rows, size)


@SIXTEEN
def test_where_onednn_has_no_such_products_they_stay(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cpu_convolution, cpu_linear):
        monkeypatch.setattr(module, "packable_dtypes", lambda: frozenset({"float32"}))
    model = Apply(lambda m, x: m.lin(m.conv(x)), conv=nn.Conv2d(3, 64, 3), lin=nn.Linear(512, 512)).to(dtype).eval()
    draft = draft_of(model, (torch.randn(1, 3, 34, 514).to(dtype),))
    assert cpu_convolution.pack_cpu_convolutions(draft) == 0
    assert cpu_linear.pack_cpu_linears(draft) == 0


def test_factors_of_two_dtypes_are_not_packed_as_one() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(512, 512))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight.to(x.dtype))

    needs(torch.bfloat16)
    # Converted by the prologue: constant all the same.
    captured = capture(Mixed().eval(), (torch.randn(32, 512, dtype=torch.bfloat16),), lowering=Lowering.REWRITTEN)
    targets = [call.target for operator in captured.program.graph.operators for call in operator.calls]
    assert targets == ["mkldnn::_linear_pointwise.default"]


def test_an_answer_that_pytorch_does_not_give_is_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_ASKED", {"bfloat16": "_is_something_that_does_not_exist"})
    onednn.packable_dtypes.cache_clear()
    try:
        assert onednn.packable_dtypes() <= {"float32"}
    finally:
        onednn.packable_dtypes.cache_clear()
