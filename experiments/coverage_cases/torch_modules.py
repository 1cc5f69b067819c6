"""torch.nn's own larger modules, and the ways PyTorch itself wraps a model."""

# ruff: noqa: E501 (one case a line)
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from experiments.coverage_cases.made import Build, Made


def cases() -> dict[str, Build]:
    """Case name to builder."""
    found: dict[str, Build] = {}
    for name, (kind, options, inputs) in _MODULES.items():
        found[f"torch:{name}"] = partial(_build, kind, options, inputs)
    return found


def _build(kind: Callable[..., nn.Module], options: dict[str, Any], inputs: Callable[[], tuple[Any, ...]]) -> Made:
    return Made(kind(**options), inputs())


def _sequence() -> tuple[Any, ...]:
    return (torch.randn(2, 6, 16),)


def _with_state(count: int) -> tuple[Any, ...]:
    state = tuple(torch.randn(2, 2, 16) for _ in range(count))
    return (torch.randn(2, 6, 16), state if count > 1 else state[0])


_RNN: dict[str, Any] = {"input_size": 16, "hidden_size": 16, "num_layers": 2, "batch_first": True}
_LAYER: dict[str, Any] = {"d_model": 16, "nhead": 4, "dim_feedforward": 32, "batch_first": True}


def _encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(**_LAYER), 2, **options)


class _PaddedEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = _encoder()

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(tokens, src_key_padding_mask=padding)


class _Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True, **options)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.attention(tokens, tokens, tokens, average_attn_weights=False)


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(16, 16, batch_first=True)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(tokens, lengths, batch_first=True, enforce_sorted=False)
        made, last = self.rnn(packed)
        return nn.utils.rnn.pad_packed_sequence(made, batch_first=True), last


class _Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(16, 16), nn.GRUCell(16, 16), nn.RNNCell(16, 16)

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden, cell = self.lstm(tokens[:, 0])
        for step in range(1, 4):
            hidden, cell = self.lstm(tokens[:, step], (hidden, cell))
        return self.gru(hidden, cell), self.rnn(hidden)


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, 8, mode=mode) for mode in ("sum", "mean", "max"))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return torch.cat([bag(indices) for bag in self.bags], 1)


class _Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.GroupNorm(2, 8),
                nn.InstanceNorm2d(8, affine=True),
                nn.BatchNorm2d(8),
                nn.LocalResponseNorm(3),
                nn.LayerNorm([8, 6, 6]),
                nn.RMSNorm(6),
            ]
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            image = layer(image)
        return image


class _Pools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2)

    def forward(self, image: torch.Tensor) -> Any:
        small, where = self.pool(image)
        others = [
            nn.functional.adaptive_avg_pool2d(image, 3), nn.functional.adaptive_max_pool2d(image, 3), nn.functional.avg_pool2d(image, 3, 1, 1),
            nn.functional.lp_pool2d(image, 2, 2), nn.functional.fold(nn.functional.unfold(image, 2, stride=2), (8, 8), 2, stride=2),
        ]  # fmt: skip
        return self.unpool(small, where), where, others


class _Resizes(nn.Module):
    def forward(self, image: torch.Tensor) -> list[torch.Tensor]:
        grid = nn.functional.affine_grid(torch.eye(2, 3).unsqueeze(0), [1, 8, 8, 8], align_corners=False)
        modes = ("nearest", "bilinear", "bicubic", "area", "nearest-exact")
        found = [nn.functional.interpolate(image, scale_factor=1.5, mode=mode) for mode in modes]
        return [*found, nn.functional.grid_sample(image, grid, align_corners=False), nn.functional.pad(image, (1, 2, 1, 1), mode="reflect")]


class _Losses(nn.Module):
    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return nn.functional.cross_entropy(logits, labels, label_smoothing=0.1), nn.functional.nll_loss(logits, labels, reduction="none")


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular")
        self.space = nn.Conv3d(1, 2, 3, padding="same")
        self.grouped = nn.Conv2d(4, 8, 3, groups=2, dilation=2, bias=False)
        self.up = nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1, groups=2)
        self.up1, self.up3 = nn.ConvTranspose1d(4, 4, 3), nn.ConvTranspose3d(2, 2, 2)

    def forward(self, image: torch.Tensor) -> Any:
        up = self.up(self.grouped(image))
        return up, self.up1(self.line(image[:, :, 0])), self.up3(self.space(image[:, :1].unsqueeze(1)[:, :, 0].unsqueeze(2)))


_MODULES: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], Callable[[], tuple[Any, ...]]]] = {
    "lstm": (nn.LSTM, _RNN, _sequence),
    "lstm-state": (nn.LSTM, _RNN, lambda: _with_state(2)),
    "lstm-bidirectional": (nn.LSTM, {**_RNN, "bidirectional": True}, _sequence),
    "lstm-projected": (nn.LSTM, {**_RNN, "proj_size": 8}, _sequence),
    "gru": (nn.GRU, _RNN, _sequence),
    "gru-state": (nn.GRU, _RNN, lambda: _with_state(1)),
    "rnn": (nn.RNN, {**_RNN, "nonlinearity": "relu"}, _sequence),
    "cells": (_Cells, {}, _sequence),
    "packed-sequence": (_Packed, {}, lambda: (torch.randn(3, 6, 16), torch.tensor([6, 2, 4]))),
    "transformer": (nn.Transformer, {"d_model": 16, "nhead": 4, "num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 32, "batch_first": True}, lambda: (torch.randn(2, 6, 16), torch.randn(2, 5, 16))),
    "transformer-encoder": (_encoder, {}, _sequence),
    "transformer-padding": (_PaddedEncoder, {}, lambda: (torch.randn(2, 6, 16), torch.tensor([[False] * 6, [False] * 4 + [True] * 2]))),
    "transformer-decoder-layer": (nn.TransformerDecoderLayer, {**_LAYER, "norm_first": True, "activation": "gelu"}, lambda: (torch.randn(2, 5, 16), torch.randn(2, 6, 16))),
    "attention": (_Attention, {}, _sequence),
    "attention-bias": (_Attention, {"add_bias_kv": True, "add_zero_attn": True}, _sequence),
    "embedding-bag": (_Bag, {}, lambda: (torch.randint(0, 20, (3, 4)),)),
    "norms": (_Norms, {}, lambda: (torch.randn(2, 8, 6, 6),)),
    "pools": (_Pools, {}, lambda: (torch.randn(1, 8, 8, 8),)),
    "resizes": (_Resizes, {}, lambda: (torch.randn(1, 8, 8, 8),)),
    "losses": (_Losses, {}, lambda: (torch.randn(5, 7), torch.randint(0, 7, (5,)))),
    "convolutions": (_Convolutions, {}, lambda: (torch.randn(1, 4, 9, 9),)),
    "bilinear": (nn.Bilinear, {"in1_features": 6, "in2_features": 5, "out_features": 4}, lambda: (torch.randn(3, 6), torch.randn(3, 5))),
    "adaptive-log-softmax": (nn.AdaptiveLogSoftmaxWithLoss, {"in_features": 8, "n_classes": 20, "cutoffs": [5, 10]}, lambda: (torch.randn(4, 8), torch.tensor([1, 6, 12, 3]))),
    "empty-sequential": (nn.Sequential, {}, lambda: (torch.randn(2, 3),)),
    "identity": (nn.Identity, {}, lambda: (torch.randn(2, 3),)),
}  # fmt: skip
