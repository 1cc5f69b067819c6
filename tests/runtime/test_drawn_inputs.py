"""A file says how the inputs of the comparison with its model are drawn; that must not hide what it computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from autosched.core.errors import IncompatibleArtifact
from autosched.export.bundle import encode_bundle
from autosched.runtime.load import load
from tests.conformance.stateful import bundled


class Rounded(nn.Module):
    """Of whole numbers it returns what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.round() * 2


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_whole_numbers_that_a_file_asks_for_are_not_all_that_is_compared() -> None:
    _, bundle = bundled(Rounded().eval(), (torch.randn(4),))
    inputs = tuple(dataclasses.replace(item, low=0, high=9, mean=0.0, std=0.0) for item in bundle.program.inputs)
    data = encode_bundle(dataclasses.replace(bundle, program=dataclasses.replace(bundle.program, inputs=inputs)))
    with pytest.raises(IncompatibleArtifact, match="its outputs differ"):
        load(data, Twice().eval(), strict=True)
