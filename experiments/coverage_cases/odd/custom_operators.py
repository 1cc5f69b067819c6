"""Operators registered outside PyTorch: with and without a decomposition, in place, and not deterministic."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import library

from experiments.coverage_cases.odd.common import Linear, case_list

CASES = case_list()


@library.custom_op("coverage::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """A custom operator without a decomposition."""
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@library.custom_op("coverage::bump", mutates_args=("x",))
def bump(x: torch.Tensor) -> None:
    """A custom operator that changes its argument."""
    x.add_(1)


@library.custom_op("coverage::tick", mutates_args=())
def tick(x: torch.Tensor) -> torch.Tensor:
    """A custom operator that gives something else each time."""
    return x + next(_ticks)


@tick.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_ticks = itertools.count()


_fragment = library.Library("coverage", "FRAGMENT")
_fragment.define("thrice(Tensor x) -> Tensor")
_fragment.impl("thrice", lambda x: x * 3, "CompositeImplicitAutograd")


@CASES.model("custom-operator-not-trusted")
@CASES.model("custom-operator", custom_operators=("coverage",))
class CustomOperator(Linear):
    def forward(self, x: Any) -> Any:
        return twice(self.layer(x)) + 1


@CASES.model("custom-operator-that-decomposes")
class Decomposing(Linear):
    def forward(self, x: Any) -> Any:
        return torch.ops.coverage.thrice(self.layer(x))


@CASES.model("custom-operator-in-place", custom_operators=("coverage",))
class CustomInPlace(Linear):
    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        bump(y)
        return y


@CASES.model("custom-operator-not-deterministic", custom_operators=("coverage",))
class CustomTick(Linear):
    def forward(self, x: Any) -> Any:
        return tick(self.layer(x))
