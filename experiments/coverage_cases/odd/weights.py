"""What weights a model has: shared, computed from others, views, plain attributes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from experiments.coverage_cases.made import Made
from experiments.coverage_cases.odd.common import Linear, case_list, rows

CASES = case_list()


@CASES.model("tied-weights", lambda: (torch.randint(0, 20, (2, 5)),))
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        return self.head(self.second(self.first(self.embed(tokens))))


@CASES.model("shared-module", lambda: (torch.randn(1, 4, 8, 8),))
class SharedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        self.alias = self.conv

    def forward(self, x: Any) -> Any:
        first = self.norms[0](self.conv(x)).relu()
        return self.norms[1](self.alias(first)), self.conv(first)


@CASES.model("views-of-parameters")
class ParameterViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(16, 8)
        self.left = nn.Parameter(whole[:8])
        self.right = nn.Parameter(whole[8:])
        self.register_buffer("part", whole[4:12])
        self.plain = whole[2]

    def forward(self, x: Any) -> Any:
        return functional.linear(x, self.left) + functional.linear(x, self.right), x @ self.part.t() + self.plain


@CASES.model("plain-attributes")
class PlainAttributes(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(8)
        self.items = [torch.randn(8), {"a": torch.randn(8)}]
        self.register_buffer("hidden", torch.randn(8), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.layer(x) + self.table + self.items[0] * self.items[1]["a"] + self.hidden


@CASES.model("constant-folding")
class Folding(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("position", torch.arange(8.0))

    def forward(self, x: Any) -> Any:
        angles = (self.position[:, None] * self.position[None, :] / 10).sin()
        scaled = self.layer.weight * 2 + self.layer.weight.t()
        return x @ angles, functional.linear(x, scaled), angles, scaled.sum()


class OneLayer(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer = make()

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def _one_layer(make: Callable[[], nn.Module], lively: bool = True) -> Made:
    return Made(OneLayer(make), rows(), lively=lively)


def _lazy() -> nn.Module:
    layer = nn.LazyLinear(4)
    layer(torch.randn(1, 8))
    return layer


def _made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(8, 8)


CASES.add("weight-norm", partial(_one_layer, lambda: parametrizations.weight_norm(nn.Linear(8, 8))))
CASES.add("spectral-norm", partial(_one_layer, lambda: parametrizations.spectral_norm(nn.Linear(8, 8))))
CASES.add("orthogonal", partial(_one_layer, lambda: parametrizations.orthogonal(nn.Linear(8, 8))))
CASES.add("old-weight-norm", partial(_one_layer, lambda: torch.nn.utils.weight_norm(nn.Linear(8, 8))))
CASES.add("lazy-modules", partial(_one_layer, _lazy))
CASES.add("parameters-made-in-inference-mode", partial(_one_layer, _made_in_inference_mode, lively=False))


@CASES.model("channels-last-weights", lambda: (torch.randn(2, 3, 8, 8),))
class ChannelsLastWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 36, 4)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Any) -> Any:
        y = self.norm(self.conv(x)).relu()
        return self.head(y.flatten(1)), y
