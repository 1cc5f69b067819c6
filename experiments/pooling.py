"""What the kernel of our own is worth for pooling by itself, on a CPU, and how precise it is.

    python experiments/pooling.py

writes ``results/<device>/pooling.json``: for pooling of well-known models, on one thread and on all, the time of PyTorch's kernel and of
autosched's in interleaved rounds, and the largest error of each against float64. ``--smoke`` times one in a few rounds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from experiments.kernels import PYTORCH, compared
from experiments.serve.common import keep_shapes, parser_of

LARGEST, MEAN, MEAN_OF_ALL = range(3)

# What is taken, channels, height and width of the picture, those of the windows, stride, padding.
SHAPES = (
    (LARGEST, 64, 112, 3, 2, 1),  # ResNet-50
    (LARGEST, 192, 56, 3, 2, 0), (LARGEST, 192, 28, 3, 1, 1), (LARGEST, 512, 14, 3, 1, 1), (LARGEST, 832, 7, 3, 1, 1),  # GoogLeNet
    (LARGEST, 128, 55, 3, 2, 0),  # SqueezeNet
    (LARGEST, 16, 256, 2, 2, 0), (LARGEST, 64, 64, 2, 2, 0),  # a U-Net
    (LARGEST, 256, 20, 5, 1, 2),  # YOLO
    (MEAN, 288, 35, 3, 1, 1), (MEAN, 768, 17, 3, 1, 1), (MEAN, 2048, 8, 3, 1, 1),  # Inception
    (MEAN, 128, 56, 2, 2, 0),  # DenseNet
    (MEAN_OF_ALL, 96, 56, 56, 1, 0), (MEAN_OF_ALL, 672, 14, 14, 1, 0), (MEAN_OF_ALL, 1280, 7, 7, 1, 0),  # EfficientNet-B0
)  # fmt: skip
_ROUNDS = 15


def measure(taken: int, channels: int, size: int, taps: int, stride: int, padding: int, threads: int, rounds: int) -> dict[str, Any]:
    """Of one picture, channels last, what :func:`compared` says."""
    from autosched.core.variants import Variant

    modules = {
        LARGEST: torch.nn.MaxPool2d(taps, stride, padding), MEAN: torch.nn.AvgPool2d(taps, stride, padding),
        MEAN_OF_ALL: torch.nn.AdaptiveAvgPool2d(1),
    }  # fmt: skip
    x = torch.randn(1, channels, size, size).contiguous(memory_format=torch.channels_last)
    found = compared(modules[taken].eval(), (x,), (Variant.OWN_POOLING,), threads, rounds, PYTORCH)
    return {"shape": [taken, channels, size, taps, stride, padding], "threads": threads, **found}


def main() -> None:
    asked = parser_of(__doc__, models=False).parse_args()
    keep_shapes(asked, "pooling.json", SHAPES, measure, rounds=_ROUNDS, smoke=4)


if __name__ == "__main__":
    main()
