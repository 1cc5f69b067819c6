"""What a model asks its own tensors is answered while it is exported; what may have come of an input, or of the call, is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.errors import UnsupportedGraph
from autosched.core.program import Program

X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


class Asking(nn.Module):
    """Asks as ``decide`` does, given itself and its input."""

    def __init__(self, decide: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.decide = decide
        self.register_buffer("yes", torch.tensor(True))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.register_buffer("first", self.flags[:1])
        self.bias = nn.Parameter(torch.zeros(4))
        self.plain = torch.tensor(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) if self.decide(self, x) else torch.sigmoid(x)


class Holding(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.part(x + 1)
        return answer


def _doubled(model: Any, x: torch.Tensor) -> object:
    steps = model.steps
    for _ in range(40):
        steps = steps + steps
    return steps > 0


_OWN: dict[str, tuple[Callable[[Any, torch.Tensor], object], set[str]]] = {
    "itself": (lambda model, x: model.yes, {"yes"}),
    "not itself": (lambda model, x: not model.yes, {"yes"}),
    "item": (lambda model, x: model.steps.item() > 2, {"steps"}),
    "whole number": (lambda model, x: int(model.steps) == 2, {"steps"}),
    "float": (lambda model, x: float(model.scale[1]) > 1, {"scale"}),
    "compared": (lambda model, x: model.steps > 2, {"steps"}),
    "two compared": (lambda model, x: (model.steps == 3) & model.yes, {"steps", "yes"}),
    "all": (lambda model, x: model.flags.all(), {"flags"}),
    "one of several": (lambda model, x: model.flags[2], {"flags"}),
    "data": (lambda model, x: model.yes.data, {"yes"}),
    "list": (lambda model, x: model.flags.tolist()[0], {"flags"}),
    "equal": (lambda model, x: torch.equal(model.yes, model.flags[0]), {"yes", "flags"}),
    "parameter": (lambda model, x: torch.any(model.bias.abs() > 1e-8), {"bias"}),
    "elsewhere": (lambda model, x: model.yes.to(torch.int64).cpu().view(1).sum() > 0, {"yes"}),
    "computed from itself": (_doubled, {"steps"}),
    "used with an input before": (lambda model, x: (x * model.steps).shape[0] and model.steps > 2, {"steps"}),
}


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("way", _OWN)
def test_what_a_model_asks_its_own_tensors_is_part_of_its_program(way: str, inner: bool) -> None:
    decide, names = _OWN[way]
    part = Asking(decide).eval()
    with torch.no_grad():
        eager = part(X)
    program = capture(Holding(part).eval() if inner else part, (X,)).program
    assert {item.name for item in program.decided} == {f"part.{name}" if inner else name for name in names}
    assert _kinds(program)[-1:] == (["aten::relu"] if torch.equal(eager, X.relu()) else ["aten::sigmoid"])


def test_a_number_of_its_own_may_be_a_size() -> None:
    class Cut(Asking):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, : self.steps.item()] * 2

    program = capture(Cut(bool).eval(), (X,)).program
    assert [item.name for item in program.decided] == ["steps"]
    assert program.graph.values[program.graph.outputs[0]].spec.shape == (3, 3)


def _kinds(program: Program) -> list[str]:
    return [call.target.rpartition(".")[0] for operator in program.graph.operators for call in operator.calls]


def _changed_in_place(model: Any, x: torch.Tensor) -> object:
    model.yes.logical_and_(x.sum() > 0)
    return model.yes


def _changed_under_another_name(model: Any, x: torch.Tensor) -> object:
    model.first.logical_and_(x.sum() > 0)
    return model.flags.all()


def _changed_after(model: Any, x: torch.Tensor) -> object:
    found = bool(model.steps > 2)
    model.steps.add_(1)
    return found


def _replaced(model: Any, x: torch.Tensor) -> object:
    model.steps = model.steps + 1
    return model.steps > 3


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("decide", [_changed_in_place, _changed_after, _replaced])
def test_what_the_call_changes_decides_nothing(decide: Callable[[Any, torch.Tensor], object], inner: bool) -> None:
    part = Asking(decide).eval()
    with pytest.raises(UnsupportedGraph, match=r"changes it in the same call|the call may have changed before"):
        capture(Holding(part).eval() if inner else part, (X,))


def _copy_changed(model: Any, x: torch.Tensor) -> object:
    copy = model.yes.clone()
    copy &= x.sum() > 0
    return copy


def _copys_data_changed(model: Any, x: torch.Tensor) -> object:
    copy = model.yes.clone()
    copy.data.fill_(False)
    return copy


def _copys_view_changed(model: Any, x: torch.Tensor) -> object:
    copy = model.yes.clone()
    copy.view(1)[0] = x.sum() > 0
    return copy


def _expanded_copy_changed(model: Any, x: torch.Tensor) -> object:
    copy = model.flags.clone()
    copy[:, None].expand_as(x)[:, :1].logical_and_(x[:, :1] > 0)
    return copy.all()


def _given_as_out(model: Any, x: torch.Tensor) -> object:
    copy = model.yes.clone()
    torch.gt(x.sum(), 0, out=copy)
    return copy


def _in_place(flag: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return flag.logical_and_(x.sum() > 0)


def _changed_by_scripted_code(model: Any, x: torch.Tensor) -> object:
    copy = model.yes.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(_in_place)
    scripted(copy, x)
    return copy


def _with_an_input(model: Any, x: torch.Tensor) -> object:
    return model.yes & (x.sum() > 0)


def _by_chance(model: Any, x: torch.Tensor) -> object:
    return torch.bernoulli(model.scale[:1] * 0.5) > 0


@pytest.mark.parametrize(
    "decide",
    [
        _copy_changed,
        _copys_data_changed,
        _copys_view_changed,
        _expanded_copy_changed,
        _given_as_out,
        _changed_by_scripted_code,
        _with_an_input,
        _by_chance,
    ],
)
def test_what_may_have_come_of_more_than_the_models_own_is_refused(decide: Callable[[Any, torch.Tensor], object]) -> None:
    with pytest.raises(UnsupportedGraph, match=r"test_decisions\.py:\d+ .*a value decides what runs next"):
        capture(Asking(decide).eval(), (X,))


def test_a_model_that_calls_itself_is_not_asked_what_it_has_changed_by_then() -> None:
    class Again(Asking):
        def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
            if again:
                self.steps = self.steps + 1
                answer: torch.Tensor = self(x, False)
                return answer
            return torch.relu(x) if self.steps > 3 else torch.sigmoid(x)

    with pytest.raises(UnsupportedGraph, match="changes it in the same call"):
        capture(Again(bool).eval(), (X,))


def test_it_is_asked_in_inference_mode_as_well() -> None:
    with torch.inference_mode():
        program = capture(Asking(lambda model, x: model.steps > 2).eval(), (X,)).program
    assert [item.name for item in program.decided] == ["steps"]


def test_a_refusal_says_what_may_have_changed_it() -> None:
    with pytest.raises(
        UnsupportedGraph, match=r"the model's buffer 'yes', which the call may have changed before \(torch\.Tensor\.__iand__\)"
    ):
        capture(Asking(_copy_changed).eval(), (X,))


def test_a_tensor_in_an_attribute_decides_nothing_and_the_refusal_says_where_to_keep_it() -> None:
    with pytest.raises(UnsupportedGraph, match="the model's attribute 'plain': register it as a buffer"):
        capture(Asking(lambda model, x: model.plain).eval(), (X,))


def test_a_buffer_that_shares_memory_with_what_is_changed_decides_nothing() -> None:
    with pytest.raises(UnsupportedGraph):
        capture(Asking(_changed_under_another_name).eval(), (X,))


def test_initialising_at_the_first_call_is_refused_until_it_is_done() -> None:
    class Codebook(nn.Module):
        initted: torch.Tensor
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("initted", torch.tensor([False]))
            self.register_buffer("table", torch.zeros(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.initted:
                self.table.data.copy_(x[torch.randperm(3)])
                self.initted.data.copy_(torch.tensor([True]))
            return x @ self.table.t()

    model = Codebook().eval()
    with pytest.raises(UnsupportedGraph, match=r"decides by its buffer 'initted' what runs, and changes it .*load trained weights"):
        capture(model, (X,))
    assert not model.initted
    with torch.no_grad():
        model(X)
    program = capture(model, (X,)).program
    assert [item.name for item in program.decided] == ["initted"]
    assert not program.state
