"""A shape that had to leave memory: what becomes of its model meanwhile is noticed when it is made ready again, as if it had stayed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from autosched.export.bundle import encode_bundle
from autosched.runtime.guard import FallbackWarning, LoadedModel
from autosched.runtime.load import load
from tests.conformance.stateful import bundled


class Activated(nn.Module):
    """A layer, and what is to be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.activation = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.activation(self.layer(x))
        return answer


@pytest.fixture
def model() -> Activated:
    return Activated().eval()


@pytest.fixture
def fast(model: Activated) -> Iterator[LoadedModel]:
    """Its schedule for two rows has left memory for that for three."""
    loaded = load(encode_bundle(*(bundled(model, (torch.randn(rows, 4),))[1] for rows in (2, 3))), model, max_shapes=1)
    with torch.no_grad():
        loaded(torch.randn(3, 4))
        assert [shape.ready for shape in loaded.report().shapes] == [False, True]
        yield loaded


def test_operators_that_the_model_then_calls_are_held_against_those_it_called_before(model: Activated, fast: LoadedModel) -> None:
    """Even if its answers to random inputs are the same."""
    model.activation = nn.ReLU6().eval()
    x = torch.full((2, 4), 100.0)
    with pytest.warns(FallbackWarning, match="calls other operators than before"):
        assert torch.equal(fast(x), model(x))


def test_what_was_given_up_for_another_model_is_used_again_once_the_tuned_one_is_back(model: Activated, fast: LoadedModel) -> None:
    model.activation = nn.Tanh().eval()
    x = torch.randn(2, 4)
    with pytest.warns(FallbackWarning, match="outputs differ from the model's"):
        assert torch.equal(fast(x), model(x))
    model.activation = nn.ReLU().eval()
    fast.refresh()
    torch.testing.assert_close(fast(x), model(x))
    assert [shape.calls for shape in fast.report().shapes] == [1, 1]
