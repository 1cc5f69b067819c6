"""Convolutions of one pixel, before what they read is enlarged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autosched.capture.draft import Draft, Node
from autosched.capture.export import capture, draft_of
from autosched.capture.passes.resizing import mix_before_resizing
from autosched.core.program import Ref
from autosched.runtime.kernels import bind

Body = Callable[[nn.Module, torch.Tensor, torch.Tensor], object]


class Net(nn.Module):
    """Two pictures, of 80 channels and 4 x 6 pixels and of 48 channels and 8 x 12 pixels."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.both, self.one, self.three = nn.Conv2d(128, 40, 1), nn.Conv2d(80, 40, 1, bias=False), nn.Conv2d(80, 40, 3)
        self.twice, self.wide, self.steps = nn.Conv2d(160, 16, 1), nn.Conv2d(32, 160, 1), nn.Conv2d(80, 40, 1, stride=2)
        self.body = body

    def forward(self, small: torch.Tensor, large: torch.Tensor) -> object:
        return self.body(self, small, large)


def larger(x: torch.Tensor, mode: str = "bilinear") -> torch.Tensor:
    return F.interpolate(x, (8, 12), mode=mode)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 80, 4, 6, generator=generator), torch.randn(2, 48, 8, 12, generator=generator)


def rewritten(body: Body, expected: int) -> Draft:
    """After the pass, which must compute what the model does."""
    model = Net(body).eval()
    draft = draft_of(model, inputs())
    assert mix_before_resizing(draft) == expected
    made = draft.observe()
    with torch.no_grad():
        wanted = torch.utils._pytree.tree_leaves(model(*inputs()))
    for leaf, reference in zip(draft.output_leaves, wanted, strict=True):
        assert isinstance(leaf, Ref)
        torch.testing.assert_close(made[leaf.value], reference, rtol=1e-5, atol=1e-5)
    return draft


def kinds(draft: Draft) -> list[str]:
    return [node.kind.partition("::")[2] for node in draft.nodes]


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_an_enlarged_picture_is_mixed_before(mode: str) -> None:
    draft = rewritten(lambda m, small, large: m.one(larger(small, mode)).relu(), 1)
    [convolution, resize, relu] = draft.nodes
    assert (convolution.kind, relu.kind) == ("aten::conv2d", "aten::relu")
    assert draft.specs[convolution.outputs[0]].shape == (2, 40, 4, 6)
    assert draft.specs[resize.outputs[0]].shape == (2, 40, 8, 12)


@pytest.mark.parametrize("first", [True, False])
def test_each_part_of_what_is_concatenated_is_mixed_apart(first: bool) -> None:
    def body(m: nn.Module, small: torch.Tensor, large: torch.Tensor) -> object:
        parts = [larger(small), large]
        return m.both(torch.cat(parts if first else parts[::-1], 1))

    assert kinds(rewritten(body, 1)) == ["conv2d", "upsample_bilinear2d", "conv2d", "add"]


def test_what_is_not_enlarged_stays_together() -> None:
    def body(m: nn.Module, small: torch.Tensor, large: torch.Tensor) -> object:
        return m.both(torch.cat([large[:, :24], larger(small), large[:, 24:]], dim=-3))

    assert kinds(rewritten(body, 1)) == ["slice", "slice", "conv2d", "upsample_bilinear2d", "cat", "conv2d", "add"]


def test_where_all_are_enlarged_the_bias_is_added_once() -> None:
    def body(m: nn.Module, small: torch.Tensor, large: torch.Tensor) -> object:
        return m.twice(torch.cat([larger(small), larger(small * 2, "nearest")], 1))

    assert kinds(rewritten(body, 1)) == ["mul", "conv2d", "upsample_bilinear2d", "conv2d", "upsample_nearest2d", "add"]


STAYING: dict[str, Body] = {
    "of several pixels": lambda m, small, large: m.three(larger(small)),
    "with steps": lambda m, small, large: m.steps(larger(small)),
    "of many more features": lambda m, small, large: m.wide(larger(small[:, :32])),
    "made smaller": lambda m, small, large: m.one(F.interpolate(small, (2, 3))),
    "read by another, too": lambda m, small, large: ((y := larger(small)).relu(), m.one(y)),
    "which leaves the model": lambda m, small, large: (y := larger(small), m.one(y)),
    "concatenated along the rows": lambda m, small, large: m.one(torch.cat([larger(small), larger(small)], 2)),
    "concatenated with booleans": lambda m, small, large: m.both(torch.cat([larger(small), large > 0], 1)),
    "concatenated with wider numbers": lambda m, small, large: m.both(torch.cat([larger(small.bfloat16()), large], 1)),
    "with a weight that comes from outside": lambda m, small, large: F.conv2d(larger(small), large.flatten()[:1280].view(16, 80, 1, 1)),
}


@pytest.mark.parametrize("name", STAYING)
def test_other_convolutions_stay(name: str) -> None:
    rewritten(STAYING[name], 0)


def test_a_picture_whose_memory_changes_before_the_convolution_is_enlarged_first() -> None:
    draft = draft_of(Net(lambda m, small, large: m.one(larger(small))).eval(), inputs())
    changed = Ref(draft.inputs[0])
    draft.nodes.insert(1, Node(torch.ops.aten.add_.Tensor, (changed, changed), {}, (-1,), "changes"))
    draft.observe()
    assert mix_before_resizing(draft) == 0


def test_new_weights_are_what_it_computes_with() -> None:
    model = Net(lambda m, small, large: m.both(torch.cat([larger(small), large], 1)).relu()).eval()
    found = capture(model, inputs())
    assert any(call.target.startswith("aten::upsample") for operator in found.program.graph.operators for call in operator.calls)
    with torch.no_grad():
        [made] = bind(found.program, found.constants, "cpu").run(inputs())
        torch.testing.assert_close(made, model(*inputs()), rtol=1e-5, atol=1e-5)
