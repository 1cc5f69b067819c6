"""What a model returns: containers, constants, its own inputs and parameters, views and strides."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import torch
from torch import nn

from experiments.coverage_cases.odd.common import Boxed, Linear, Point, Registered, case_list

CASES = case_list()


class Typed(NamedTuple):
    value: torch.Tensor
    count: int


@CASES.model("returns-nested-dict")
class NestedDict(Linear):
    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        return {"a": {"b": [y, (y + 1,)]}, "c": OrderedDict(z=y.relu(), w=y.sum())}


@CASES.model("returns-namedtuple")
class ReturnsNamedtuple(Linear):
    def forward(self, x: Any) -> Any:
        return Point(self.layer(x), x * 2)


@CASES.model("returns-typed-namedtuple")
class ReturnsTyped(Linear):
    def forward(self, x: Any) -> Any:
        return Typed(self.layer(x), 3)


@CASES.model("returns-dataclass")
class ReturnsDataclass(Linear):
    def forward(self, x: Any) -> Any:
        return Boxed(self.layer(x))


@CASES.model("returns-registered-dataclass")
class ReturnsRegistered(Linear):
    def forward(self, x: Any) -> Any:
        return Registered(self.layer(x), 0.5)


@CASES.model("returns-nones-and-numbers")
class NonesAndNumbers(Linear):
    def forward(self, x: Any) -> Any:
        return self.layer(x), None, 3, 2.5, True, "text", float("inf"), [None, x.shape[0]]


@CASES.model("returns-shape")
class ReturnsShape(Linear):
    def forward(self, x: Any) -> Any:
        return self.layer(x), x.shape


@CASES.model("returns-defaultdict")
class ReturnsDefaultdict(Linear):
    def forward(self, x: Any) -> Any:
        found: Any = defaultdict(list)
        found["a"].append(self.layer(x))
        return found


@CASES.model("returns-dict-with-numbers-as-keys")
class IntegerKeys(Linear):
    def forward(self, x: Any) -> Any:
        return {0: self.layer(x), 1: x + 1, ("a", 1): x * 2}


@CASES.function("returns-empty-containers")
def _empty_containers(self: Any, x: Any) -> Any:
    return [], {}, (), x + 1


@CASES.function("returns-nothing")
def _nothing(self: Any, x: Any) -> Any:
    return None


@CASES.function("returns-only-numbers")
def _only_numbers(self: Any, x: Any) -> Any:
    return 3


@CASES.model("returns-the-same-twice")
class SameTwice(Linear):
    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        return y, y, y.t()


@CASES.function("returns-its-input")
def _input(self: Any, x: Any) -> Any:
    return x


@CASES.function("returns-its-input-and-more")
def _input_and_more(self: Any, x: Any) -> Any:
    return x, x + 1, x


@CASES.function("returns-views-of-its-input")
def _views(self: Any, x: Any) -> Any:
    return x[1:], x.t(), x.view(2, 16), x.unsqueeze(0).expand(3, 4, 8)


@CASES.function("returns-clone-of-its-input")
def _clone(self: Any, x: Any) -> Any:
    return x.clone(), x.contiguous(), x.to(torch.float32), x.to(torch.float32, copy=True)


@CASES.function("returns-detached")
def _detached(self: Any, x: Any) -> Any:
    return x.detach(), (x * 2).detach(), x.data


@CASES.model("returns-its-parameter")
class ReturnsParameter(Linear):
    def forward(self, x: Any) -> Any:
        return self.layer(x), self.layer.weight, self.layer.weight.t(), self.layer.bias + 0


@CASES.model("returns-constants")
class ReturnsConstants(Linear):
    def forward(self, x: Any) -> Any:
        return self.layer(x), torch.arange(4), torch.zeros(2, 3), torch.ones_like(x), torch.tensor([1.5, 2.5])


@CASES.function("returns-sum-of-constants", lambda: ())
def _no_inputs(self: Any) -> Any:
    return torch.arange(6).reshape(2, 3) * 2.5


@CASES.model("returns-transposed-strides")
class Transposed(Linear):
    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        return y.t(), y.t().contiguous(), y.as_strided((2, 3), (1, 2), 1), y.t() + 1, torch.stack([y, y], -1).sum(-1)


@CASES.model("returns-channels-last", lambda: (torch.randn(1, 3, 8, 8),))
class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Any) -> Any:
        y = self.conv(x.to(memory_format=torch.channels_last))
        return y, y.contiguous(), y.permute(0, 2, 3, 1), y.relu(), y.flatten(1)


@CASES.model("returns-views-of-copies")
class ViewsOfCopies(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4, 8))

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        folded = (self.table * 2).t()
        return x.clone().t(), y, y.clone().t(), y.clone().t(), torch.tensor([[1.0, 2.0]]).t(), folded, y.t() + folded
