"""Activations that PyTorch is slow at on a CPU, spelled otherwise: what becomes of them, and what stays."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autosched.capture.export import Captured, capture
from autosched.core.variants import Lowering
from autosched.runtime.kernels import bind
from tests.conformance.apply import Apply

gelu = nn.functional.gelu


def kinds(found: Captured) -> list[str]:
    return [call.target.removeprefix("aten::").split(".")[0] for operator in found.program.graph.operators for call in operator.calls]


SPELLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x: gelu(x, approximate="tanh"),
    "gelu as GPT-2 has it": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
    "fast gelu": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "mish": nn.functional.mish,
    "a gate": lambda x: (torch.tanh(x) + 1) * 0.5,
}
# Where a float32 begins to be something else, and where an activation does.
SPECIAL = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e20, -1e20, 3e38, -3e38, math.inf, -math.inf, math.nan])


@pytest.mark.parametrize("lowering", [Lowering.REWRITTEN, Lowering.FUSED])
@pytest.mark.parametrize("name", SPELLED)
def test_it_is_computed_otherwise_and_as_exactly(name: str, lowering: Lowering) -> None:
    function = SPELLED[name]
    x = torch.cat([torch.linspace(-40.0, 40.0, 8192 - len(SPECIAL)), SPECIAL])
    found = capture(Apply(lambda m, x: function(x)), (x,), lowering=lowering)
    assert not {"gelu", "tanh", "mish"} & set(kinds(found))
    [got] = bind(found.program, found.constants, "cpu").run([x])
    exact, eager = function(x.double()), function(x)
    finite = slice(0, len(x) - len(SPECIAL))
    error, of_eager = (float((made[finite] - exact[finite]).abs().max()) for made in (got, eager))
    assert error <= of_eager + 1e-7
    special, of_eager_there = got[finite.stop :], eager[finite.stop :]
    assert torch.allclose(special, of_eager_there, equal_nan=True)
    assert torch.equal(special.nan_to_num(1.0).signbit(), of_eager_there.nan_to_num(1.0).signbit())


LEFT_ALONE: dict[str, Callable[[torch.Tensor], object]] = {
    "gelu by the error function": gelu,
    "a tangent alone": torch.tanh,
    "a tangent that is read again": lambda x: (torch.tanh(x) + 1, torch.tanh(x)),
    "a tangent and two": lambda x: torch.tanh(x) + 2,
    "a tangent and ones with a factor": lambda x: torch.add(torch.tanh(x), 1, alpha=3),
    "a tangent of integers": lambda x: torch.tanh((x * 40).to(torch.int8)) + 1,
    "sixteen bits": lambda x: gelu(x.bfloat16(), approximate="tanh"),
    "few numbers": lambda x: gelu(x[:8191], approximate="tanh"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_others_stay_as_they_are(name: str) -> None:
    function = LEFT_ALONE[name]
    found = capture(Apply(lambda m, x: function(x)), (torch.randn(8192),), lowering=Lowering.REWRITTEN)
    assert {"gelu", "tanh"} & set(kinds(found))
    assert "sigmoid" not in kinds(found)


def test_for_a_gpu_they_stay_as_they_are() -> None:
    found = capture(Apply(lambda m, x: nn.functional.mish(x)), (torch.randn(8192),), lowering=Lowering.REWRITTEN, target="cuda")
    assert kinds(found) == ["mish"]


def test_what_onednn_computes_with_a_convolution_stays_there() -> None:
    model = Apply(lambda m, x: gelu(m.layer(x), approximate="tanh"), layer=nn.Conv2d(16, 16, 3)).eval()
    found = capture(model, (torch.randn(1, 16, 32, 32),), lowering=Lowering.REWRITTEN)
    assert kinds(found)[0] == "mkldnn::_convolution_pointwise"
    assert not {"gelu", "sigmoid"} & set(kinds(found))
