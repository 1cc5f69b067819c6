"""A model that is one function of its inputs and layers: what a test is about stands in the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *tensors: Any) -> Any:
        return self.function(self, *tensors)
