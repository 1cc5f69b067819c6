"""Custom operators of the namespace ``testlib``, fit and unfit to be scheduled, and models that use them.

A module of its own: measuring processes import it by name.
"""

from __future__ import annotations

import itertools

import torch
from torch import library, nn

NAMESPACE = "testlib"
_library = library.Library(NAMESPACE, "FRAGMENT")
_count = itertools.count()


@library.custom_op("testlib::scaled_mm", mutates_args=())
def scaled_mm(x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    return (x @ weight) * scale


@scaled_mm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@library.custom_op("testlib::halves", mutates_args=())
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = x.shape[-1] // 2
    return x[..., :size].clone(), x[..., size:].clone()


@halves.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = x.shape[-1] // 2
    return x.new_empty(*x.shape[:-1], size), x.new_empty(*x.shape[:-1], size)


def _define(schema: str, kernel, fake=torch.empty_like, tags=()) -> None:
    name = schema.partition("(")[0]
    _library.define(schema, tags=tags)
    _library.impl(name, kernel, "CPU")
    if fake is not None:
        library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def _in_memory_order(x: torch.Tensor) -> torch.Tensor:
    # As a kernel does that is handed a pointer: it knows nothing of strides.
    flat = x.as_strided((x.numel(),), (1,))
    return (flat * torch.arange(1, x.numel() + 1, dtype=x.dtype)).reshape(x.shape)


def _row_major(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _secretly_writes(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


def _counts(x: torch.Tensor) -> torch.Tensor:
    return x + next(_count)


def _grad_mode(x: torch.Tensor) -> torch.Tensor:
    # The same answer only where a thread computes without gradients, as every lane must.
    return x + float(torch.is_grad_enabled())


_define("ramp(Tensor x) -> Tensor", _in_memory_order, _row_major)
_define("offset(Tensor x) -> Tensor", lambda x: x + 1, tags=(torch.Tag.pointwise,))
_define("mode(Tensor x) -> Tensor", _grad_mode)
_define("both(Tensor x) -> Tensor[]", lambda x: [x + 1, x + 2], lambda x: [torch.empty_like(x), torch.empty_like(x)])
_define("secretly_writes(Tensor x) -> Tensor", _secretly_writes)
_define("secretly_returns(Tensor x) -> Tensor", lambda x: x)
_define("counts(Tensor x) -> Tensor", _counts)
_define("without_fake(Tensor x) -> Tensor", lambda x: x + 1, None)
_define("writes(Tensor(a!) x) -> ()", lambda x: None, lambda x: None)
_define("window(Tensor(a) x) -> Tensor(a)", lambda x: x.view(-1), lambda x: x.view(-1))
_define("maybe(Tensor x) -> Tensor?", lambda x: x + 1)


class Calls(nn.Module):
    """One operator of ``testlib`` between two of PyTorch's."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.operator = getattr(getattr(torch.ops, NAMESPACE), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.operator(x * 2)
        return (made if isinstance(made, torch.Tensor) else made[-1]) + 1


class Branches(nn.Module):
    """Two branches that can run at the same time, each a custom operator between PyTorch's own."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(size, size) / size) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = torch.tanh(scaled_mm(x, self.left, 0.5))
        right = torch.sigmoid(scaled_mm(x, self.right, 2.0))
        first, second = halves(left @ right.t())
        return torch.ops.testlib.mode(first) - second


class Convolved(nn.Module):
    """A convolution whose result a custom operator reads in the order of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.ops.testlib.ramp(torch.relu(self.first(x))) / 1000).relu()
