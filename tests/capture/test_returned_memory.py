"""What a call returns is its owner's to write to: neither the next call nor another output may notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosched.capture.export import capture
from autosched.core.variants import Lowering
from autosched.runtime.kernels import bind


class ViewsOfCopies(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4, 8))

    def forward(self, x: Any) -> Any:
        y = x + 1
        folded = (self.table * 2).t()
        return x.clone().t(), y, y.clone().t(), y.clone().t(), torch.tensor([[1.0, 2.0]]).t(), folded, y.t() + folded


class EqualCopies(torch.nn.Module):
    """The same copy three times: once for the model itself, and two that leave it."""

    def forward(self, x: Any) -> Any:
        image = x * 2
        inside = image.transpose(1, 2).contiguous().sum()
        return inside, image.transpose(1, 2).contiguous().flatten(), image.transpose(1, 2).reshape(2, -1)


class HiddenViews(torch.nn.Module):
    """Composites whose schemas say nothing of the views that they give back."""

    def forward(self, x: Any) -> Any:
        y = x + 1
        copies = [x.clone() for _ in range(4)]
        permuted, same, grid = torch.einsum("ij->ji", copies[0]), copies[1].type_as(y), torch.meshgrid(copies[2][0], indexing="ij")[0]
        return permuted, same, grid, torch.broadcast_tensors(copies[3], y)[0], y, torch.einsum("ij->j", y)


@pytest.mark.parametrize("lowering", [Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED])
@pytest.mark.parametrize(
    ("model", "shape"), [(ViewsOfCopies(), (4, 8)), (EqualCopies(), (2, 3, 4)), (HiddenViews(), (4, 8))], ids=["views", "equal", "hidden"]
)
def test_writing_to_an_output_changes_nothing_else(model: torch.nn.Module, shape: tuple[int, ...], lowering: Lowering) -> None:
    x = torch.randn(shape)
    with torch.no_grad():
        expected = model(x)
    captured = capture(model.eval(), (x,), lowering=lowering)
    bound = bind(captured.program, captured.constants)
    before = x.clone()
    for _ in range(2):
        outputs = bound.run([x])
        for place, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
            # If an earlier one shared its memory, this one is zero by now.
            assert torch.allclose(output, wanted), place
            with torch.inference_mode():
                output.zero_()
        assert torch.equal(x, before)


def test_shifts_are_captured_under_names_that_may_run() -> None:
    class Shifts(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x << 2, x >> 1, x << x, x & 3

    x = torch.tensor([1, 2, 3])
    captured = capture(Shifts(), (x,))
    for output, wanted in zip(bind(captured.program, captured.constants).run([x]), Shifts()(x), strict=True):
        assert torch.equal(output, wanted)
