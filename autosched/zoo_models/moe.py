"""A small mixture of experts in which every expert runs and a gate weighs their outputs (a dense mixture).

*Source:* Jacobs, Jordan, Nowlan, Hinton, "Adaptive mixtures of local experts", Neural Computation 1991. Routing tokens by value would make
shapes depend on the data, which no fixed schedule can serve.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Mixture(nn.Module):
    """Eight two-layer experts side by side, and a softmax gate; residual."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(experts))

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, tokens, width]`` to the same shape."""
        normed = self.norm(tokens)
        weights = torch.softmax(self.gate(normed), dim=-1)
        total = tokens
        for position, expert in enumerate(self.experts):
            total = total + expert(normed) * weights[..., position : position + 1]
        return total


class MixtureOfExperts(nn.Module):
    """Input float32 ``[batch, tokens, width]``, output the same shape."""

    def __init__(self, blocks: int = 2, width: int = 128, hidden: int = 256, experts: int = 8) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Mixture(width, hidden, experts) for _ in range(blocks)))

    def forward(self, tokens: Tensor) -> Tensor:
        """All blocks, one after the other."""
        mixed: Tensor = self.blocks(tokens)
        return mixed


def make_moe(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its example inputs: 16 tokens of width 128."""
    return MixtureOfExperts(), (torch.randn(batch, 16, 128),)
