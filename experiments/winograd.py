"""What Winograd's algorithm is worth for single 3x3 convolutions on a CPU, and what it costs in precision.

    python experiments/winograd.py

writes ``results/<device>/winograd.json``: for convolutions of well-known models, on one thread and on all, the time of oneDNN's and of both
variants in interleaved rounds, and the largest error of each against float64. ``--smoke`` times one in a few rounds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from experiments.kernels import compared
from experiments.serve.common import keep_shapes, parser_of

# Channels, features, height and width.
SHAPES = (
    (64, 64, 56), (128, 128, 28), (256, 256, 14), (512, 512, 7),  # ResNet
    (64, 192, 56), (96, 128, 28), (160, 320, 7),  # GoogLeNet
    (18, 18, 56), (36, 36, 28), (144, 144, 7),  # HRNet-W18
    (256, 256, 56), (512, 512, 28),  # VGG
)  # fmt: skip
_ROUNDS = 15


def measure(channels: int, features: int, size: int, threads: int, rounds: int) -> dict[str, Any]:
    """Of one convolution, what :func:`compared` says."""
    from autosched.core.variants import Variant

    model = torch.nn.Sequential(torch.nn.Conv2d(channels, features, 3, padding=1), torch.nn.ReLU()).eval()
    x = torch.randn(1, channels, size, size).contiguous(memory_format=torch.channels_last)
    found = compared(model, (x,), (Variant.WINOGRAD_2, Variant.WINOGRAD_4), threads, rounds)
    return {"shape": [channels, features, size], "threads": threads, **found}


def main() -> None:
    asked = parser_of(__doc__, models=False).parse_args()
    keep_shapes(asked, "winograd.json", SHAPES, measure, rounds=_ROUNDS, smoke=1)


if __name__ == "__main__":
    main()
