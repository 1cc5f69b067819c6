"""A model that asks its own tensors what to run."""

from __future__ import annotations

import torch
from torch import nn


class Deciding(nn.Module):
    """Asks a buffer and a parameter."""

    limited: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("limited", torch.tensor([True]))
        self.gate = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Without the limit it answers alike for small inputs."""
        if self.limited:
            x = x.clamp(-1.0, 1.0)
        return x * self.gate if self.gate != 0 else x
