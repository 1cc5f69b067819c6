"""Schedules whose device rounds float32: judged without the rounding, and not let off what is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.errors import IncompatibleArtifact
from autosched.runtime import comparison
from autosched.runtime.comparison import Comparison

Outputs = list[torch.Tensor]


class _Device:
    """One that rounds: what the model and its operators return is a little off, each in its own way, unless the rounding is off."""

    def __init__(self) -> None:
        self.rounds = True
        self.as_on = {"cuda": torch.float16}

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        self.rounds = False
        try:
            yield
        finally:
            self.rounds = True

    def rounded_as(self, kind: str) -> torch.dtype | None:
        return self.as_on.get(kind) if self.rounds else None

    def off(self, exact: torch.Tensor, sign: float) -> torch.Tensor:
        return exact + sign * 2e-3 * exact.abs().max() if self.rounds else exact


class _Model(nn.Module):
    def __init__(self, device: _Device) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exact: torch.Tensor = self.linear(x)
        return self.device.off(exact, 1.0)


@pytest.fixture
def device() -> _Device:
    return _Device()


@pytest.fixture
def judged(device: _Device, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    torch.manual_seed(0)
    model, x = _Model(device).eval(), torch.randn(4, 8)
    with device.full():
        program = capture(model, (x,)).program
    monkeypatch.setattr(comparison, "full_float32", device.full)
    monkeypatch.setattr(comparison, "rounded_as", device.rounded_as)

    def run(inputs: Sequence[torch.Tensor], factor: float = 1.0) -> Outputs:
        with torch.no_grad():
            return [device.off(factor * model.linear(inputs[0]), -1.0)]

    def judge(
        *, kind: str = "cuda", function: float = 1.0, graph: float = 1.0, in_order: float | None = None, compiled: bool = False
    ) -> float:
        bound: Any = SimpleNamespace(device=torch.device(kind), run=lambda inputs: run(inputs, function))
        bundle: Any = SimpleNamespace(program=program, schedule=SimpleNamespace(variant=(int(compiled),)))
        with torch.no_grad():
            answer = model(x)
        its = Comparison(model, bound.device, "the schedule")
        beside = None if in_order is None else run([x], in_order)
        return its._agree(bundle, bound, run([x], function * graph), [x], answer, beside)

    return judge


def test_what_is_apart_by_rounding_alone_agrees(judged: Callable[..., float]) -> None:
    assert 1e-3 < judged() < 1e-1


def test_a_cpu_rounds_nothing_unless_it_is_told_to(judged: Callable[..., float], device: _Device) -> None:
    with pytest.raises(IncompatibleArtifact, match="outputs differ from the model's"):
        judged(kind="cpu")
    device.as_on["cpu"] = torch.bfloat16
    assert 1e-3 < judged(kind="cpu") < 1e-1
    with pytest.raises(IncompatibleArtifact, match="outputs differ from the model's"):
        judged(kind="cpu", function=1.003)


@pytest.mark.parametrize("factor", [1.003, 0.99])
def test_another_function_is_no_rounding(judged: Callable[..., float], factor: float) -> None:
    with pytest.raises(IncompatibleArtifact, match="outputs differ from the model's"):
        judged(function=factor)


def test_compiled_code_may_be_apart_by_its_own_rounding_and_no_more(judged: Callable[..., float]) -> None:
    judged(function=1.003, compiled=True)
    with pytest.raises(IncompatibleArtifact, match="outputs differ from the model's"):
        judged(function=1.05, compiled=True)


def test_operators_of_other_widths_may_be_apart_by_what_a_cpu_rounds_to(judged: Callable[..., float], device: _Device) -> None:
    device.as_on["cpu"] = torch.bfloat16
    judged(kind="cpu", graph=1.003)
    with pytest.raises(IncompatibleArtifact, match="from those of its operators one after another"):
        judged(kind="cpu", graph=1.2)


def test_operators_that_compute_something_else_in_order_are_refused(judged: Callable[..., float], device: _Device) -> None:
    device.as_on = {}
    with device.full():
        assert judged(in_order=1.0) == judged() < 1e-6
        with pytest.raises(IncompatibleArtifact, match="outputs differ from the model's"):
            judged(in_order=1.5)


def test_a_graph_that_computes_something_else_than_its_operators_is_refused(judged: Callable[..., float]) -> None:
    with pytest.raises(IncompatibleArtifact, match="from those of its operators one after another"):
        judged(graph=1.003)
