"""Calls that a program cannot hold, or a compiler not take, as others that compute the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from autosched.capture.export import Captured, capture
from autosched.core.errors import UnsupportedGraph
from autosched.core.program_json import decode_program, encode_program
from autosched.runtime.kernels import bind

X = torch.linspace(-2.0, 2.0, 12).view(3, 4)


class _Of(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def captured_as_the_model(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor = X) -> Captured:
    """What was captured of it, once it has computed what the function computes."""
    found = capture(_Of(function).eval(), (x,), rewrite=False)
    made = bind(decode_program(encode_program(found.program)), found.constants).run([x])[0]
    with torch.no_grad():
        wanted = function(x)
    assert (made.dtype, made.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(torch.view_as_real(made), torch.view_as_real(wanted)) if wanted.is_complex() else torch.equal(made, wanted)
    return found


@pytest.mark.parametrize("function", [
    lambda x: torch.add(x > 0, x < 1, alpha=2), lambda x: torch.add(x > 0, True, alpha=3),
])  # fmt: skip
def test_booleans_are_added_without_a_factor(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    # Of which Inductor makes integers of eight bytes, stored where booleans have one.
    calls = [call for operator in captured_as_the_model(function).program.graph.operators for call in operator.calls]
    assert [dict(call.kwargs) for call in calls if call.target.startswith("aten::add")] == [{}]


@pytest.mark.parametrize("factor", [0, False])
@pytest.mark.parametrize("added", [
    lambda x, factor: torch.add(x > 0, x < 1, alpha=factor), lambda x, factor: torch.add(x > 0, True, alpha=factor),
    lambda x, factor: torch.add(x[0] > 0, x < 1, alpha=factor), lambda x, factor: (x > 0).add_(x < 1, alpha=factor),
])  # fmt: skip
def test_booleans_times_nothing_are_not_added(added: Callable[[torch.Tensor, int], torch.Tensor], factor: int) -> None:
    # As with a factor, and the process ended when that memory was given back.
    calls = [call for operator in captured_as_the_model(lambda x: added(x, factor)).program.graph.operators for call in operator.calls]
    assert not [call for call in calls if call.target.startswith("aten::add")]


# From PyTorch 2.15 on, the first is of a complex type of its own, which it does not multiply on a CPU.
@pytest.mark.parametrize("function", [
    *([] if torch.__version__ >= (2, 15) else [lambda x: x.bfloat16() * 1j]),
    lambda x: x * 1j, lambda x: x + (1 + 2j), lambda x: 2j - x, lambda x: 1j / (x + 3), lambda x: x.to(torch.complex64) ** 2j,
    lambda x: torch.where(x > 0, 1j, x), lambda x: torch.where(x > 0, x, -1j), lambda x: torch.exp(1j * x), lambda x: x.sum() * 1j,
    lambda x: x.double() * (0.1 + 1j), lambda x: x.half() * 1j, lambda x: x.long() + 1j,
    lambda x: torch.fft.fft(x).mul_(0.5j),
])  # fmt: skip
def test_complex_numbers_are_tensors(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    captured_as_the_model(function)


def test_a_complex_number_where_no_tensor_may_stand_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedGraph, match=r"1j \(complex\)"):
        capture(_Of(lambda x: torch.full((4,), 1j) * x).eval(), (X,))


@pytest.mark.parametrize("function", [
    functional.rrelu, lambda x: functional.rrelu(x, 0.1, 0.7), nn.RReLU(0.2, 0.4).eval(), lambda x: nn.RReLU(inplace=True).eval()(x + 1),
])  # fmt: skip
def test_random_slopes_are_their_mean_outside_training(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = captured_as_the_model(function)
    kinds = [call.target for operator in found.program.graph.operators for call in operator.calls]
    # Nothing that Inductor would allocate memory for slopes of.
    assert [kind for kind in kinds if "add" not in kind] == ["aten::leaky_relu.default"]
