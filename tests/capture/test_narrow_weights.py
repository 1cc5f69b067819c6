"""Weights that a model makes from narrower constants are made where a product of one row reads them, and once for anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.export import Captured, capture
from autosched.core.variants import Lowering
from autosched.runtime.regions.row_products import has_row_product
from autosched.zoo_models.decoder_int8 import EightBitLinear
from tests.conformance.programs import assert_computes

linear = nn.functional.linear


class Narrow(nn.Module):
    """Weights in eight bits, scales in groups of sixteen, and weights in bfloat16."""

    weight: torch.Tensor
    scales: torch.Tensor
    halves: torch.Tensor
    sixteen: torch.Tensor

    def __init__(self, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        self.register_buffer("weight", torch.randint(-127, 128, (40, 64), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(40, 4, 1) / 100)
        self.register_buffer("sixteen", self.weight.to(torch.int16))
        self.register_buffer("halves", torch.randn(40, 64).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)

    def grouped(self) -> torch.Tensor:
        return ((self.weight.view(40, 4, 16).float() - 3.0) * self.scales).view(40, 64)


def fused(model: nn.Module, *inputs: torch.Tensor, lowering: Lowering = Lowering.FUSED) -> Captured:
    captured = capture(model.eval(), inputs, lowering=lowering)
    assert_computes(captured.program, captured.constants, model, inputs)
    return captured


def read_by_products(captured: Captured) -> set[str]:
    """Dtypes of what operators with a product of one row read from the model."""
    graph = captured.program.graph
    constants = set(captured.constants) | {value for call in captured.program.prologue for value in call.outputs}
    return {
        graph.values[value].spec.dtype
        for operator in graph.operators
        if has_row_product(operator, graph)
        for value in operator.reads
        if value in constants and len(graph.values[value].spec.shape) == 2
    }


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        (lambda m, x: linear(x, m.weight.float()), "int8"),
        (lambda m, x: linear(x, m.weight.float()) * m.scales[:, 0, 0], "int8"),
        (lambda m, x: linear(x, m.weight.float() * m.scales[:, 0]), "int8"),
        (lambda m, x: linear(x, m.grouped()), "int8"),
        (lambda m, x: torch.mm(x, m.weight.t().float()), "int8"),  # as torchao writes it
        (lambda m, x: linear(x, m.halves.float()), "bfloat16"),
        (lambda m, x: torch.matmul(x, m.halves.t().float()), "bfloat16"),
        (lambda m, x: linear(x, m.weight.to(torch.int16).float()), "int8"),
        # Slow to widen, no narrower, or stored by inputs, or made by more than each number for itself.
        (lambda m, x: linear(x, m.sixteen.float()), "float32"),
        (lambda m, x: linear(x, m.halves.float() * m.weight), "float32"),
        (lambda m, x: torch.mm(x[:, :40], m.weight.float()), "float32"),
        (lambda m, x: linear(x, m.weight.float().softmax(-1)), "float32"),
    ],
)
def test_a_product_of_one_row_reads_what_its_weight_is_made_from(run: Callable[[Any, torch.Tensor], torch.Tensor], dtype: str) -> None:
    captured = fused(Narrow(run), torch.randn(1, 64))
    assert read_by_products(captured) == {dtype}


@pytest.mark.parametrize(("calls", "dtype"), [(10, "int8"), (40, "float32")])
def test_what_takes_many_calls_is_made_once(calls: int, dtype: str) -> None:
    def run(m: Narrow, x: torch.Tensor) -> torch.Tensor:
        wide = m.weight.float()
        for _ in range(calls):
            wide = wide * 1.01
        return linear(x, wide)

    assert read_by_products(fused(Narrow(run), torch.randn(1, 64))) == {dtype}


def test_each_product_makes_its_own_and_others_get_it_once() -> None:
    def run(m: Narrow, x: torch.Tensor) -> torch.Tensor:
        wide = m.weight.float()
        return linear(torch.sin(linear(linear(x, wide), wide.t())), wide)

    model = Narrow(run)
    captured = fused(model, torch.randn(1, 64))
    graph = captured.program.graph
    made = [sum(call.target == "aten::_to_copy.default" for call in operator.calls) for operator in graph.operators]
    # The second is stored by inputs for its product.
    assert sum(made) == 2
    assert max(made) == 1
    several = fused(model, torch.randn(3, 64))
    assert all("_to_copy" not in call.target for operator in several.program.graph.operators for call in operator.calls)


@pytest.mark.parametrize("lowering", [Lowering.REWRITTEN, Lowering.FUSED])
def test_an_eight_bit_layer_computes_what_its_layer_does_to_eight_bits(lowering: Lowering) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 40)
    model, x = EightBitLinear(layer), torch.randn(1, 64)
    with torch.no_grad():
        assert float((model(x) - layer(x)).abs().max()) < 0.02
    captured = fused(model, x, lowering=lowering)
    assert len(captured.program.graph) == 1
    assert read_by_products(captured) == {"int8" if lowering is Lowering.FUSED else "float32"}
