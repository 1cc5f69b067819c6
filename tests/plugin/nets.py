"""Small models of the kinds that people compile, and a way to put a two-lane schedule of one in the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autosched.capture.export import capture
from autosched.config import schedules_dir
from autosched.core.program import ConstantSource
from autosched.core.schedule import make_schedule
from autosched.core.variants import Lowering
from autosched.export.bundle import make_bundle
from autosched.export.cache import keep
from autosched.pipeline.cache import pinned
from autosched.runtime.bundle.format import Bundle
from autosched.runtime.host_key import cpu_device_key, software_key
from tests.conformance.bundles import evidence_for


class Mlp(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.last = nn.Linear(16, 4)
        reseed(self, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(torch.relu(self.first(x)))
        return made


class Inception(nn.Module):
    """Branches of convolutions with batch norms, as in GoogLeNet, joined and pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = self._unit(3, 8, 3)
        self.branches = nn.ModuleList([self._unit(8, 8, size) for size in (1, 3, 5)])
        self.head = nn.Linear(24, 5)
        self.dropout = nn.Dropout(0.2)
        reseed(self, 1)

    @staticmethod
    def _unit(before: int, after: int, size: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, size, padding=size // 2, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = torch.cat([branch(x) for branch in self.branches], 1).mean((2, 3))
        made: torch.Tensor = self.head(self.dropout(x))
        return made


class Attention(nn.Module):
    """A transformer block with a mask given by keyword and a dictionary as output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        reseed(self, 2)

    def forward(self, x: torch.Tensor, unused: torch.Tensor | None = None, *, bias: torch.Tensor) -> dict[str, Any]:
        h = self.norm(x)
        q, k, v = (part(h).view(2, 5, 4, 4).transpose(1, 2) for part in (self.query, self.key, self.value))
        scores = (q @ k.transpose(-2, -1)) * 0.5 + bias
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 16))
        return {"hidden": x + self.down(nn.functional.gelu(self.up(x))), "scores": (scores, None), "heads": 4}


class SecondInputFirst(nn.Module):
    """Dynamo numbers inputs by first use, export by position."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.sigmoid(self.a(y))
        return self.b(x) * h, h


class Broken(nn.Module):
    """Two parts that Dynamo cannot join."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.a(x))
        torch._dynamo.graph_break()
        return torch.sigmoid(self.b(x))


class Counting(nn.Module):
    """Changes a buffer of its own at every call."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        made: torch.Tensor = self.a(x) + self.seen
        return made


class CountingTwice(Counting):
    """Knows what it changes under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("also", self.seen[:4])


def reseed(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def inputs_of(model: nn.Module, seed: int = 0) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Arguments of a call."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if isinstance(model, Inception):
        return (draw(2, 3, 12, 12),), {}
    if isinstance(model, Attention):
        return (draw(2, 5, 16),), {"bias": draw(2, 1, 5, 5)}
    if isinstance(model, SecondInputFirst):
        return (draw(3, 8), draw(3, 8)), {}
    return (draw(3, 8),), {}


def cached_two_lanes(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], lowering: Lowering = Lowering.REWRITTEN) -> Bundle:
    """Keep a two-lane schedule of ``model`` in the cache, as tuning would, without measuring anything."""
    captured = capture(model, args, kwargs, lowering=lowering)
    graph = captured.program.graph
    literals = {
        binding.name: captured.constants[binding.value] for binding in captured.program.bindings if binding.source is ConstantSource.LITERAL
    }
    schedule = make_schedule(graph, range(len(graph)), [index % 2 for index in range(len(graph))])
    evidence = evidence_for(len(graph), cpu_device_key(), graph.hash)
    bundle = make_bundle(captured.program, schedule, evidence, literals, cpu_device_key(), software_key())
    assert keep(schedules_dir(), pinned(bundle, captured.structure)) is not None
    return bundle


def require_same(got: object, wanted: object) -> None:
    """Equal containers and plain leaves, tensors within float32's rounding."""
    left, right = tree_leaves(got), tree_leaves(wanted)
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        else:
            assert one == other
