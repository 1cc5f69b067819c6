"""The yardstick: the model runs once for all programs that take the same inputs, and again for one that does not."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.errors import UnsupportedGraph
from autosched.core.variants import Lowering
from autosched.pipeline.references import INPUT_SETS, Yardstick


class Counted(nn.Module):
    """Counts the calls that are not captures of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting():
            self.calls += 1
        return torch.relu(self.layer(x)) - y


def test_the_model_runs_once_for_all_its_lowerings() -> None:
    model, args = Counted().eval(), (torch.randn(2, 4), torch.randn(2, 4))
    programs = [capture(model, args, lowering=lowering).program for lowering in (Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED)]
    model.calls = 0
    yardstick = Yardstick(model, args, None, 0)
    found = [yardstick.of(program) for program in programs]
    assert model.calls == INPUT_SETS
    assert found[0] is found[1] is found[2]
    assert torch.equal(found[0].outputs[0][0], model(*args))


def test_inputs_lie_as_in_the_example() -> None:
    """What was compiled for rows with gaps between them runs on nothing else."""
    model, args = Counted().eval(), (torch.randn(4, 8)[::2, ::2], torch.randn(1, 4).expand(2, 4))
    given: list[list[tuple[int, ...]]] = []
    model.register_forward_pre_hook(lambda module, inputs: given.append([tensor.stride() for tensor in inputs]))
    program = capture(model, args).program
    given.clear()
    found = Yardstick(model, args, None, 0).of(program)
    assert [inputs[0].stride() for inputs in found.inputs] == [(16, 2)] * INPUT_SETS
    assert [strides[0] for strides in given] == [(16, 2)] * INPUT_SETS
    assert torch.equal(found.inputs[0][1], args[1])


def test_a_program_of_other_inputs_gets_references_of_its_own() -> None:
    model = Counted().eval()
    args = (torch.randn(2, 4), torch.randn(2, 4))
    program = capture(model, args).program
    doubled = capture(model, (2.0 * args[0], args[1])).program
    yardstick = Yardstick(model, args, None, 0)
    # Random inputs are drawn like the example that a program was captured with.
    assert not torch.equal(yardstick.of(program).inputs[1][0], yardstick.of(doubled).inputs[1][0])


class Pyramid(nn.Module):
    """Passes on to its parts what it made of the inputs, as optical flow's correlation blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.levels: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.levels = [x.relu(), x.tanh()]
        return self.levels[0] + self.levels[1]


class Tidy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pyramid = Pyramid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.pyramid(x)
        self.pyramid.levels = []
        return made


def test_what_each_call_leaves_where_another_may_read_it_is_refused_before_anything_is_measured() -> None:
    """As ``load`` refuses it, which would be too late: the job's minutes are spent by then."""
    args = (torch.randn(2, 4),)
    with pytest.raises(UnsupportedGraph, match=r"each call leaves another tensor in the model's attribute 'levels'"):
        Yardstick(model := Pyramid(), args, None, 0).of(capture(model, args).program)
    found = Yardstick(tidy := Tidy(), args, None, 0).of(capture(tidy, args).program)
    assert torch.equal(found.outputs[0][0], tidy(*args))


class Noting(nn.Module):
    """Notes what each layer gave, to be looked at later, as interpretable networks do."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.made = layer(x)
        return x


@pytest.mark.parametrize(
    ("layers", "named"), [(2, "attributes 'layers.0.made', 'layers.1.made', where"), (20, "'layers.15.made' and 4 more, where")]
)
def test_all_attributes_that_calls_leave_tensors_in_are_named_at_once(layers: int, named: str) -> None:
    """One at a time, each would cost another tuning job."""
    args = (torch.randn(2, 4),)
    with pytest.raises(UnsupportedGraph, match=re.escape(named)):
        Yardstick(model := Noting(layers), args, None, 0).of(capture(model, args).program)
