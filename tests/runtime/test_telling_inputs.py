"""Inputs to compare a schedule with its model on: masks that hide everything are no question to ask."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from autosched.capture.export import Captured, capture
from autosched.core.schedule import sequential
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.pipeline.references import INPUT_SETS, take_references
from autosched.runtime.guard import FallbackWarning
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.load import load
from autosched.runtime.numerics import compare
from autosched.runtime.telling_inputs import telling_inputs
from tests.conformance.bundles import evidence_for

ROWS = 64  # so many that a mask drawn at random hides everything in one of them


class Attending(nn.Module):
    """In eval mode PyTorch's own fast path, which answers NaN for a query that may look at nothing; exported, the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.attention(x, x, x, key_padding_mask=keep == 0, need_weights=False)[0]
        return found


@pytest.fixture
def attending() -> tuple[Attending, tuple[torch.Tensor, torch.Tensor], Captured]:
    torch.manual_seed(0)
    keep = torch.ones(ROWS, 3, dtype=torch.long)
    keep[0, 2] = 0
    model, args = Attending().eval(), (torch.randn(ROWS, 3, 8), keep)
    return model, args, capture(model, args)


def test_a_mask_that_hides_everything_is_not_asked(
    attending: tuple[Attending, tuple[torch.Tensor, torch.Tensor], Captured],
) -> None:
    model, args, captured = attending
    drawn = random_inputs(captured.program, 1)
    with torch.inference_mode():
        assert model(*drawn).isnan().any(), "the mask drawn at random hides nothing: this test tests nothing"
    references = take_references(model, captured.program, args, None, seed=0)
    assert len(references.outputs) == INPUT_SETS
    bound = bind(captured.program, captured.constants)
    for inputs, outputs in zip(references.inputs, references.outputs, strict=True):
        agreement = compare(bound.run(inputs), outputs)
        assert agreement.within_tolerance, agreement.reason
    assert not torch.equal(references.inputs[1][0], references.inputs[2][0]), "the others are still drawn at random"


def test_a_model_with_a_padding_mask_loads(attending: tuple[Attending, tuple[torch.Tensor, torch.Tensor], Captured]) -> None:
    model, args, captured = attending
    program = captured.program
    evidence = evidence_for(len(program.graph), cpu_device_key(), program.graph.hash)
    bundle = make_bundle(program, sequential(program.graph), evidence, {}, cpu_device_key(), software_key())
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        fast = load(encode_bundle(bundle), model, strict=True)
        with torch.inference_mode():
            torch.testing.assert_close(fast(*args), model(*args))


@pytest.mark.parametrize("hides", [0, 1])
def test_ones_alone_then_zeros_alone(attending: tuple[Attending, tuple[torch.Tensor, torch.Tensor], Captured], hides: int) -> None:
    program = attending[2].program

    def answer(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"y": torch.where((tensors[1] == hides).any(), torch.nan, 1.0)}

    inputs, found = telling_inputs(program, 3, "cpu", answer)
    assert not found["y"].isnan()
    assert (inputs[1] == 1 - hides).all()
    assert torch.equal(inputs[0], random_inputs(program, 3)[0])


def test_where_nothing_helps_the_first_draw_stays(
    attending: tuple[Attending, tuple[torch.Tensor, torch.Tensor], Captured],
) -> None:
    program = attending[2].program
    calls: list[list[torch.Tensor]] = []

    def answer(tensors: list[torch.Tensor]) -> torch.Tensor:
        calls.append(tensors)
        if len(calls) == 2:
            raise ValueError("not with this mask")
        return torch.tensor(torch.nan)

    inputs, found = telling_inputs(program, 3, "cpu", answer)
    assert found.isnan()
    assert len(calls) == 3
    assert all(torch.equal(a, b) for a, b in zip(inputs, random_inputs(program, 3), strict=True))
