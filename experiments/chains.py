"""What one kernel for a convolution and the depthwise one behind it is worth, on a CPU, and how precise it is.

    python experiments/chains.py

writes ``results/<device>/chains.json``: for pairs of well-known models, on one thread and on all, the time of oneDNN's two calls, of two of
our own and of one for both in interleaved rounds, and the largest error of each against float64. Whole models gain more: here, what lies
between the two is in a cache all the time. ``--smoke`` times one in a few rounds.
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

# Channels, features, height and width of the picture; size and stride of the first's weights, and of the second's.
SHAPES = (
    (3, 32, 224, 3, 2, 3, 1), (16, 96, 112, 1, 1, 3, 2), (24, 144, 56, 1, 1, 3, 1), (32, 192, 28, 1, 1, 3, 1),
    (64, 384, 14, 1, 1, 3, 1), (160, 960, 7, 1, 1, 3, 1),  # MobileNetV2
    (24, 144, 56, 1, 1, 5, 2), (40, 240, 28, 1, 1, 5, 1), (112, 672, 14, 1, 1, 5, 1), (192, 1152, 7, 1, 1, 5, 1),  # EfficientNet-B0
)  # fmt: skip
_ROUNDS = 15


def measure(
    channels: int, features: int, size: int, taps: int, stride: int, deep: int, step: int, threads: int, rounds: int
) -> dict[str, Any]:
    """Of one pair, each with SiLU, what :func:`compared` says; of three channels, the picture is channels first."""
    from autosched.core.variants import Variant

    model = torch.nn.Sequential(
        torch.nn.Conv2d(channels, features, taps, stride, taps // 2),
        torch.nn.SiLU(),
        torch.nn.Conv2d(features, features, deep, step, deep // 2, groups=features),
        torch.nn.SiLU(),
    )
    x = torch.randn(1, channels, size, size)
    if channels > 3:
        x = x.contiguous(memory_format=torch.channels_last)
    found = compared(model.eval(), (x,), (Variant.OWN_CONVOLUTION, Variant.OWN_CHAIN), threads, rounds)
    return {"shape": [channels, features, size, taps, stride, deep, step], "threads": threads, **found}


def main() -> None:
    asked = parser_of(__doc__, models=False).parse_args()
    keep_shapes(asked, "chains.json", SHAPES, measure, rounds=_ROUNDS, smoke=4)


if __name__ == "__main__":
    main()
