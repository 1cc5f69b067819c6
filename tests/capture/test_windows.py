"""What is written through ``unfold`` is what the model writes, or the model is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.errors import UnsupportedGraph
from autosched.runtime.kernels import bind

Write = Callable[[torch.Tensor], object]


class _Writing(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        self.write(y)
        return y, y + 1


def _by_argument(y: torch.Tensor) -> None:
    torch.mul(y[:, 1:].unfold(1, 4, 4), 2, out=y.unfold(1, 4, 4))


@pytest.mark.parametrize("write", [
    lambda y: y.unfold(-1, 2, 2).mul_(3), lambda y: y.unfold(0, 2, 2)[..., 1].zero_(), lambda y: y.unfold(-1, 2, 3).add_(1),
    lambda y: y.unfold(-1, 9, 1)[..., 1:3].fill_(5), lambda y: y.unfold(0, 1, 1).unfold(1, 4, 4)[..., 1:].neg_(),
    lambda y: y.t().unfold(0, 2, 2).masked_fill_(y.t().unfold(0, 2, 2) > 0, 5.0), _by_argument,
])  # fmt: skip
def test_what_lies_between_windows_stays(write: Write) -> None:
    x = torch.randn(3, 9)
    model = _Writing(write).eval()
    captured = capture(model, (x,), rewrite=False)
    with torch.no_grad():
        assert all(map(torch.equal, bind(captured.program, captured.constants).run([x]), model(x)))


@pytest.mark.parametrize(("shape", "dim"), [((9,), 0), ((9,), -1), ((2, 6, 3), 1), ((6, 2, 3), 0), ((2, 3, 6, 5), -2)])
def test_windows_of_tensors_of_any_number_of_dimensions_are_spelled_out(shape: tuple[int, ...], dim: int) -> None:
    x = torch.randn(shape)
    model = _Writing(lambda y: y.unfold(dim, 2, 3).mul_(3)).eval()
    captured = capture(model, (x,), rewrite=False)
    with torch.no_grad():
        assert all(map(torch.equal, bind(captured.program, captured.constants).run([x]), model(x)))


@pytest.mark.parametrize("write", [lambda y: y.unfold(-1, 3, 1)[:, ::3].mul_(2), lambda y: y.unfold(-1, 2, 4).add_(1)])
def test_windows_that_are_no_view_of_slices_are_refused(write: Write) -> None:
    with pytest.raises(UnsupportedGraph, match=r"writes through unfold\(1, .* of a tensor of shape \[3, 7\] at .*test_windows.py:"):
        capture(_Writing(write).eval(), (torch.randn(3, 7),))


def test_overlapping_windows_that_are_only_read_are_captured() -> None:
    class Reading(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            windows = y.unfold(-1, 3, 1)
            y[:, 2].zero_()
            return windows.sum(-1)

    x = torch.randn(3, 7)
    captured = capture(Reading().eval(), (x,), rewrite=False)
    with torch.no_grad():
        torch.testing.assert_close(bind(captured.program, captured.constants).run([x])[0].clone(), Reading()(x))
