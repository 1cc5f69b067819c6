"""A recogniser of speech: convolutions over a spectrum, three layers of GRU that read in both directions.

*Source:* Amodei et al., "Deep Speech 2: end-to-end speech recognition in English and Mandarin", ICML 2016, section 3, with fewer and
narrower layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_BANDS, _FRAMES, _LETTERS = 80, 100, 29


class Speech(nn.Module):
    """Input float32 ``[batch, 1, 80 bands, frames]``, output float32 ``[batch, frames / 2, 29]``: log-probabilities of letters."""

    def __init__(self, channels: int = 32, hidden: int = 256, layers: int = 3) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv2d(1, channels, (21, 11), stride=(2, 2), padding=(10, 5)),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0.0, 20.0),
            nn.Conv2d(channels, channels, (11, 11), stride=(2, 1), padding=(5, 5)),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0.0, 20.0),
        )
        self.layers = nn.GRU(channels * _BANDS // 4, hidden, layers, bidirectional=True, batch_first=True)
        self.letters = nn.Linear(2 * hidden, _LETTERS)

    def forward(self, spectrum: Tensor) -> Tensor:
        """Convolutions over bands and time, recurrent layers over time."""
        features = self.front(spectrum).flatten(1, 2).transpose(1, 2)
        return torch.log_softmax(self.letters(self.layers(features)[0]), dim=-1)


def make_speech(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its example inputs: 100 frames, a second."""
    return Speech(), (torch.randn(batch, 1, _BANDS, _FRAMES),)
