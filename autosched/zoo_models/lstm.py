"""An unrolled two-layer LSTM: cell (layer, step) waits for (layer, step - 1) and (layer - 1, step), so cells run in diagonals.

*Source:* Hochreiter, Schmidhuber, "Long short-term memory", 1997, with forget gates (Gers et al., 2000).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Cell(nn.Module):
    """One LSTM cell of ``width`` units, its gates in the order input, forget, candidate, output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.from_input = nn.Linear(width, 4 * width)
        self.from_state = nn.Linear(width, 4 * width, bias=False)

    def forward(self, tensor: Tensor, hidden: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        """All ``[batch, width]``; returns the new hidden state and carry."""
        gates = self.from_input(tensor) + self.from_state(hidden)
        enter, forget, candidate, leave = gates.chunk(4, dim=1)
        carry = torch.sigmoid(forget) * carry + torch.sigmoid(enter) * torch.tanh(candidate)
        return torch.sigmoid(leave) * torch.tanh(carry), carry


class UnrolledLstm(nn.Module):
    """Input float32 ``[batch, steps, width]``, output float32 ``[batch, width]``: the last layer's last hidden state."""

    def __init__(self, layers: int = 2, width: int = 256) -> None:
        super().__init__()
        self.cells = nn.ModuleList(Cell(width) for _ in range(layers))
        self.width = width

    def forward(self, sequence: Tensor) -> Tensor:
        """Every cell of every step, written out."""
        zero = sequence.new_zeros(sequence.shape[0], self.width)
        state = [(zero, zero) for _ in self.cells]
        tensor = zero
        for step in range(sequence.shape[1]):
            tensor = sequence[:, step]
            for layer, cell in enumerate(self.cells):
                state[layer] = cell(tensor, *state[layer])
                tensor = state[layer][0]
        return tensor


def make_lstm(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its example inputs: 24 steps."""
    return UnrolledLstm(), (torch.randn(batch, 24, 256),)
