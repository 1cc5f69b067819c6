"""What tells two regions apart: one compiled artifact serves all regions of one digest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.graph import Operator, OpGraph
from autosched.core.variants import Lowering
from autosched.runtime.regions.pieces import operator_digest, piece_digest, pieces_of

Run = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


class Running(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self.run(*inputs)


def fused(run: Run, inputs: int = 1) -> tuple[Operator, OpGraph]:
    """The one operator of a function of ``inputs`` tensors of 8 x 8 numbers."""
    graph = capture(Running(run).eval(), tuple(torch.randn(8, 8) for _ in range(inputs)), lowering=Lowering.FUSED).program.graph
    (operator,) = graph.operators
    return operator, graph


def digests(run: Run, inputs: int = 1) -> tuple[str, list[str]]:
    operator, graph = fused(run, inputs)
    return operator_digest(operator, graph), [piece_digest(piece, graph) for piece in pieces_of(operator, graph)]


def first_half_gates(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return nn.functional.silu(a) * b


def last_half_gates(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return nn.functional.silu(b) * a


def exponent_and_product(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.exp(x), y * x


def exponent_and_its_product(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.exp(x)
    return made, made * x


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (first_half_gates, last_half_gates),
        (lambda x: torch.tanh(x) - torch.sigmoid(x), lambda x: torch.sigmoid(x) - torch.tanh(x)),
        (lambda x: torch.tanh(x).relu() - torch.sigmoid(x), lambda x: torch.tanh(x) - torch.sigmoid(x).relu()),
    ],
)
def test_regions_of_the_same_calls_that_are_wired_in_another_way_share_nothing(one: Run, other: Run) -> None:
    (whole, pieces), (other_whole, other_pieces) = digests(one), digests(other)
    assert whole != other_whole
    assert set(pieces).isdisjoint(other_pieces)


def test_regions_that_read_more_share_nothing_with_those_that_make_it_themselves() -> None:
    (operator, graph), (other, others) = fused(exponent_and_product, 2), fused(exponent_and_its_product, 2)
    assert (len(operator.reads), len(other.reads)) == (2, 1)
    assert operator_digest(operator, graph) != operator_digest(other, others)


def test_equal_regions_share_wherever_they_stand() -> None:
    run = Running(lambda x: x.softmax(-1).cumsum(0).softmax(-1))
    graph = capture(run.eval(), (torch.randn(8, 8),), lowering=Lowering.FUSED).program.graph
    first, _, last = graph.operators
    assert first.reads != last.reads
    assert operator_digest(first, graph) == operator_digest(last, graph)
