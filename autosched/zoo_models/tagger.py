"""A tagger of words: two layers of LSTM that read in both directions, whole layers of ``torch.nn`` rather than cells written out.

*Source:* Huang, Xu, Yu, "Bidirectional LSTM-CRF models for sequence tagging", 2015, without the random field.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_WORDS, _TAGS, _TOKENS = 5000, 32, 50


class Tagger(nn.Module):
    """Input int64 ``[batch, tokens]``, output float32 ``[batch, tokens, 32]``: scores of every token's tags."""

    def __init__(self, width: int = 128, hidden: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, width)
        self.layers = nn.LSTM(width, hidden, layers, bidirectional=True, batch_first=True)
        self.scores = nn.Linear(2 * hidden, _TAGS)

    def forward(self, words: Tensor) -> Tensor:
        """Embed, read in both directions, score."""
        scores: Tensor = self.scores(self.layers(self.embedding(words))[0])
        return scores


def make_tagger(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its example inputs: 50 tokens."""
    return Tagger(), (torch.randint(0, _WORDS, (batch, _TOKENS)),)
