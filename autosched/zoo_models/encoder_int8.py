"""A text encoder of DistilBERT's sizes (arXiv:1910.01108) whose products are of eight bits: weights once, rows as they come."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autosched.zoo_models.decoder_int8 import EightBitLinear

LAYERS, WIDTH, HEADS, INNER, WORDS, TOKENS = 6, 768, 12, 3072, 8192, 32


class RoundedLinear(EightBitLinear):
    """A linear layer with its weight in eight bits and a scale for each output, whose rows are rounded to eight bits as well.

    So that of each row the largest number becomes 127: what torchao's ``Int8DynamicActivationInt8WeightConfig`` makes of a layer.
    """

    def forward(self, x: Tensor) -> Tensor:
        """``x``: ``[batch, tokens, inputs]``, to ``[batch, tokens, outputs]``."""
        own = x.abs().amax(-1, keepdim=True).clamp(min=1e-7) / 127.0
        rows = torch.clamp(torch.round(x / own), -128, 127).to(torch.int8).flatten(0, 1)
        sums = torch._int_mm(rows, self.weight.t()).to(x.dtype)
        made: Tensor = sums.view(*x.shape[:2], -1) * own * self.scale + self.bias
        return made


class Layer(nn.Module):
    """Attention and two linear layers, each normalised behind what it is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values, self.out = (RoundedLinear(nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        self.inner, self.outer = RoundedLinear(nn.Linear(WIDTH, INNER)), RoundedLinear(nn.Linear(INNER, WIDTH))
        self.attended, self.done = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: ``[batch, tokens, WIDTH]``."""
        queries, keys, values = (each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.queries, self.keys, self.values))
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values)
        x = self.attended(x + self.out(attended.transpose(1, 2).flatten(2)))
        normalised: Tensor = self.done(x + self.outer(nn.functional.gelu(self.inner(x))))
        return normalised


class Encoder(nn.Module):
    """Tokens to a vector of each: ids ``[batch, TOKENS]`` to ``[batch, TOKENS, WIDTH]``."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)
        self.normalised = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))

    def forward(self, ids: Tensor) -> Tensor:
        """``ids``: int64 ``[batch, TOKENS]``."""
        made: Tensor = self.layers(self.normalised(self.words(ids) + self.places))
        return made


def make_encoder_int8(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its example inputs."""
    return Encoder(), (torch.randint(0, WORDS, (batch, TOKENS)),)
