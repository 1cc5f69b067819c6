"""What the kernel of our own is worth for single convolutions that are summed as they are defined, on a CPU, and how precise it is.

    python experiments/convolutions.py

writes ``results/<device>/convolutions.json``: for convolutions of well-known models, on one thread and on all, the time of oneDNN's and
of the kernel's in interleaved rounds, and the largest error of each against float64. ``--smoke`` times one in a few rounds.
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

# Channels, features, height and width of the picture, those of the weights, stride, groups.
SHAPES = (
    (3, 32, 224, 3, 2, 1), (32, 32, 112, 3, 1, 32), (16, 96, 112, 1, 1, 1), (96, 96, 112, 3, 2, 96), (144, 24, 56, 1, 1, 1),  # MobileNetV2
    (64, 384, 14, 1, 1, 1), (384, 384, 14, 3, 1, 384), (384, 64, 14, 1, 1, 1), (960, 320, 7, 1, 1, 1),
    (240, 240, 28, 5, 2, 240), (672, 672, 14, 5, 1, 672), (1152, 48, 1, 1, 1, 1),  # EfficientNet-B0
    (3, 64, 224, 7, 2, 1), (64, 256, 56, 1, 1, 1), (256, 512, 56, 1, 2, 1), (128, 128, 56, 3, 2, 1), (1024, 256, 14, 1, 1, 1),  # ResNet-50
    (128, 128, 56, 3, 1, 32), (256, 256, 56, 3, 2, 32), (512, 512, 14, 3, 1, 32),  # ResNeXt-50
    (320, 320, 14, 3, 1, 20), (784, 784, 7, 3, 1, 49),  # RegNetY-800MF
    (192, 64, 28, 1, 1, 1), (16, 32, 28, 3, 1, 1), (832, 128, 7, 1, 1, 1),  # GoogLeNet
    (64, 16, 55, 1, 1, 1), (512, 1000, 13, 1, 1, 1),  # SqueezeNet
    (3, 96, 224, 4, 4, 1), (96, 96, 56, 7, 1, 96), (384, 384, 14, 7, 1, 384),  # ConvNeXt
)  # fmt: skip
_ROUNDS = 15


def measure(channels: int, features: int, size: int, taps: int, stride: int, groups: int, threads: int, rounds: int) -> dict[str, Any]:
    """Of one convolution with relu, what :func:`compared` says; of three channels, the picture is channels first, and what comes back."""
    from autosched.core.variants import Variant

    padding = 0 if stride == taps else taps // 2
    model = torch.nn.Sequential(torch.nn.Conv2d(channels, features, taps, stride, padding, groups=groups), torch.nn.ReLU()).eval()
    x = torch.randn(1, channels, size, size)
    if channels > 3:
        x = x.contiguous(memory_format=torch.channels_last)
    found = compared(model, (x,), (Variant.OWN_CONVOLUTION,), threads, rounds)
    return {"shape": [channels, features, size, taps, stride, groups], "threads": threads, **found}


def main() -> None:
    asked = parser_of(__doc__, models=False).parse_args()
    keep_shapes(asked, "convolutions.json", SHAPES, measure, rounds=_ROUNDS, smoke=5)


if __name__ == "__main__":
    main()
