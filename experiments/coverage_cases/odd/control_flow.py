"""What decides which operators run: values, shapes, counters, code that only Python sees."""

from __future__ import annotations

from typing import Any

import torch

from experiments.coverage_cases.odd.common import Linear, case_list

CASES = case_list()


@CASES.function("branch-on-value")
def _branch(self: Any, x: Any) -> Any:
    return x if x.sum() > 0 else -x


@CASES.function("loop-on-value")
def _loop(self: Any, x: Any) -> Any:
    while x.norm() > 1:
        x = x / 2
    return x


@CASES.function("nonzero")
def _nonzero(self: Any, x: Any) -> Any:
    return x.nonzero()


@CASES.function("mask-selects")
def _mask(self: Any, x: Any) -> Any:
    return x[x > 0].sum()


@CASES.function("cond")
def _cond(self: Any, x: Any) -> Any:
    return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,))


@CASES.function("branch-on-shape")
def _shape(self: Any, x: Any) -> Any:
    return x * 2 if x.shape[0] > 2 else x / 2


@CASES.function("item-of-constant")
def _item(self: Any, x: Any) -> Any:
    return x * torch.tensor(2.5).item()


@CASES.model("counts-its-calls")
class Counts(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.layer(x)


@CASES.model("counter-decides")
class CounterDecides(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.layer(x) * self.calls


@CASES.function("numpy-inside")
def _numpy(self: Any, x: Any) -> Any:
    return torch.from_numpy(x.numpy() * 2)


@CASES.function("prints-and-asserts")
def _asserts(self: Any, x: Any) -> Any:
    assert x.shape[1] == 8
    torch._assert(x.shape[0] == 4, "four rows")
    return x + 1
