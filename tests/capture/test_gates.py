"""Products of a picture with a gate, and the operators that they are part of on a CPU."""

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


class Net(nn.Module):
    """Squeeze and excitation of a picture of 12 channels."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.less, self.more, self.last = nn.Conv2d(12, 3, 1), nn.Conv2d(3, 12, 1), nn.Conv2d(12, 5, 1)
        self.same, self.body = nn.Conv2d(12, 12, 3, padding=1), body

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.more(F.relu(self.less(x.mean((2, 3), keepdim=True)))))

    def forward(self, x: torch.Tensor) -> object:
        return self.body(self, x)


def captured(body: Body, dtype: torch.dtype = torch.float32, **how: object) -> tuple[nn.Module, torch.Tensor, Captured]:
    model, x = Net(body).eval().to(dtype), torch.randn(2, 12, 7, 8, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return model, x, capture(model, (x,), **how)  # type: ignore[arg-type]


def with_products(found: Captured) -> list[list[str]]:
    """The calls of the operators that have a product, by their short names, without copies of the result."""
    names = [[call.target.partition("::")[2].partition(".")[0] for call in operator.calls] for operator in found.program.graph.operators]
    return [[name for name in row if name != "clone"] for row in names if "mul" in row]


HANDED_ON: dict[str, Body] = {
    "squeeze and excitation": lambda m, x: m.last((y := m.same(x)) * m.gate(y)),
    "the gate first": lambda m, x: m.last(m.gate(y := m.same(x)) * y),
    "and a residual": lambda m, x: m.same((y := m.same(x)) * m.gate(y)) + x,
    "twice": lambda m, x: m.last((z := m.same((y := m.same(x)) * m.gate(y))) * m.gate(z)),
}


@pytest.mark.parametrize("name", HANDED_ON)
def test_the_product_is_part_of_the_convolution_that_alone_reads_it(name: str) -> None:
    model, x, found = captured(HANDED_ON[name])
    rows = with_products(found)
    assert rows == [["mul", "_convolution_pointwise"]] * len(rows)
    assert len(rows) == (2 if name == "twice" else 1)
    with torch.no_grad():
        assert torch.allclose(bind(found.program, found.constants, "cpu").run([x])[0], model(x), atol=1e-5)


def test_the_views_that_a_product_reads_go_with_it() -> None:
    """An operator that hands a view to another one would be one of its own, were there nothing else in it."""
    model, x, found = captured(lambda m, x: m.last((y := m.same(x)) * m.gate(y).flatten(1)[:, :, None, None]))
    graph = found.program.graph
    assert [row[-2:] for row in with_products(found)] == [["mul", "_convolution_pointwise"]]
    assert all(graph.values[value].storage == value for operator in graph.operators for value in operator.writes)
    with torch.no_grad():
        assert torch.allclose(bind(found.program, found.constants, "cpu").run([x])[0], model(x), atol=1e-5)


KEPT: dict[str, Body] = {
    "nobody convolves it": lambda m, x: torch.tanh((y := m.same(x)) * m.gate(y)),
    "another reader": lambda m, x: m.last(z := (y := m.same(x)) * m.gate(y)) + z.mean(),
    "an output": lambda m, x: (m.last(z := (y := m.same(x)) * m.gate(y)), z),
    "a whole picture": lambda m, x: m.last((y := m.same(x)) * torch.sigmoid(y)),
    "a number for each pixel": lambda m, x: m.last((y := m.same(x)) * torch.sigmoid(y.mean(1, keepdim=True))),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_products_stay_where_they_are(name: str) -> None:
    model, x, found = captured(KEPT[name])
    assert not any(row[-1] == "_convolution_pointwise" for row in with_products(found))
    with torch.no_grad():
        wanted = model(x)
        [got, *_] = bind(found.program, found.constants, "cpu").run([x])
        assert torch.allclose(got, wanted[0] if isinstance(wanted, tuple) else wanted, atol=1e-5)


@pytest.mark.parametrize(
    "how", [{"dtype": torch.bfloat16}, {"lowering": Lowering.FUSED}, {"lowering": Lowering.ATEN}, {"target": "cuda"}], ids=str
)
def test_where_no_kernel_multiplies_it_stays(how: dict[str, object]) -> None:
    _, _, found = captured(HANDED_ON["squeeze and excitation"], **how)
    assert not any(row[-1] == "_convolution_pointwise" for row in with_products(found))
