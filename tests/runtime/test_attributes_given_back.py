"""What comparing a model with a schedule leaves in its attributes is taken out again: tensors with the numbers that say whose."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import autosched
from autosched import pipeline
from autosched.runtime.attribute_tensors import AttributeTensors
from autosched.runtime.guard import FallbackWarning
from tests.conformance.stateful import bundle_bytes

X = torch.ones(2, 3, 4)


class Detector(nn.Module):
    """Makes its anchors anew where a call has another shape than the last one, as detectors do."""

    shape: torch.Size | None = None

    def __init__(self) -> None:
        super().__init__()
        self.anchors = torch.empty(0)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shape != x.shape:
            self.anchors = torch.arange(x.shape[1]).float()[:, None]
            self.shape = x.shape
        return x * self.anchors * self.scale


class Counting(nn.Module):
    """Writes each call to the next row of what it has."""

    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(8, 4))
        self.place = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows[self.place] = x[0, 0]
        self.place += 1
        return self.rows.cumsum(0) + self.place


def test_numbers_go_with_the_tensors_of_their_module_and_others_stay() -> None:
    model = nn.ModuleList([Detector(), Counting()]).eval()
    began = AttributeTensors(model)
    model[0](X), model[1](X)
    model[0].scale = 3.0
    model[0].train()
    began.give_back()
    assert (model[0].shape, model[0].anchors.numel(), model[0].scale) == (None, 0, 2.0)
    assert (model[0].training, model[1].place) == (True, 1)
    began.give_back(numbers=True)
    assert model[1].place == 0


@pytest.mark.parametrize("kind", [Detector, Counting])
def test_a_model_that_another_schedule_was_made_for_answers_as_before(kind: type[nn.Module]) -> None:
    class Other(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    data = bundle_bytes(kind().eval(), (X,))
    model = Other().eval()
    before = copy.deepcopy(model)
    with pytest.warns(FallbackWarning, match="its outputs differ"):
        loaded = autosched.load(data, model)
    expected = before(X)
    assert torch.equal(loaded(X), expected)
    assert torch.equal(model.anchors, before.anchors) if kind is Detector else model.place == 1


def test_a_tuned_model_answers_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "cache"))
    model = Detector().eval()
    expected = copy.deepcopy(model)(X)
    pipeline.tune(model, (X,), device="cpu", effort="quick", budget_s=1.0, lowering="aten")
    assert torch.equal(model(X), expected)
