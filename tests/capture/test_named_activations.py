"""Activations that a model spells out are called by their names on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.export import Captured, capture
from autosched.core.variants import Lowering
from autosched.runtime.kernels import bind

ROOT = math.sqrt(2.0 / math.pi)
# As transformers, timm and others have them.
SPELLED: dict[str, tuple[str, Callable[..., Any]]] = {
    "GPT-2": ("gelu", lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0))))),
    "GPT-NeoX": ("gelu", lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))),
    "BLOOM": ("gelu", lambda x: x * 0.5 * (1.0 + torch.tanh(0.7978845608028654 * x * (1 + 0.044715 * x * x)))),
    "ESM": ("gelu", lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    "EfficientNet": ("silu", lambda x: x * torch.sigmoid(x)),
    "by exp": ("silu", lambda x: x / (1 + torch.exp(-x))),
    "MobileNetV3": ("hardswish", lambda x: x * nn.functional.relu6(x + 3) / 6),
    "clamped": ("hardswish", lambda x: x * (torch.clamp(x + 3, 0, 6) * (1 / 6))),
    "YOLOv4": ("mish", lambda x: x * torch.tanh(nn.functional.softplus(x))),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "another constant": lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0)))),
    "few digits": lambda x: x * 0.5 * (1.0 + torch.erf(x / 1.41421)),
    "CLIP": lambda x: x * torch.sigmoid(1.702 * x),
    "of two tensors": lambda x: x * torch.sigmoid(x.flip(0)),
    "of a sum along a row": lambda x: x * torch.sigmoid(x.sum(-1, keepdim=True)),
    "half of it is read twice": lambda x: (half := torch.sigmoid(x)) * x + half.amax(),
}


class Net(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(32, 48)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.linear(x))


def captured(function: Callable[..., Any], x: torch.Tensor) -> tuple[nn.Module, Captured]:
    torch.manual_seed(0)
    model = Net(function).to(x.dtype).eval()
    found = capture(model, (x,), lowering=Lowering.REWRITTEN)
    assert isinstance(found, Captured)
    return model, found


def called(found: Captured) -> list[str]:
    return [call.target.split("::")[1].split(".")[0] for operator in found.program.graph.operators for call in operator.calls]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPELLED)
def test_a_spelling_is_called_by_its_name(name: str, dtype: torch.dtype) -> None:
    activation, function = SPELLED[name]
    x = torch.randn(20, 32).to(dtype) * 3
    model, found = captured(function, x)
    assert activation in called(found)
    assert not {"pow", "tanh", "erf", "sigmoid", "exp", "relu6", "clamp", "softplus"} & set(called(found))
    [got] = bind(found.program, found.constants, "cpu").run([x])
    with torch.no_grad():
        wanted, exact = model(x), model.double()(x.double())
    assert (got.double() - exact).abs().max() <= (wanted.double() - exact).abs().max() + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_as_they_are(name: str) -> None:
    x = torch.randn(20, 32)
    model, found = captured(OTHERS[name], x)
    assert not {"gelu", "silu", "hardswish", "mish"} & set(called(found))
    assert torch.allclose(bind(found.program, found.constants, "cpu").run([x])[0], model(x), atol=1e-6)


def test_what_a_model_returns_of_it_too_is_made() -> None:
    x = torch.randn(20, 32)
    model, found = captured(lambda x: ((half := torch.sigmoid(x)) * x, half), x)
    got = bind(found.program, found.constants, "cpu").run([x])
    assert all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in zip(got, model(x), strict=True))
