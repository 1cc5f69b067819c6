"""A model that asks its own tensors what to run: its schedule is for their numbers, and runs on no others."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autosched
from autosched.core.decided import can_decide, decided_otherwise
from autosched.core.errors import AutoschedError, IncompatibleArtifact, InvalidGraph
from autosched.core.program import ConstantSource, Decision
from autosched.core.variants import Lowering
from autosched.runtime.bundle.format import read_bundles, schema_for
from autosched.runtime.bundle.program_check import check_program
from tests.conformance.stateful import bundle_bytes

X = torch.linspace(-2.0, 2.0, 32).reshape(4, 8)
LARGE = X * 1e4


class Limited(nn.Module):
    """Without the limit it answers alike for all inputs but large ones, which no comparison draws."""

    limited: torch.Tensor
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("limited", torch.tensor([True]))
        self.register_buffer("steps", torch.tensor(5))
        self.gate = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if self.limited:
            x = x.clamp(-100.0, 100.0)
        if self.steps.item() > 2:
            # It computes with it, too.
            x = x * self.steps
        return x * self.gate if self.gate != 0 else x


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Limited()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.part(x)
        return answer


def _load_state(model: Part, *, assign: bool = False) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict({**state, "part.limited": torch.tensor([False])}, assign=assign)


def _in_inference_mode(model: Part) -> None:
    with torch.inference_mode():
        model.part.limited = torch.tensor([False])


_WAYS: dict[str, Callable[[Part], Any]] = {
    "in place": lambda model: model.part.limited.fill_(False),
    "an item": lambda model: model.part.limited.__setitem__(0, False),
    "state loaded": _load_state,
    "state assigned": lambda model: _load_state(model, assign=True),
    "replaced": lambda model: setattr(model.part, "limited", torch.tensor([False])),
    "replaced in the table": lambda model: model.part._buffers.__setitem__("limited", torch.tensor([False])),
    "replaced in inference mode": _in_inference_mode,
    "other memory": lambda model: setattr(model.part.limited, "data", torch.tensor([False])),
    "past all counts": lambda model: model.part.limited.data.fill_(False),
    "through numpy": lambda model: model.part.limited.numpy().fill(False),
    "part replaced": lambda model: setattr(model, "part", _unlimited(model.part)),
    "computed with, too": lambda model: model.part.steps.fill_(1),
    "a parameter": lambda model: model.part.gate.data.zero_(),
}


def _unlimited(part: Limited) -> Limited:
    other = copy.deepcopy(part)
    other.limited.fill_(False)
    return other


@pytest.fixture(scope="module")
def data() -> bytes:
    return bundle_bytes(_model(), (X,))


def _model() -> Part:
    torch.manual_seed(3)
    return Part().eval()


@pytest.mark.parametrize("way", _WAYS)
def test_after_a_change_of_what_decides_the_model_answers(way: str, data: bytes) -> None:
    model = _model()
    loaded = autosched.load(data, model)
    for x in (X, LARGE):
        torch.testing.assert_close(loaded(x), model(x))
    assert loaded.report().calls == 2
    _WAYS[way](model)
    with pytest.warns(UserWarning, match="by which the model decides what runs|made under torch.inference_mode"):
        torch.testing.assert_close(loaded(LARGE), model(LARGE))
    for x in (X, LARGE):
        torch.testing.assert_close(loaded(x), model(x))
    assert loaded.report().calls == 2


def test_given_its_numbers_again_the_schedule_runs_after_a_refresh(data: bytes) -> None:
    model = _model()
    loaded = autosched.load(data, model, strict=True)
    model.part.limited.fill_(False)
    with pytest.raises(IncompatibleArtifact, match=r"buffer part\.limited, by which the model decides what runs: other numbers here"):
        loaded(X)
    model.part.limited.fill_(True)
    loaded.refresh()
    torch.testing.assert_close(loaded(LARGE), model(LARGE))


def test_the_same_numbers_written_again_keep_the_schedule(data: bytes) -> None:
    model = _model()
    loaded = autosched.load(data, model, strict=True)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    torch.testing.assert_close(loaded(LARGE), model(LARGE))
    model.part.limited = torch.tensor([True])
    torch.testing.assert_close(loaded(LARGE), model(LARGE))
    assert loaded.report().calls == 2


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", ["in place", "replaced", "a parameter"])
def test_another_model_with_other_numbers_is_refused(way: str, frozen: bool, data: bytes) -> None:
    model = _model()
    _WAYS[way](model)
    loaded = _loaded(data, model, frozen=frozen)
    report = loaded.report()
    assert not report.scheduled
    assert "by which the model decides what runs: other numbers here than in tuning" in report.reason
    torch.testing.assert_close(loaded(LARGE), model(LARGE))


def _loaded(data: bytes, model: nn.Module, *, frozen: bool) -> Any:
    with pytest.warns(UserWarning, match="other numbers here than in tuning"):
        return autosched.load(data, model, frozen=frozen)


@pytest.mark.parametrize("lowering", [Lowering.ATEN, Lowering.INDUCTOR])
def test_every_lowering_knows_what_decides(lowering: Lowering) -> None:
    model = _model()
    data = bundle_bytes(_model(), (X,), lowering)
    [bundle] = read_bundles(data)
    assert [item.name for item in bundle.program.decided] == ["part.limited", "part.steps", "part.gate"]
    assert schema_for([bundle]) == 7
    loaded = autosched.load(data, model, strict=True)
    torch.testing.assert_close(loaded(LARGE), model(LARGE))
    model.part.limited.fill_(False)
    with pytest.raises(AutoschedError, match="by which the model decides"):
        loaded(LARGE)


def test_what_is_not_a_plain_tensor_decides_nothing() -> None:
    decided = (Decision(ConstantSource.BUFFER, "part.limited", "0"), Decision(ConstantSource.BUFFER, "gone", "0"))
    first, second = decided_otherwise(decided, _model())
    assert "other numbers here" in first
    assert "absent here" in second
    assert can_decide(torch.ones(2))
    assert not can_decide(torch.ones(2).to_sparse())
    assert not can_decide(torch.ones(2**17))
    assert not can_decide(torch.ones(2, device="meta"))


def test_a_file_that_decides_by_what_it_changes_is_damaged(data: bytes) -> None:
    [bundle] = read_bundles(data)
    program = bundle.program
    check_program(program)
    literal = dataclasses.replace(program.decided[0], source=ConstantSource.LITERAL)
    with pytest.raises(InvalidGraph, match="a tensor of the program's own"):
        check_program(dataclasses.replace(program, decided=(literal,)))
    with pytest.raises(InvalidGraph, match="not printable"):
        check_program(dataclasses.replace(program, decided=(dataclasses.replace(literal, name="\x1b"),)))
