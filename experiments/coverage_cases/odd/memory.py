"""What memory a model changes: buffers, inputs, intermediate results."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from experiments.coverage_cases.odd.common import Linear, case_list

CASES = case_list()


@CASES.model("buffer-updated")
class Buffer(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(4, 8))

    def forward(self, x: Any) -> Any:
        self.count += 1
        self.last.copy_(x)
        return self.layer(x) * self.count + self.last


@CASES.model("buffer-read-then-updated")
class ReadThenUpdated(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.randn(4, 8))

    def forward(self, x: Any) -> Any:
        before = self.memory * 1
        seen = self.memory.sum()
        self.memory.mul_(0.5).add_(x)
        return self.layer(before), seen, self.memory.sum()


@CASES.model("buffer-replaced")
class Replaced(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(4, 8))

    def forward(self, x: Any) -> Any:
        self.memory = self.memory + x
        return self.layer(self.memory)


@CASES.model("batch-norm-in-training", training=True)
class BatchNorm(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Any) -> Any:
        return self.norm(self.layer(x))


@CASES.model("batch-norm-without-statistics")
class NoStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 1)
        self.norm = nn.BatchNorm1d(4, track_running_stats=False)

    def forward(self, x: Any) -> Any:
        return self.norm(self.conv(x.unsqueeze(0)))


@CASES.function("input-changed-in-place")
def _in_place(self: Any, x: Any) -> Any:
    x.add_(1)
    return x * 2


@CASES.function("view-of-input-changed-in-place")
def _in_place_view(self: Any, x: Any) -> Any:
    x[1:3].mul_(2)
    return x.sum(0)


@CASES.model("in-place-on-intermediates")
class InPlace(Linear):
    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        kept = y.clone()
        view = y[1:3]
        view.mul_(2)
        y[0] = 7
        y[:, 1::2] -= 1
        y.relu_()
        z = torch.zeros(4, 8)
        z.index_add_(0, torch.tensor([0, 2]), y[:2])
        z.scatter_(1, torch.tensor([[0], [1], [2], [3]]), 5.0)
        return y, kept, view, z, y.masked_fill_(y > 3, 0)


@CASES.model("in-place-through-views")
class ThroughViews(Linear):
    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        flat = y.view(-1)
        before = flat + 0
        flat[::3] = 1
        y.t().add_(torch.arange(4))
        left, right = y.chunk(2, 1)
        left += right
        return before, y * 1, left, right, flat.sum()


@CASES.model("out-argument")
class Out(Linear):
    def forward(self, x: Any) -> Any:
        target = torch.empty(4, 8)
        torch.add(self.layer(x), 1, out=target)
        return target, torch.empty_like(x).fill_(3), x.new_empty(2).zero_(), x.new_full((2,), 4)
