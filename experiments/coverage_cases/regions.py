"""Models with regions that PyTorch exports as sub-graphs (autocast, gradients, checkpoints), and operators that only a compiler takes.

Their names begin with ``low:``, like those of ``low_precision.py``, in whose sweep they were recorded first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from experiments.coverage_cases.case_list import CaseList
from experiments.coverage_cases.made import Build


def _rows() -> tuple[Any, ...]:
    return (torch.randn(8, 64),)


CASES = CaseList("low", _rows, lively=False)


def cases() -> dict[str, Build]:
    """Case name to builder."""
    return CASES.builders


class Mixed(nn.Module):
    """Two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 32)


@CASES.model("autocast-inside")
class AutocastInside(Mixed):
    def forward(self, x: Any) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = torch.softmax(self.first(x).relu(), -1) * x
        return self.second(y.float())


@CASES.model("autocast-switched-off-inside")
class AutocastNested(Mixed):
    def forward(self, x: Any) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.first(x)
            with torch.autocast(x.device.type, enabled=False):
                y = self.second(y.float() + 1)
            return y, self.first(x) + 1


@CASES.model("autocast-decorated")
class AutocastDecorated(Mixed):
    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x: Any) -> Any:
        return {"out": self.second(self.first(x).relu())}


@CASES.model("autocast-branches")
class AutocastBranches(Mixed):
    def forward(self, x: Any) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            left, right = self.first(x), self.first(x + 1)
        return (left + right).float() + x


@CASES.model("no-grad-inside")
class NoGradInside(Mixed):
    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            y = self.first(x)
        with torch.enable_grad():
            z = self.second(y)
        torch.set_grad_enabled(False)
        return z.relu()


@CASES.model("inference-mode-inside")
class InferenceInside(Mixed):
    def forward(self, x: Any) -> Any:
        with torch.inference_mode():
            y = self.first(x)
        return self.second(y)


@CASES.model("checkpointed")
class Checkpointed(Mixed):
    def forward(self, x: Any) -> Any:
        return self.second(checkpoint(self.first, x, use_reentrant=False) + 1)


@CASES.model("checkpointed-reentrant")
class CheckpointedOld(Mixed):
    def forward(self, x: Any) -> Any:
        return self.second(checkpoint(self.first, x, use_reentrant=True) + 1)


def _heads() -> tuple[Any, ...]:
    return tuple(torch.randn(1, 2, 128, 16) for _ in range(3))


@CASES.model("flex-attention", _heads)
class Flex(nn.Module):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: torch.where(i >= j, score, -float("inf")))


@CASES.model("flex-attention-block-mask", _heads)
class FlexBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torch.nn.attention.flex_attention import create_block_mask

        self.mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 128, 128, device="cpu")

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v, block_mask=self.mask)


@CASES.model("nested-tensors-inside")
class NestedInside(Mixed):
    def forward(self, x: Any) -> Any:
        nested = torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged)
        return self.second(nested).values()
