"""A job that ends without any schedule says why once, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autosched
from autosched.core.errors import NoFeasibleCandidate, UnsupportedGraph


class Blind(torch.nn.Module):
    """PyTorch's fast path answers NaN for a query that may look at nothing; what it is exported to answers zero."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
        return found


class Passes(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("lowering", [None, "rewritten"])
def test_a_model_that_computes_nothing_is_refused_before_a_process_is_asked(
    lowering: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))
    with pytest.raises(UnsupportedGraph, match="computes nothing"):
        autosched.tune(Passes(), (torch.ones(2),), device="cpu", effort="quick", budget_s=1.0, lowering=lowering)


def test_example_inputs_whose_answer_is_nan_are_named_as_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))
    call = (torch.randn(2, 3, 8), torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(NoFeasibleCandidate, match="give example inputs") as raised:
        autosched.tune(Blind().eval(), call, device="cpu", effort="quick", budget_s=2.0, lowering="rewritten")
    said = str(raised.value)
    # Once for all strategies, however many distinct schedules they made.
    assert said.count(": nonfinite, output 0: NaN in other places") == 1
    assert "sequential" in said
