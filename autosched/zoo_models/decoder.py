"""One step of decoding: a transformer that takes one token and attends to a cache of fixed length, which its layers keep as buffers.

Each call changes the model: it writes the token's keys and values into the cache, at a position that is an input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Size:
    """Of the transformer; the cache holds ``length`` tokens of each of ``batch`` sequences."""

    layers: int = 6
    heads: int = 8
    width: int = 512
    length: int = 512
    batch: int = 1


class Layer(nn.Module):
    """Attention to a cache of its own, and a perceptron."""

    keys: Tensor
    values: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before, self.between = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.queries_keys_values = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(size.batch, size.heads, size.length, size.width // size.heads))

    def forward(self, x: Tensor, position: Tensor, seen: Tensor) -> Tensor:
        """``x``: ``[batch, 1, width]``; ``position``: ``[1]``; ``seen``: ``[1, 1, 1, length]``."""
        split = self.queries_keys_values(self.before(x)).view(len(x), 1, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value)
        attended = nn.functional.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=seen)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        hidden: Tensor = x + self.down(nn.functional.gelu(self.up(self.between(x))))
        return hidden


class Decoder(nn.Module):
    """One token in, the numbers of the next one out."""

    places: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.register_buffer("places", torch.arange(size.length), persistent=False)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """``x``: ``[batch, 1, width]``; ``position``: int64 ``[1]``, below the cache's length."""
        seen = (self.places <= position).view(1, 1, 1, -1)
        for layer in self.layers:
            x = layer(x, position, seen)
        return x


def make_decoder(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its example inputs: a token in the middle of a cache of 512."""
    size = Size(batch=batch)
    return Decoder(size), (torch.randn(batch, 1, size.width), torch.tensor([size.length // 2]))
