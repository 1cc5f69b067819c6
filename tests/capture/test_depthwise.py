"""Convolutions and the depthwise one behind them as one operator on a CPU: where, and where not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autosched.capture.export import Captured, capture
from autosched.core.variants import Lowering
from autosched.runtime.kernels import bind

Body = Callable[[nn.Module, torch.Tensor], object]
LOWERINGS = (Lowering.REWRITTEN, Lowering.FUSED)


class Net(nn.Module):
    """Convolutions of 12 channels, of which ``deep`` has a group for each."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow, self.deep = nn.Conv2d(4, 12, 1), nn.Conv2d(12, 4, 1), nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.again, self.twice, self.pairs = (
            nn.Conv2d(12, 12, 3, groups=12),
            nn.Conv2d(12, 24, 3, groups=12),
            nn.Conv2d(12, 12, 3, groups=6),
        )
        self.body = body

    def forward(self, x: torch.Tensor) -> object:
        return self.body(self, x)


def captured(body: Body, lowering: Lowering, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.Tensor, Captured]:
    model, x = Net(body).eval().to(dtype), torch.randn(1, 4, 9, 10, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return model, x, capture(model, (x,), lowering=lowering)


def convolutions(found: Captured) -> list[int]:
    """How many convolutions each operator has that has any."""
    counts = [sum("conv" in call.target for call in operator.calls) for operator in found.program.graph.operators]
    return [count for count in counts if count]


JOINED: dict[str, tuple[Body, list[int]]] = {
    "an inverted bottleneck": (lambda m, x: m.narrow(F.relu6(m.deep(F.relu6(m.wide(x))))), [2, 1]),
    "two of them": (lambda m, x: m.narrow(m.again(m.wide(m.narrow(m.deep(m.wide(x)))))), [2, 1, 2, 1]),
    "a mean of what comes out": (lambda m, x: (y := F.silu(m.deep(F.silu(m.wide(x))))) * torch.sigmoid(y.mean((2, 3), keepdim=True)), [2]),
}


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", JOINED)
def test_a_depthwise_convolution_joins_what_it_alone_reads(name: str, lowering: Lowering) -> None:
    body, expected = JOINED[name]
    model, x, found = captured(body, lowering)
    assert convolutions(found) == expected
    with torch.no_grad():
        [got] = bind(found.program, found.constants, "cpu").run([x])
        assert torch.allclose(got, model(x), atol=1e-5)


APART: dict[str, Body] = {
    "another reader": lambda m, x: m.deep(y := m.wide(x)) + torch.tanh(y.flip(3)),
    "an output": lambda m, x: (m.deep(y := m.wide(x)), y),
    "depthwise before": lambda m, x: m.again(m.deep(torch.cat([x, x, x], 1))),
    "several features of each channel": lambda m, x: m.twice(m.wide(x)),
    "groups of channels": lambda m, x: m.pairs(m.wide(x)),
}


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", APART)
def test_others_stay_apart(name: str, lowering: Lowering) -> None:
    _, _, found = captured(APART[name], lowering)
    assert set(convolutions(found)) == {1}


def test_one_that_waits_for_something_else_stays_apart() -> None:
    """In a region with what follows it, which could not begin before."""
    _, _, found = captured(lambda m, x: torch.tanh(m.deep(m.wide(x)) * m.wide(torch.tanh(x.flip(3))).mean(1, keepdim=True)), Lowering.FUSED)
    assert set(convolutions(found)) == {1}


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_sixteen_bits_stay_apart(lowering: Lowering) -> None:
    _, _, found = captured(JOINED["an inverted bottleneck"][0], lowering, torch.bfloat16)
    assert set(convolutions(found)) == {1}


def test_other_devices_and_single_calls_have_no_such_operators() -> None:
    model, x, found = captured(JOINED["an inverted bottleneck"][0], Lowering.ATEN)
    assert set(convolutions(found)) == {1}
    assert set(convolutions(capture(model, (x,), target="cuda", lowering=Lowering.REWRITTEN))) == {1}
