"""What the kernel of our own is worth for products of a few rows with constant weights on a CPU, and how precise it is.

    python experiments/products.py

writes ``results/<device>/products.json``: for layers of well-known models, on one thread and on all, the time of oneDNN's and MKL's packed
products and of the kernel's, bias included, in interleaved rounds, and the largest error of each against float64. Weights come from a cache
first; then from memory, as in a model that is larger than the caches: many weights of that size in turn. ``--smoke`` times one in a few
rounds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from experiments.serve.common import keep_shapes, parser_of
from experiments.serve.overhead import interleaved

# Rows, inputs and outputs.
SHAPES = (
    (1, 512, 512), (1, 768, 3072), (1, 3072, 768), (1, 1280, 1000),  # one step of decoding; what classifies
    (2, 512, 512), (8, 512, 512), (16, 128, 256), (16, 256, 128), (16, 1024, 1024),  # small batches; the mixture of experts
    (64, 128, 128), (64, 512, 256), (128, 256, 128),  # towers of recommenders
    (32, 384, 384), (32, 384, 1536), (32, 1536, 384),  # MiniLM
    (32, 768, 768), (32, 768, 3072), (32, 3072, 768),  # BERT-base
    (128, 768, 768), (197, 384, 1152),  # longer texts; ViT-S
    (784, 192, 768), (3136, 96, 384), (3136, 384, 96),  # ConvNeXt and Swin
)  # fmt: skip
ONEDNN, MKL, OWN, AGAIN = "oneDNN", "MKL", "own", "again"
_ROUNDS = 15
# Weights of so many numbers, all together, fit into no cache.
_NOT_CACHED = 1 << 24


def ways(
    rows: int, inputs: int, outputs: int, threads: int, count: int = 1
) -> tuple[dict[str, Callable[[], list[torch.Tensor]]], torch.Tensor]:
    """Each library's products with ``count`` weights, packed once, and a row of biases; and the exact result of the last in float64."""
    from autosched.runtime.cpu_kernels.convolution import Follows
    from autosched.runtime.cpu_kernels.direct import geometry_of_linear
    from autosched.runtime.cpu_kernels.library import kernel_library
    from autosched.runtime.cpu_kernels.linear import Linear
    from autosched.runtime.cpu_kernels.weights import in_blocks

    x, bias = torch.randn(rows, inputs), torch.randn(outputs)
    weights = [torch.randn(outputs, inputs) / inputs**0.5 for _ in range(count)]
    library = kernel_library()
    if isinstance(library, str):
        raise SystemExit(f"there is nothing to time: {library}")
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights]
    found = {ONEDNN: lambda: [torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "") for weight in packed]}
    if torch.backends.mkl.is_available():
        for_mkl = [torch.ops.mkl._mkl_reorder_linear_weight(weight, rows) for weight in weights]
        found[MKL] = lambda: [
            torch.ops.mkl._mkl_linear(x, ready, weight, bias, rows) for ready, weight in zip(for_mkl, weights, strict=True)
        ]
    factors = [in_blocks(weight.t().unsqueeze(0), library.lanes) for weight in weights]
    layer = Linear("float32", 0, 1, 2, 3, False, None, rows, inputs, outputs, Follows())
    shape = geometry_of_linear(layer, threads)
    call = library.direct[True, False].call

    def own(ready: torch.Tensor) -> torch.Tensor:
        made = torch.empty(rows, outputs)
        call(x.data_ptr(), made.data_ptr(), bias.data_ptr(), ready.data_ptr(), shape.data_ptr())
        return made

    return {**found, OWN: lambda: [own(ready) for ready in factors]}, x.double() @ weights[-1].double().t() + bias


def measure(rows: int, inputs: int, outputs: int, threads: int, rounds: int) -> dict[str, Any]:
    """Microseconds of each way, medians over rounds, with weights from a cache and from memory, oneDNN's a second time for the noise; and
    largest errors over the largest result.
    """
    torch.set_num_threads(threads)
    several = max(2, _NOT_CACHED // (inputs * outputs))
    with torch.inference_mode():
        calls, wanted = ways(rows, inputs, outputs, threads)
        errors = {name: float((call()[-1] - wanted).abs().max() / wanted.abs().max()) for name, call in calls.items()}
        medians = _medians(calls, rounds)
        apart, _ = ways(rows, inputs, outputs, threads, several)
        from_memory = {name: value / several for name, value in _medians(apart, rounds).items()}
    return {"shape": [rows, inputs, outputs], "threads": threads, "us": medians, "from_memory_us": from_memory, "errors": errors}


def _medians(calls: dict[str, Callable[[], list[torch.Tensor]]], rounds: int) -> dict[str, float]:
    times = interleaved({**calls, AGAIN: calls[ONEDNN]}, rounds, seed=0)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    asked = parser_of(__doc__, models=False).parse_args()
    keep_shapes(asked, "products.json", SHAPES, measure, rounds=_ROUNDS, smoke=6)


if __name__ == "__main__":
    main()
