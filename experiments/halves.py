"""What kernels of our own are worth for products and attention in sixteen bits, and products in eight, on a CPU, and how precise they are.

    python experiments/halves.py

writes ``results/<device>/halves.json``: for layers and attention of well-known models, in bfloat16 and float16, on one thread and on all,
the time of what PyTorch calls (weights packed for oneDNN, where that has such products) and of the kernel's in interleaved rounds, and the
largest error of each against float64; for the same layers in eight bits, of their sums (``torch._int_mm``). ``--smoke`` times one in a few
rounds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from experiments.attention import CAUSAL, PLAIN, Attention
from experiments.kernels import PYTORCH, compared
from experiments.serve.common import keep_shapes, parser_of

DTYPES = (torch.bfloat16, torch.float16, torch.int8)
# Rows, inputs and outputs.
_PRODUCTS = (
    (1, 768, 3072), (8, 768, 3072),  # steps of decoding
    (16, 128, 256), (32, 384, 1536),  # a recommender's tower; MiniLM
    (32, 768, 768), (32, 768, 3072), (32, 3072, 768), (128, 768, 3072),  # BERT-base
    (197, 384, 1152), (3136, 96, 384),  # ViT-S; ConvNeXt
)  # fmt: skip
# Batch, heads, heads of keys, queries, keys, width of a head, what a query sees.
_ATTENTION = (
    (1, 6, 6, 197, 197, 64, PLAIN), (1, 12, 12, 32, 32, 64, PLAIN), (1, 12, 12, 128, 128, 64, PLAIN), (1, 12, 12, 512, 512, 64, PLAIN),
    (1, 12, 12, 256, 256, 64, CAUSAL), (1, 32, 4, 128, 128, 64, CAUSAL), (1, 12, 12, 1, 1024, 64, PLAIN), (1, 32, 8, 1, 512, 64, PLAIN),
)  # fmt: skip
# Each behind the place of its dtype.
SHAPES = (
    *((place, *shape) for shape in _PRODUCTS for place in range(3)),
    *((place, *shape) for shape in _ATTENTION for place in range(2)),
)
_ROUNDS = 15


class Sums(torch.nn.Module):
    """A product of whole numbers in eight bits: int8 ``[rows, inputs]`` to int32 ``[rows, outputs]``, or the same in float64."""

    weight: torch.Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (outputs, inputs)).to(torch.int8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.is_floating_point():
            return rows @ self.weight.to(rows.dtype).t()
        return torch._int_mm(rows, self.weight.t())


def measure(place: int, *numbers: int) -> dict[str, Any]:
    """Of a product or, with more numbers, of attention, in the dtype at ``place``: what :func:`compared` says.

    Args:
        numbers: the shape, threads and rounds.
    """
    from autosched.core.variants import Variant

    dtype, (*shape, threads, rounds) = DTYPES[place], numbers
    if len(shape) == 3:
        rows, inputs, outputs = shape
        whole = not dtype.is_floating_point
        model: torch.nn.Module = Sums(inputs, outputs) if whole else torch.nn.Linear(inputs, outputs).to(dtype)
        given, variant = [torch.randint(-128, 128, (rows, inputs)) if whole else torch.randn(rows, inputs)], Variant.OWN_PRODUCT
    else:
        batch, heads, shared, queries, keys, width, sees = shape
        model, variant = Attention(sees == CAUSAL, heads != shared).to(dtype), Variant.OWN_ATTENTION
        sizes = ((queries, heads), (keys, shared), (keys, shared))
        given = [torch.randn(batch, rows, count, width).transpose(1, 2) for rows, count in sizes]
    found = compared(model.eval(), [tensor.to(dtype) for tensor in given], (variant,), threads, rounds, PYTORCH)
    return {"shape": [place, *shape], "threads": threads, **found}


def main() -> None:
    asked = parser_of(__doc__, models=False).parse_args()
    keep_shapes(asked, "halves.json", SHAPES, measure, rounds=_ROUNDS, smoke=4)


if __name__ == "__main__":
    main()
