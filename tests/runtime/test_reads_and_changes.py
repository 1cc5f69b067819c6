"""A model that reads what its schedule does without, and changes it in the same call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autosched
from autosched.core.errors import IncompatibleArtifact
from tests.conformance.stateful import bundle_bytes

X = torch.ones(2, 3, 4)


class Neuron(nn.Module):
    """Puts another tensor in the place of its buffer at each call, after a look at what was there; as spiking neurons do."""

    membrane: torch.Tensor

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.register_buffer("membrane", torch.zeros(0), persistent=False)
        self.fixed = fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.membrane = torch.zeros_like(self.membrane)
        if self.membrane.shape != x.shape:
            self.membrane = torch.zeros_like(x)
        self.membrane = torch.ones_like(x) if self.fixed else self.membrane + x
        return self.membrane * 2


def test_what_a_model_reads_beside_its_schedule_is_no_change_by_another_thread() -> None:
    models = [nn.Sequential(Neuron(fixed)).eval() for fixed in (True, False)]
    fixed, free = (bundle_bytes(copy.deepcopy(model), (X,)) for model in models)
    assert autosched.load(fixed, models[0], strict=True).report().scheduled
    with pytest.raises(IncompatibleArtifact, match=r"changes its buffer 0\.membrane at each call, and the schedule does not"):
        autosched.load(free, models[1], strict=True)


class Leaving(nn.Module):
    """Leaves what it has computed where the next call, or its caller, may look for it: in a plain attribute."""

    hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = x * 2
        return self.hidden + 1


def test_a_schedule_that_does_not_leave_what_each_call_leaves_is_refused() -> None:
    model = nn.Sequential(Leaving()).eval()
    data = bundle_bytes(copy.deepcopy(model), (X,))
    said = r"each call leaves another tensor in the model's attribute '0\.hidden'.*keep in a buffer"
    with pytest.raises(IncompatibleArtifact, match=said):
        autosched.load(data, model, strict=True)
