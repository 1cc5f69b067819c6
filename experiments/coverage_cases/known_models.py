"""Models that people bring from libraries that are not installed here, written down small: their layers and how these are called."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from experiments.coverage_cases.case_list import CaseList
from experiments.coverage_cases.made import Build

_LIST = CaseList("known", lambda: (torch.randn(1, 3, 64, 64),))


def cases() -> dict[str, Build]:
    """Case name to builder."""
    return dict(_LIST.builders)


class _Block(nn.Module):
    """Ultralytics' ``C2f``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        half = outputs // 2
        self.before, self.behind = _layer(inputs, outputs, 1), _layer(3 * half, outputs, 1)
        self.inner = nn.Sequential(_layer(half, half, 3), _layer(half, half, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = list(self.before(x).chunk(2, 1))
        parts.append(parts[-1] + self.inner(parts[-1]))
        made: torch.Tensor = self.behind(torch.cat(parts, 1))
        return made


def _layer(inputs: int, outputs: int, size: int, step: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, step, size // 2, bias=False), nn.BatchNorm2d(outputs), nn.SiLU())


@_LIST.model("yolo")
class _Yolo(nn.Module):
    """Version 8: anchors made at the first call, boxes as distributions over distances."""

    def __init__(self, classes: int = 5, bins: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(_layer(3, 8, 3, 2), _layer(8, 16, 3, 2), _Block(16, 16), _layer(16, 16, 3, 2))
        self.down, self.join = nn.Sequential(_layer(16, 24, 3, 2), _Block(24, 24)), _Block(40, 16)
        self.heads = nn.ModuleList(nn.Conv2d(width, 4 * bins + classes, 1) for width in (16, 24))
        self.classes, self.bins = classes, bins
        self.shape: torch.Size | None = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        large = self.stem(x)
        small = self.down(large)
        large = self.join(torch.cat([large, functional.interpolate(small, scale_factor=2.0)], 1))
        maps = [head(features) for head, features in zip(self.heads, (large, small), strict=True)]
        if self.shape != x.shape:
            self.shape, self.anchors, self.steps = x.shape, *_anchors(maps)
        boxes, scores = torch.cat([item.flatten(2) for item in maps], 2).split((4 * self.bins, self.classes), 1)
        shares = boxes.view(1, 4, self.bins, -1).transpose(2, 1).softmax(1)
        distances = (shares * torch.arange(self.bins, dtype=x.dtype).view(1, -1, 1, 1)).sum(1)
        near, far = distances.chunk(2, 1)
        corners = torch.cat([self.anchors - near, self.anchors + far], 1) * self.steps
        return torch.cat([corners, scores.sigmoid()], 1), maps


def _anchors(maps: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    points, steps = [], []
    for item, step in zip(maps, (8.0, 16.0), strict=True):
        rows, columns = (torch.arange(size) + 0.5 for size in item.shape[2:])
        points.append(torch.stack(torch.meshgrid(rows, columns, indexing="ij")[::-1]).flatten(1))
        steps.append(torch.full((1, points[-1].shape[1]), step))
    return torch.cat(points, 1), torch.cat(steps, 1)


@_LIST.model("voice-activity", lambda: (torch.randn(1, 576), torch.randn(2, 1, 16)))
class _VoiceActivity(nn.Module):
    """As Silero's: a spectrum by convolution, short lines, one step of an LSTM whose state goes in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("basis", torch.randn(66, 1, 64))
        self.encoder = nn.Sequential(nn.Conv1d(33, 16, 3, 2, 1), nn.ReLU(), nn.Conv1d(16, 16, 3, 5, 1), nn.ReLU())
        self.cell, self.score = nn.LSTMCell(16, 16), nn.Conv1d(16, 1, 1)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        waves = functional.conv1d(functional.pad(x, (0, 32), "reflect")[:, None], self.basis, stride=64)
        power = torch.sqrt(waves[:, :33] ** 2 + waves[:, 33:] ** 2)
        hidden, cell = self.cell(self.encoder(power)[..., 0], (state[0], state[1]))
        return self.score(hidden[..., None].relu()).sigmoid().squeeze(1), torch.stack([hidden, cell])


@_LIST.model("speakers", lambda: (torch.randn(1, 1, 800),))
class _Speakers(nn.Module):
    """As pyannote's: filters computed from their edges in every call, instance norms, LSTM in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.band = nn.Parameter(torch.linspace(0.01, 0.4, 8)[:, None]), nn.Parameter(torch.full((8, 1), 0.05))
        self.register_buffer("places", 2 * math.pi * torch.arange(-12.0, 0.0)[None])
        self.convolution = nn.Conv1d(16, 12, 5)
        self.norms = nn.ModuleList(nn.InstanceNorm1d(width, affine=True) for width in (1, 16, 12))
        self.rnn = nn.LSTM(12, 8, 2, bidirectional=True, batch_first=True)
        self.score = nn.Linear(16, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = self.low.abs() @ self.places, (self.low.abs() + self.band.abs()) @ self.places
        even, odd = (torch.sin(high) - torch.sin(low)) / self.places, (torch.cos(low) - torch.cos(high)) / self.places
        nothing = torch.zeros_like(self.band)
        filters = torch.cat([torch.cat([even, 2 * self.band, even.flip(1)], 1), torch.cat([odd, nothing, -odd.flip(1)], 1)])
        x = functional.conv1d(self.norms[0](x), filters[:, None], stride=2).abs()
        x = functional.leaky_relu(self.norms[1](functional.max_pool1d(x, 3)))
        x = functional.leaky_relu(self.norms[2](functional.max_pool1d(self.convolution(x), 3)))
        return self.score(self.rnn(x.transpose(1, 2))[0]).log_softmax(-1)


@_LIST.model("vocoder", lambda: (torch.randn(1, 8, 10),))
class _Vocoder(nn.Module):
    """As HiFi-GAN's generator: transposed convolutions of lines, and dilated ones in parallel that are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Conv1d(8, 16, 7, padding=3), nn.Conv1d(8, 1, 7, padding=3)
        self.up = nn.ConvTranspose1d(16, 8, 8, 4, 2)
        self.branches = nn.ModuleList(nn.Conv1d(8, 8, size, padding=size - 1, dilation=2) for size in (3, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(functional.leaky_relu(self.before(x), 0.1))
        x = sum(branch(functional.leaky_relu(x, 0.1)) + x for branch in self.branches) / 2
        return torch.tanh(self.behind(functional.leaky_relu(x, 0.1)))


@_LIST.model("entities", lambda: (torch.randint(0, 50, (1, 20)),))
class _Entities(nn.Module):
    """As GLiNER's head: every span of up to four words scored against every label."""

    def __init__(self, words: int = 16, most: int = 4) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(50, 16), nn.LSTM(16, 8, bidirectional=True, batch_first=True)
        self.first, self.last, self.span = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(32, 16)
        begin = torch.arange(words)[:, None].expand(words, most)
        self.register_buffer("spans", torch.stack([begin, (begin + torch.arange(most)).clamp(max=words - 1)], -1).flatten(0, 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        labels, words = hidden[:, :4], self.rnn(hidden[:, 4:])[0]
        ends = self.first(words)[:, self.spans[:, 0]], self.last(words)[:, self.spans[:, 1]]
        return torch.einsum("bsd,bcd->bsc", self.span(torch.cat(ends, -1).relu()), labels).sigmoid()


def _graph() -> dict[str, Any]:
    return {"edges": torch.randint(0, 20, (2, 60))}


@_LIST.model("graph-attention", lambda: (torch.randn(20, 8),), kwargs=_graph)
class _GraphAttention(nn.Module):
    """As PyTorch Geometric's ``GATv2Conv``, without the loops that it selects by their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(8, 16), nn.Linear(8, 16)
        self.weight = nn.Parameter(torch.randn(1, 2, 8))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        begin, end = edges
        sent = self.source(x).view(-1, 2, 8)[begin]
        scores = (functional.leaky_relu(sent + self.target(x).view(-1, 2, 8)[end], 0.2) * self.weight).sum(-1)
        places = end[:, None].expand_as(scores)
        most = scores.new_full((len(x), 2), -math.inf).scatter_reduce(0, places, scores, "amax")
        shares = (scores - most[end]).exp()
        total = torch.zeros_like(most).scatter_add(0, places, shares)
        made = sent * (shares / (total[end] + 1e-16))[..., None]
        return x.new_zeros(len(x), 2, 8).index_add(0, end, made).flatten(1)
