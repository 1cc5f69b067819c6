"""A file says how the inputs of the comparison with its model are drawn; that must not hide what it computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autosched.core.errors import IncompatibleArtifact
from autosched.export.bundle import encode_bundle
from autosched.runtime.load import load
from tests.conformance.apply import Apply
from tests.conformance.stateful import bundled


class Rounded(nn.Module):
    """Of whole numbers it returns what it is given."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.round() * 2 + y


class Twice(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y


class Looks(nn.Module):
    """Of numbers below zero there is nothing to be found."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(110, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.table(x.long())
        return found


# What a file may ask for that hides everything but what is doubled here: large numbers, small ones, and those of one sign.
_HIDING: dict[str, tuple[float, float, Callable[[Tensor], Tensor]]] = {
    "above zero": (50.0, 1.0, torch.relu),
    "below zero": (-50.0, 1.0, lambda x: -torch.relu(-x)),
    "small": (0.0, 1e-3, lambda x: x.clamp(-0.1, 0.1)),
    "large": (0.0, 1e4, lambda x: torch.where(x.abs() > 20.0, x, 0.0)),
}


@pytest.mark.parametrize("name", _HIDING)
def test_numbers_of_a_range_that_a_file_asks_for_are_not_all_that_is_compared(name: str) -> None:
    mean, std, shown = _HIDING[name]
    right, wrong = Apply(lambda m, x: x * 2).eval(), Apply(lambda m, x: shown(x) * 2).eval()
    _, bundle = bundled(right, (torch.randn(4),))
    inputs = tuple(dataclasses.replace(item, low=0, high=0, mean=mean, std=std) for item in bundle.program.inputs)
    data = encode_bundle(dataclasses.replace(bundle, program=dataclasses.replace(bundle.program, inputs=inputs)))
    assert load(data, right, strict=True).report().scheduled
    with pytest.raises(IncompatibleArtifact, match="its outputs differ"):
        load(data, wrong, strict=True)


def of_whole_numbers(model: nn.Module, args: tuple[Tensor, ...], low: int, high: int) -> bytes:
    """A bundle whose file asks for whole numbers as the first input of the comparison, and for random ones as the others."""
    _, bundle = bundled(model, args)
    first, *others = bundle.program.inputs
    inputs = (
        dataclasses.replace(first, low=low, high=high, mean=0.0, std=1.0),
        *(dataclasses.replace(item, low=0, high=0, mean=0.0, std=1.0) for item in others),
    )
    return encode_bundle(dataclasses.replace(bundle, program=dataclasses.replace(bundle.program, inputs=inputs)))


def test_whole_numbers_that_a_file_asks_for_are_not_all_that_is_compared() -> None:
    args = (torch.randn(4), torch.randn(4))
    data = of_whole_numbers(Rounded().eval(), args, 0, 9)
    assert load(data, Rounded().eval(), strict=True)(*args).shape == (4,)
    with pytest.raises(IncompatibleArtifact, match="its outputs differ"):
        load(data, Twice().eval(), strict=True)


def test_a_model_that_takes_no_others_is_compared_with_those_alone() -> None:
    model, x = Looks().eval(), torch.arange(100.0, 110.0).repeat(10)
    loaded = load(of_whole_numbers(model, (x,), 100, 109), model, strict=True)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    assert loaded.report().calls == 1
    assert loaded.report().max_abs_error == 0.0
