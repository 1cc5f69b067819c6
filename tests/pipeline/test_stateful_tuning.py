"""Tuning a model that changes its buffers, end to end on the CPU: it is left as it was, and served as it is in eager mode."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import autosched
from autosched import pipeline
from autosched.core.errors import UnsupportedGraph
from tests.conformance.caches import own_cache
from tests.conformance.stateful import KeyValueCache, assert_like_eager, example, made


def test_it_is_tuned_without_a_trace_and_served_with_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path / "cache"))
    model, x = made(KeyValueCache), example()
    before, given = copy.deepcopy(model), x.clone()
    tuned = pipeline.tune(model, (x,), device="cpu", effort="quick", budget_s=2.0, lowering="rewritten")
    assert torch.equal(x, given)
    for one, other in zip(model.buffers(), before.buffers(), strict=True):
        assert torch.equal(one, other)
    assert [note for note in tuned.report.notes if "where it lies, in calls as in what is timed" in note]
    marked = [operator for operator in tuned.bundle.program.graph.operators if operator.signature.endswith("+in_place")]
    assert len(marked) == 2
    path = tmp_path / "model.autosched"
    tuned.save(path)
    loaded = autosched.load(path, model, strict=True)
    assert_like_eager(loaded, model, [(example(),) for _ in range(5)])
    # The cache lies where it lay. The counter is made anew if the schedule that was kept counts before both copies have read it.
    assert loaded.report().shapes[0].copied_back_bytes in (0, model.count.nbytes)


def test_a_model_without_state_has_no_word_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path / "cache"))
    tuned = pipeline.tune(made(KeyValueCache).layer, (example(),), device="cpu", effort="quick", budget_s=2.0, lowering="rewritten")
    assert not [note for note in tuned.report.notes if "the model changes" in note]


class Streaming(torch.nn.Module):
    """Its state has no tensor before the first call."""

    state: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = x if self.state is None else self.state + x
        return self.state * 2


def test_state_that_has_no_tensor_yet_is_refused_by_name_and_is_none_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path / "cache"))
    model = Streaming().eval()
    with pytest.raises(UnsupportedGraph, match="changes its buffer 'state' at each call"):
        pipeline.tune(model, (torch.ones(4),), device="cpu", effort="quick", budget_s=1.0, lowering="aten")
    assert model.state is None
