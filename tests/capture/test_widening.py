"""Convolutions in sixteen bits that oneDNN has no kernel for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autosched.capture.draft import Draft
from autosched.capture.export import capture, draft_of
from autosched.capture.passes import widening
from autosched.capture.passes.widening import widen_convolutions
from autosched.core.program import Ref
from autosched.core.variants import Lowering
from autosched.runtime.kernels import bind
from tests.conformance.apply import Apply

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


@pytest.fixture(autouse=True)
def without_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor whose oneDNN has convolutions in float32 alone."""
    monkeypatch.setattr(widening, "packable_dtypes", lambda: frozenset({"float32"}))


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "plain": nn.Conv2d(8, 16, 3, padding=1), "bare": nn.Conv2d(8, 16, 1, bias=False), "line": nn.Conv1d(8, 16, 5, stride=2),
        "each": nn.Conv2d(8, 8, 3, groups=8), "up": nn.ConvTranspose2d(8, 16, 2, stride=2), "deep": nn.Conv3d(8, 4, 2),
        "next": nn.Conv2d(16, 8, 3),
    }  # fmt: skip


def picture(*size: int) -> torch.Tensor:
    return torch.randn(size or (2, 8, 9, 11), generator=torch.Generator().manual_seed(1))


def check(run: Any, x: torch.Tensor, dtype: torch.dtype, count: int) -> Draft:
    """After the pass, which must compute what the model does, rounded no more often."""
    model, x = Apply(run, **layers()).to(dtype).eval(), x.to(dtype)
    draft = draft_of(model, (x,))
    assert widen_convolutions(draft) == count
    made = draft.observe()
    with torch.no_grad():
        wanted = torch.utils._pytree.tree_leaves(model(x))
    for leaf, reference in zip(draft.output_leaves, wanted, strict=True):
        assert isinstance(leaf, Ref)
        assert made[leaf.value].dtype == reference.dtype
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(made[leaf.value], reference, rtol=2 * step, atol=2 * step)
    return draft


def kinds(draft: Draft) -> list[str]:
    return [node.kind.partition("::")[2] for node in draft.nodes]


@HALVES
@pytest.mark.parametrize(
    ("name", "size"),
    [("plain", ()), ("bare", ()), ("each", ()), ("up", ()), ("line", (2, 8, 30)), ("line", (8, 30)), ("deep", (1, 8, 4, 5, 6))],
)
def test_a_convolution_is_computed_in_float32_and_rounded_once(name: str, size: tuple[int, ...], dtype: torch.dtype) -> None:
    x = picture(*size)
    draft = check(lambda m, x: getattr(m, name)(x), x, dtype, 1)
    assert kinds(draft)[0] == kinds(draft)[2] == "_to_copy"
    model = layers()[name].to(dtype).eval()
    exact = model.double()(x.to(dtype).double())
    [leaf] = draft.output_leaves
    assert isinstance(leaf, Ref)
    got = draft.observe()[leaf.value].double()
    assert bool(((got - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 + 1e-6).all())


@HALVES
@pytest.mark.parametrize("biased", [True, False])
def test_a_batch_norm_is_folded_into_weights_that_are_not_rounded(biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(16)
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        nn.init.uniform_(tensor, 0.3, 1.7)
    model = nn.Sequential(nn.Conv2d(8, 16, 3, bias=biased), norm, nn.ReLU()).to(dtype).eval()
    x = picture().to(dtype)
    found = capture(model, (x,), lowering=Lowering.REWRITTEN)
    [got] = bind(found.program, found.constants, "cpu").run([x])
    exact = model.double()(x.double())
    assert got.dtype == dtype
    assert bool(((got.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 + 4e-6).all())


@HALVES
def test_weights_that_the_model_rounds_are_rounded(dtype: torch.dtype) -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, (m.plain.weight.float() * 1.1).to(dtype))

    model, x = Apply(run, **layers()).to(dtype).eval(), picture().to(dtype)
    found = capture(model, (x,), lowering=Lowering.REWRITTEN)
    [got] = bind(found.program, found.constants, "cpu").run([x])
    assert any(report.name == "widen_convolutions" and report.applied == 1 for report in found.rewrites)
    exact = F.conv2d(x.double(), (model.plain.weight.float() * 1.1).to(dtype).double())
    assert bool(((got.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 + 1e-6).all())


@HALVES
def test_what_follows_is_computed_before_the_result_is_rounded(dtype: torch.dtype) -> None:
    for follows in (torch.relu, F.silu, F.gelu, lambda x: F.hardtanh(x, -0.5, 0.5)):
        draft = check(lambda m, x, then=follows: then(m.plain(x)), picture(), dtype, 1)
        assert len(draft.nodes) == 4
        assert kinds(draft)[0] == kinds(draft)[3] == "_to_copy"


@HALVES
def test_what_others_read_too_is_rounded_first(dtype: torch.dtype) -> None:
    def both(m: Any, x: torch.Tensor) -> Any:
        made = m.plain(x)
        return torch.relu(made), made

    assert kinds(check(both, picture(), dtype, 1))[2] == "_to_copy"
    read = check(lambda m, x: torch.relu(m.plain(x)) + m.plain(x) * 2, picture(), dtype, 2)
    assert kinds(read).count("_to_copy") == 3


@HALVES
def test_one_picture_is_widened_once_for_all_that_read_it(dtype: torch.dtype) -> None:
    draft = check(lambda m, x: m.plain(x) + m.bare(x), picture(), dtype, 2)
    assert kinds(draft).count("_to_copy") == 3


@HALVES
def test_a_chain_is_packed_for_onednn(dtype: torch.dtype) -> None:
    model = Apply(lambda m, x: m.next(torch.relu(m.plain(x))), **layers()).to(dtype).eval()
    found = capture(model, (picture().to(dtype),), lowering=Lowering.REWRITTEN)
    calls = [call.target for operator in found.program.graph.operators for call in operator.calls]
    assert calls.count("mkldnn::_convolution_pointwise.default") == 2
    assert not any(target.startswith("aten::relu") for target in calls)


def test_weights_that_a_call_makes_float32_and_what_onednn_has_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "_to_copy" not in kinds(check(lambda m, x: m.plain(x), picture(), torch.float32, 0))
    check(lambda m, x: F.conv2d(x, torch.tanh(m.plain.weight + x.mean())), picture(), torch.float16, 0)
    monkeypatch.setattr(widening, "packable_dtypes", lambda: frozenset({"float32", "float16"}))
    check(lambda m, x: m.plain(x), picture(), torch.float16, 0)
