"""A job that ends without any schedule says why once, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autosched
from autosched.capture.export import capture
from autosched.core.errors import NoFeasibleCandidate, UnsupportedGraph
from autosched.core.records import Failure, FailureKind
from autosched.pipeline.no_schedule import no_schedule
from autosched.pipeline.references import take_references
from tests.conformance.caches import own_cache


class Blind(torch.nn.Module):
    """PyTorch's fast path answers NaN for a query that may look at nothing; what it is exported to answers zero."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
        return found


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls + 1


class Choosing(torch.nn.Module):
    """Which row it answers with is decided by the last bits of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.arange(64.0)[:, None].repeat(1, 4))
        torch.manual_seed(0)
        self.scores = torch.nn.Linear(64, 64)
        with torch.no_grad():
            self.scores.weight.copy_(self.scores.weight[:1].expand(64, 64))
            self.scores.bias.fill_(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best = self.scores(x).argmax(-1)
        return self.rows[best]


class Passes(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("lowering", [None, "rewritten"])
def test_a_model_that_computes_nothing_is_refused_before_a_process_is_asked(
    lowering: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path))
    with pytest.raises(UnsupportedGraph, match="computes nothing"):
        autosched.tune(Passes(), (torch.ones(2),), device="cpu", effort="quick", budget_s=1.0, lowering=lowering)


def test_example_inputs_whose_answer_is_nan_are_named_as_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path))
    call = (torch.randn(2, 3, 8), torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(NoFeasibleCandidate, match="give example inputs") as raised:
        autosched.tune(Blind().eval(), call, device="cpu", effort="quick", budget_s=2.0, lowering="rewritten")
    said = str(raised.value)
    # Once for all strategies, however many distinct schedules they made.
    assert said.count(": nonfinite, output 0: NaN in other places") == 1
    assert "sequential" in said


def _why(model: torch.nn.Module, *inputs: torch.Tensor) -> str:
    failures = {"sequential": Failure(FailureKind.MISMATCH, "differs by 1")}
    program = capture(model, inputs).program
    return str(no_schedule(failures, model, program, take_references(model, program, inputs, None, 0)))


def test_a_model_that_counts_its_calls_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Counting()).eval()
    with pytest.raises(NoFeasibleCandidate, match=r"answers the same inputs with a difference of .*forward\(\) changes self\.1\.calls"):
        autosched.tune(model, (torch.randn(2, 4),), device="cpu", effort="quick", budget_s=2.0, lowering="rewritten")


def test_a_choice_among_equals_is_told_from_an_error_of_ours() -> None:
    assert "it chooses among values that are nearly equal" in _why(Choosing().eval(), torch.randn(2, 64))
    coarse = _why(Choosing().bfloat16().eval(), torch.randn(2, 64).bfloat16())
    assert "too many operators for sixteen bits, or it chooses among values that are nearly equal" in coarse
    assert "Tune it in float32, with trained weights" in coarse
    # Nothing about this model says that it should not be reproduced.
    assert "report the operator" in _why(torch.nn.Linear(4, 4).eval(), torch.randn(2, 4))


def test_a_failure_that_is_no_mismatch_asks_nothing_of_the_model() -> None:
    model = Counting()
    program = capture(model, (torch.ones(2),)).program
    references = take_references(model, program, (torch.ones(2),), None, 0)
    calls = model.calls
    assert "report the operator" in str(no_schedule({"sequential": Failure(FailureKind.CRASH, "boom")}, model, program, references))
    assert model.calls == calls
