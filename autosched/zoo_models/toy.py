"""A small branchy convolution net: three branches of different weight between a stem and a classifier."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _block(channels_in: int, channels_out: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()
    )


class Toy(nn.Module):
    """Input float32 ``[batch, 3, 32, 32]``, output float32 ``[batch, 10]``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _block(3, 16, 3)
        self.narrow = _block(16, 8, 1)
        self.middle = nn.Sequential(_block(16, 8, 1), _block(8, 16, 3))
        self.wide = nn.Sequential(_block(16, 8, 1), _block(8, 8, 5), _block(8, 8, 3))
        self.residual = _block(32, 32, 3)
        self.head = nn.Linear(32, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Stem, three branches side by side, one residual block, classifier."""
        base = self.stem(image)
        joined = torch.cat([self.narrow(base), self.middle(base), self.wide(base)], dim=1)
        mixed = torch.relu(self.residual(joined) + joined)
        scores: Tensor = self.head(mixed.mean(dim=(2, 3)))
        return scores


def make_toy(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its example inputs."""
    return Toy(), (torch.randn(batch, 3, 32, 32),)
