"""What numbers a model computes with: integers, few bits, complex ones, none at all, and those that are not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from experiments.coverage_cases.odd.common import Linear, case_list

CASES = case_list()


@CASES.model("zero-dimensional", lambda: (torch.tensor(2.5), torch.tensor(3), torch.randn(4, 8)))
class ZeroDimensional(Linear):
    def forward(self, scale: Any, count: Any, x: Any) -> Any:
        # A tensor without dimensions does not widen the dtype of one with them.
        return scale * count, self.layer(x) * scale, x + count, scale.double() * x, count / 2, scale.reshape(1)


@CASES.model("empty-tensors", lambda: (torch.randn(0, 8), torch.zeros(3, 0)))
class EmptyTensors(Linear):
    def forward(self, x: Any, y: Any) -> Any:
        return self.layer(x), y.sum(1), torch.cat([x, torch.ones(2, 8)]), x.sum(), y @ y.t()


@CASES.function(
    "bool-and-integers",
    lambda: (torch.tensor([True, False, True]), torch.tensor([3, -7, 2]), torch.tensor([250, 7, 1], dtype=torch.uint8)),
)
def _integers(self: Any, flags: Any, numbers: Any, small: Any) -> Any:
    return (
        flags & (numbers > 0), ~flags, numbers // 2, numbers % 4, numbers / 2, small + 10, small + numbers, flags + 1, flags.sum(),
        small.sum(), numbers.float().mean(), numbers << 2, numbers ^ 5, -numbers, small * 2.5,
        torch.where(flags, numbers, small), numbers**2,
    )  # fmt: skip


@CASES.function(
    "promotion", lambda: (torch.randn(3).half(), torch.randn(3), torch.randn(3).double(), torch.tensor(2), torch.randn(3).bfloat16())
)
def _promotion(self: Any, half: Any, single: Any, double: Any, number: Any, brain: Any) -> Any:
    return (
        half + single,
        single * double,
        half * number,
        half + 1,
        half * 2.5,
        brain + half,
        number + 0.5,
        torch.cat([half, single]),
        brain.sum(),
        half**2,
    )


@CASES.model("half", lambda: (torch.randn(4, 8).half(),))
class Half(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.half()

    def forward(self, x: Any) -> Any:
        return self.layer(x).softmax(-1), x.sum(), x.mean(), functional.layer_norm(x, (8,)), x.float().exp().half()


@CASES.model("bfloat16", lambda: (torch.randn(4, 8).bfloat16(),))
class Brain(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, x: Any) -> Any:
        return functional.gelu(self.layer(x)) + x, x.cumsum(0), (x.float() * 2).to(x.dtype)


@CASES.model("complex", lambda: (torch.randn(4, 8, dtype=torch.complex64),))
class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x: Any) -> Any:
        y = x @ self.weight
        return y, y.conj(), y.real, y.imag, y.abs(), torch.view_as_real(y), y * 2, y.conj() @ self.weight, y.angle()


@CASES.function("fourier", lambda: (torch.randn(2, 16),))
def _fourier(self: Any, x: Any) -> Any:
    spectrum = torch.fft.rfft(x)
    return spectrum, torch.fft.irfft(spectrum * 2, n=16), torch.stft(x, 8, return_complex=True, window=torch.hann_window(8)).abs()


@CASES.function("special-values", lambda: (torch.tensor([0.0, -0.0, float("inf"), float("nan"), -3.0]),))
def _special(self: Any, x: Any) -> Any:
    return (
        x + 0,
        x * 1,
        x * 0,
        1 / x,
        x - 0,
        x.sqrt(),
        x.relu(),
        torch.maximum(x, -x),
        x.isnan(),
        x.clamp(-1, 1),
        x.sign(),
        x / 1,
        (-x).neg(),
    )
