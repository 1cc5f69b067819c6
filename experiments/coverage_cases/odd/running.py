"""How a model is run: autocast, gradients, training mode, random numbers, hooks, great depth."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from experiments.coverage_cases.made import Made
from experiments.coverage_cases.odd.common import Linear, case_list, rows

CASES = case_list()


@CASES.model("autocast")
class Autocast(Linear):
    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.layer(x)
            z = y.float() @ x.t()
        return y, z, self.layer(x)


@CASES.model("gradients-inside")
class GradientsInside(Linear):
    def forward(self, x: Any) -> Any:
        with torch.enable_grad():
            y = self.layer(x).sum(0)
        with torch.no_grad():
            return y * 2


@CASES.model("jacobian")
class Jacobian(Linear):
    def forward(self, x: Any) -> Any:
        return torch.func.vmap(torch.func.jacrev(lambda row: self.layer(row).tanh()))(x)


@CASES.model("gradient-of-input")
class GradientOfInput(Linear):
    def forward(self, x: Any) -> Any:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(self.layer(leaf).square().sum(), leaf)
        return found


@CASES.model("checkpointing")
class Checkpointing(Linear):
    def forward(self, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False) + x


@CASES.model("dropout-in-training", training=True)
class Dropout(Linear):
    def forward(self, x: Any) -> Any:
        return functional.dropout(self.layer(x), 0.5, self.training)


@CASES.model("dropout-of-nothing-in-training", training=True)
class NoDropout(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Any) -> Any:
        return self.drop(self.layer(x))


@CASES.function("random-numbers")
def _random(self: Any, x: Any) -> Any:
    return x + torch.rand_like(x)


@CASES.function("random-numbers-seeded")
def _seeded(self: Any, x: Any) -> Any:
    return x + torch.rand(4, 8, generator=torch.Generator().manual_seed(0))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return 2 * context.saved_tensors[0] * gradient


@CASES.model("autograd-function")
class AutogradFunction(Linear):
    def forward(self, x: Any) -> Any:
        return Square.apply(self.layer(x))


@CASES.model("hooks")
class Hooked(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_hook(lambda module, args, output: output * 2)
        self.layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.register_forward_hook(lambda module, args, output: {"out": output, "twice": output * 2})

    def forward(self, x: Any) -> Any:
        return self.layer(x)


@CASES.model("very-nested")
class Nested(nn.Module):
    def __init__(self, depth: int = 60) -> None:
        super().__init__()
        self.inner = Nested(depth - 1) if depth else nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.inner(x) + 0.01


def _deep() -> Made:
    layers: list[nn.Module] = []
    for _ in range(400):
        layers += [nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)]
    return Made(nn.Sequential(*layers), rows())


CASES.add("very-deep", _deep)
