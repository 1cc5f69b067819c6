"""A model whose weights are tensor subclasses, each of integers and scales, as quantisers make them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class ScaledIntegers(torch.Tensor):
    """A weight ``[out, in]`` as integers and a scale ``[out, 1]`` for each row."""

    numbers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: type[ScaledIntegers], numbers: torch.Tensor, scale: torch.Tensor) -> ScaledIntegers:
        made: ScaledIntegers = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype, device=scale.device)  # type: ignore[attr-defined]
        return made

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: object, size: Any, stride: Any) -> ScaledIntegers:
        return ScaledIntegers(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear:
            x, weight, bias = args
            return functional.linear(x, weight.numbers.to(x.dtype) * weight.scale, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default):
            return ScaledIntegers(function(args[0].numbers), function(args[0].scale))
        raise NotImplementedError(f"{function} of a quantised weight")


def quantised(weight: torch.Tensor) -> nn.Parameter:
    """``weight`` in eight bits."""
    scale = weight.detach().abs().amax(1, keepdim=True) / 127
    return nn.Parameter(ScaledIntegers((weight.detach() / scale).round().to(torch.int8), scale), requires_grad=False)


class Quantised(nn.Module):
    """Two products in parallel with weights of eight bits, and one of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        for layer in (self.first, self.second):
            layer.weight = quantised(layer.weight)
        self.own = quantised(torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: ``[batch, 8]``."""
        return functional.linear(self.first(x).relu() + self.second(x), self.own, None)
