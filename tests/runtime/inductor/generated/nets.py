"""Small models of which Inductor's code for an H200 is kept beside this file; each function gives a model and its example inputs.

To write the texts anew, with a CUDA build of PyTorch and from the checkout's root (no GPU is needed):

    HERE=tests.runtime.inductor.generated.nets; OUT="--row-major -o tests/runtime/inductor/generated"
    python tools/cuda_emulator/run.py -- python -P tools/inductor_cuda.py $HERE:branches $HERE:block $HERE:odds $HERE:cache $OUT
    python tools/cuda_emulator/run.py -- python -P tools/inductor_cuda.py $HERE:branches --lowering max_autotune $OUT
    python tools/cuda_emulator/run.py -- python -P tools/inductor_cuda.py $HERE:branches --lowering max_autotune_combo $OUT
    python -P tools/inductor_cuda.py $HERE:epilogue --lowering fused --variant tuned_templates $OUT
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Branches(nn.Module):
    """Convolutions of a library, each branch with its window of a concatenation, and an operator with two results."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.three = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.cat([self.one(x), self.three(x), functional.max_pool2d(x, 3, 1, 1)], 1)
        scores = self.head(wide.mean((2, 3)))
        best, where = torch.topk(scores, 3)
        return wide, best, where


class Block(nn.Module):
    """A transformer layer: products of a library, attention, normalisations, GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.before, self.after = nn.LayerNorm(32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.before(x)).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        x = x + self.out(mixed.transpose(1, 2).reshape(2, 16, 32))
        made: torch.Tensor = x + self.down(functional.gelu(self.up(self.after(x))))
        return made


class Odds(nn.Module):
    """What is rarer: atomic additions into a buffer, a scan with a workspace, a sum in two kernels, a look-up, a library's fallback."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)

    def forward(self, index: torch.Tensor, long: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = self.table(index)
        counts = torch.zeros(50, 16).index_add(0, index, rows)
        scanned = torch.cumsum(long, 0)
        total = torch.sum(long * long)
        ordered, order = torch.sort(scanned[:64], stable=True)
        return counts.softmax(-1), scanned, total, ordered + 1.0, order


class Cache(nn.Module):
    """What is changed: a cache at one place, read before and after; a state as a whole; a counter."""

    keys: torch.Tensor
    state: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("keys", torch.zeros(32, 16))
        self.register_buffer("state", torch.zeros(4, 16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = x @ self.keys.t()
        self.keys.index_copy_(0, self.count.reshape(1), self.layer(x[:1]))
        self.count += 1
        mixed = torch.softmax(x @ self.keys.t(), 1) @ self.keys
        old = self.layer(self.state)
        self.state.mul_(0.5).add_(mixed)
        return before, old, self.layer(self.state), self.keys[3:5]


class Epilogue(nn.Module):
    """A product with its activation: one region, for which there are templates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(self.linear(x))


def branches() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """See :class:`Branches`."""
    return _seeded(Branches), (torch.randn(2, 4, 8, 8),)


def block() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """See :class:`Block`."""
    return _seeded(Block), (torch.randn(2, 16, 32),)


def odds() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """See :class:`Odds`."""
    return _seeded(Odds), (torch.randint(0, 50, (30,)), torch.randn(2**17))


def cache() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """See :class:`Cache`."""
    return _seeded(Cache), (torch.randn(4, 16),)


def epilogue() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """See :class:`Epilogue`."""
    return _seeded(Epilogue), (torch.randn(128, 64),)


def _seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(4)
    return kind().eval()
