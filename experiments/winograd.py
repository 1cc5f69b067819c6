"""What Winograd's algorithm is worth for single 3x3 convolutions on a CPU, and what it costs in precision.

    python experiments/winograd.py

writes ``results/<device>/winograd.json``: for convolutions of well-known models, on one thread and on all, the time of oneDNN's and of both
variants in interleaved rounds, and the largest error of each against float64. ``--smoke`` times one in a few rounds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from experiments.serve.common import keep_shapes, parser_of
from experiments.serve.overhead import interleaved

# Channels, features, height and width.
SHAPES = (
    (64, 64, 56), (128, 128, 28), (256, 256, 14), (512, 512, 7),  # ResNet
    (64, 192, 56), (96, 128, 28), (160, 320, 7),  # GoogLeNet
    (18, 18, 56), (36, 36, 28), (144, 144, 7),  # HRNet-W18
    (256, 256, 56), (512, 512, 28),  # VGG
)  # fmt: skip
PLAIN, AGAIN = "oneDNN", "again"
_ROUNDS = 15


def measure(channels: int, features: int, size: int, threads: int, rounds: int) -> dict[str, Any]:
    """Microseconds of each way, medians over rounds, oneDNN's a second time for the noise; and largest errors over the largest result."""
    from autosched.capture.export import capture
    from autosched.core.variants import Variant
    from autosched.runtime.cpu_kernels.steps import own_kernel
    from autosched.runtime.kernels import bind

    model = torch.nn.Sequential(torch.nn.Conv2d(channels, features, 3, padding=1), torch.nn.ReLU()).eval()
    x = torch.randn(1, channels, size, size).contiguous(memory_format=torch.channels_last)
    captured = capture(model, (x,))
    torch.set_num_threads(threads)
    bound = bind(captured.program, captured.constants, "cpu")
    [operator] = captured.program.graph.operators
    kernels: dict[str, Any] = {PLAIN: bound.kernels[0]}
    kernels |= {item.name.lower(): own_kernel(operator, bound, threads, item, {}) for item in (Variant.WINOGRAD_2, Variant.WINOGRAD_4)}
    missing = [str(kernel) for kernel in kernels.values() if not callable(kernel)]
    if missing:
        raise SystemExit(f"there is nothing to time: {missing[0]}")
    slots = bound.new_slots([x])
    with torch.no_grad():
        wanted = model.double()(x.double())
    errors: dict[str, float] = {}
    with torch.inference_mode():
        for name, kernel in kernels.items():
            kernel(slots)
            errors[name] = float((bound.outputs(slots)[0] - wanted).abs().max() / wanted.abs().max())
        calls: dict[str, Callable[[], Any]] = {name: partial(kernel, slots) for name, kernel in kernels.items()}
        times = interleaved({**calls, AGAIN: calls[PLAIN]}, rounds, seed=0)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"shape": [channels, features, size], "threads": threads, "us": medians, "errors": errors}


def main() -> None:
    asked = parser_of(__doc__, models=False).parse_args()
    keep_shapes(asked, "winograd.json", SHAPES, measure, rounds=_ROUNDS, smoke=1)


if __name__ == "__main__":
    main()
