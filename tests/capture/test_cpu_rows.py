"""Products of one row, however a model spells them, are left to the compiler in the lowering ``fused``, and packed in ``rewritten``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.graph import OpGraph
from autosched.core.variants import Lowering, Variant
from autosched.runtime.regions.pieces import variants_of
from autosched.runtime.regions.row_products import has_row_product
from tests.conformance.apply import Apply
from tests.conformance.programs import assert_computes


def fused(model: nn.Module, *inputs: torch.Tensor) -> OpGraph:
    """The graph of the lowering, which computes what the model does."""
    captured = capture(model.eval(), inputs, lowering=Lowering.FUSED)
    assert_computes(captured.program, captured.constants, model, inputs)
    return captured.program.graph


def rows_in(graph: OpGraph) -> int:
    return sum(has_row_product(operator, graph) for operator in graph.operators)


def constant(*shape: int) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.randn(*shape) / 8)])


@pytest.mark.parametrize(
    ("run", "parts"),
    [
        (lambda m, x: m.a(x), {"a": nn.Linear(512, 300)}),
        (lambda m, x: m.a(x), {"a": nn.Linear(512, 300, bias=False)}),
        (lambda m, x: m.a(x[0]), {"a": nn.Linear(512, 300)}),
        (lambda m, x: torch.mm(x, m.w[0]), {"w": constant(512, 300)}),
        (lambda m, x: torch.addmm(m.b[0], x, m.w[0]), {"w": constant(512, 300), "b": constant(300)}),
        (lambda m, x: torch.matmul(x[None], m.w[0]), {"w": constant(512, 300)}),
        (lambda m, x: m.a(x[..., None, None]), {"a": nn.Conv2d(512, 30, 1)}),
        (lambda m, x: m.a(x.view(1, 32, 4, 4)), {"a": nn.Conv2d(32, 30, 4, bias=False)}),
        (lambda m, x: m.a(x[..., None]), {"a": nn.Conv1d(512, 30, 1)}),
        (lambda m, x: m.a(x[..., None, None]), {"a": nn.Conv2d(512, 30, 1, stride=2, dilation=3)}),
    ],
)
def test_each_spelling_is_one_product_that_can_be_compiled(run: Callable[[Any, torch.Tensor], Any], parts: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Apply(run, **parts), torch.randn(1, 512)
    graph = fused(model, x)
    (operator,) = (item for item in graph.operators if has_row_product(item, graph))
    assert variants_of(operator, graph, "cpu")[:2] == (Variant.CALLS, Variant.COMPILED)


@pytest.mark.parametrize(
    ("run", "parts"),
    [
        (lambda m, x: m.a(x.view(2, 256)), {"a": nn.Linear(256, 300)}),
        (lambda m, x: torch.mm(x.view(4, 128), m.w[0]), {"w": constant(128, 30)}),
        (lambda m, x: m.a(x.view(1, 32, 4, 4)), {"a": nn.Conv2d(32, 30, 1)}),
        (lambda m, x: m.a(x.view(1, 32, 4, 4)), {"a": nn.Conv2d(32, 30, 4, padding=1)}),
        (lambda m, x: m.a(x[..., None, None]).flatten(1), {"a": nn.Conv2d(512, 32, 1, groups=4)}),
        (lambda m, x: m.a(x[..., None, None]).flatten(1), {"a": nn.ConvTranspose2d(512, 30, 1)}),
        (lambda m, x: torch.addmm(m.b[0], x, m.w[0]), {"w": constant(512, 300), "b": constant(1)}),
        (lambda m, x: x @ torch.sin(x).t(), {}),  # two of the inputs' own
    ],
)
def test_what_is_no_product_of_one_row_with_constant_weights_is_not_touched(
    run: Callable[[Any, torch.Tensor], Any], parts: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    graph = fused(Apply(run, **parts), torch.randn(1, 512))
    assert rows_in(graph) == 0


def test_a_weight_that_several_products_read_is_turned_once() -> None:
    model = Apply(lambda m, x: torch.mm(x, m.w[0]) + torch.mm(torch.sin(x), m.w[0]), w=constant(64, 64))
    captured = capture(model, (torch.randn(1, 64),), lowering=Lowering.FUSED)
    assert rows_in(captured.program.graph) == 2
    assert sum(call.target == "aten::clone.default" for call in captured.program.prologue) == 1


@pytest.mark.parametrize(("activation", "together"), [(torch.relu, True), (torch.nn.functional.gelu, False), (torch.tanh, False)])
def test_what_is_slow_for_one_number_at_a_time_is_not_computed_at_the_end_of_each_sum(
    activation: Callable[[torch.Tensor], torch.Tensor], together: bool
) -> None:
    model = Apply(lambda m, x: m.b(activation(m.a(x))), a=nn.Linear(256, 512), b=nn.Linear(512, 256))
    graph = fused(model, torch.randn(1, 256))
    assert len(graph) == (2 if together else 3)
    # With several rows the product is a library's, and what follows a loop of its own in any case.
    assert len(fused(model, torch.randn(64, 256))) == 2


@pytest.mark.parametrize("rows", [1, 2])
def test_rewritten_packs_them_all_the_same(rows: int) -> None:
    model = nn.Linear(2048, 1024)
    graph = capture(model, (torch.randn(rows, 2048),), lowering=Lowering.REWRITTEN).program.graph
    assert [call.target for item in graph.operators for call in item.calls] == ["mkldnn::_linear_pointwise.default"]


class Experts(nn.Module):
    """Of a mixture, the chosen ones, as transformers computes them: one column with each matrix, or one row."""

    def __init__(self, *, columns: bool, read_twice: bool = False, numbers: int = 32) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(6, 40, numbers) / numbers**0.5)
        self.columns, self.read_twice = columns, read_twice

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        taken = self.weights[chosen]
        made = torch.bmm(taken, x[..., None]) if self.columns else torch.bmm(x[:, None], taken.transpose(1, 2))
        return made + taken.sum() if self.read_twice else made


@pytest.mark.parametrize("columns", [True, False])
def test_the_experts_that_a_token_needs_are_read_where_they_are(columns: bool) -> None:
    x, chosen = torch.randn(2, 32), torch.tensor([4, 1])
    graph = fused(Experts(columns=columns), x, chosen)
    (operator,) = graph.operators
    assert has_row_product(operator, graph)
    assert "aten::index.Tensor" in [call.target for call in operator.calls]
    # Of which others also read, a copy is made once.
    assert len(fused(Experts(columns=columns, read_twice=True), x, chosen)) > 1


def test_what_makes_the_row_too_is_computed_once() -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        made = torch.sin(x)
        return torch.bmm(made, made[:, :1].transpose(1, 2))

    graph = fused(Apply(run), torch.randn(2, 40, 32))
    assert [has_row_product(operator, graph) for operator in graph.operators] == [False, True]


def test_a_row_that_is_looked_up_is_looked_up_once() -> None:
    model = Apply(lambda m, x, index: m.a(x[index]), a=nn.Linear(32, 40))
    graph = fused(model, torch.randn(5, 32), torch.tensor([3]))
    assert [has_row_product(operator, graph) for operator in graph.operators] == [False, True]
