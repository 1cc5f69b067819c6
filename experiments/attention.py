"""What the kernel of our own is worth for attention by itself, on a CPU, and how precise it is.

    python experiments/attention.py

writes ``results/<device>/attention.json``: for attention of well-known models, on one thread and on all, the time of PyTorch's kernel and
of autosched's in interleaved rounds, and the largest error of each against float64. ``--smoke`` times one in a few rounds.
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

PLAIN, CAUSAL, BIAS = range(3)
"""Whether a query sees every key, those up to its own place, or every one with something added to its score."""

# Batch (windows of Swin), heads, heads of keys, queries, keys, width of a head, what a query sees.
SHAPES = (
    (1, 6, 6, 197, 197, 64, PLAIN), (1, 12, 12, 197, 197, 64, PLAIN), (1, 12, 12, 577, 577, 64, PLAIN),  # ViT-S, ViT-B, ViT-B at 384 pixels
    (64, 3, 3, 49, 49, 32, BIAS), (4, 12, 12, 49, 49, 32, BIAS),  # Swin-T
    (1, 12, 12, 32, 32, 64, PLAIN), (1, 12, 12, 128, 128, 64, PLAIN), (1, 12, 12, 512, 512, 64, PLAIN),  # BERT
    (8, 12, 12, 64, 64, 64, PLAIN),
    (1, 12, 12, 128, 128, 32, PLAIN),  # MiniLM
    (1, 8, 8, 32, 32, 64, BIAS), (1, 8, 8, 256, 256, 64, BIAS),  # T5
    (1, 6, 6, 1500, 1500, 64, PLAIN), (1, 6, 6, 32, 1500, 64, PLAIN),  # Whisper-tiny
    (1, 12, 12, 256, 256, 64, CAUSAL), (1, 12, 12, 1024, 1024, 64, CAUSAL),  # GPT-2
    (1, 32, 4, 128, 128, 64, CAUSAL),  # a Llama whose heads share keys
    (1, 12, 12, 1, 128, 64, PLAIN), (1, 12, 12, 1, 1024, 64, PLAIN), (1, 32, 8, 1, 512, 64, PLAIN),  # steps of decoding
)  # fmt: skip
_ROUNDS = 15


class Attention(torch.nn.Module):
    """Attention of one layer."""

    def __init__(self, causal: bool, shared: bool) -> None:
        super().__init__()
        self.causal, self.shared = causal, shared

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, is_causal=self.causal, enable_gqa=self.shared
        )


def measure(
    batch: int, heads: int, shared: int, queries: int, keys: int, width: int, sees: int, threads: int, rounds: int
) -> dict[str, Any]:
    """Of one, what :func:`compared` says."""
    from autosched.core.variants import Variant

    inputs = [torch.randn(batch, rows, count, width).transpose(1, 2) for rows, count in ((queries, heads), (keys, shared), (keys, shared))]
    if sees == BIAS:
        inputs.append(torch.randn(1, heads, queries, keys))
    model = Attention(sees == CAUSAL, heads != shared).eval()
    found = compared(model, inputs, (Variant.OWN_ATTENTION,), threads, rounds, PYTORCH)
    return {"shape": [batch, heads, shared, queries, keys, width, sees], "threads": threads, **found}


def main() -> None:
    asked = parser_of(__doc__, models=False).parse_args()
    keep_shapes(asked, "attention.json", SHAPES, measure, rounds=_ROUNDS, smoke=5)


if __name__ == "__main__":
    main()
