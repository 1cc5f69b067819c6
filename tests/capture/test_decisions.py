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
from autosched.runtime.kernels import bind

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
    "rounded up": (lambda model, x: torch.ceil(model.steps / 2) == 2, {"steps"}),
    "several together": (lambda model, x: torch.stack([model.steps, model.flags.sum()]).cumsum(0)[1] == 5, {"steps", "flags"}),
    "used with an input by an operator that only reads": (
        lambda model, x: torch.zeros(4).index_add_(0, model.steps[None], x[0, :1]).shape[0] and model.steps > 2,
        {"steps"},
    ),
    "with numbers alone": (lambda model, x: (torch.arange(x.shape[1]) < model.steps).sum() == 3, {"steps"}),
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


_SIZES: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "item": (lambda model, x: x[:, : model.steps.item()], (3, 3)),
    "end of a slice": (lambda model, x: x[:, : model.steps], (3, 3)),
    "end of a slice of rows": (lambda model, x: x[: model.steps - 1], (2, 4)),
    "padding": (lambda model, x: nn.functional.pad(x, (0, model.steps)), (3, 7)),
    "how often": (lambda model, x: x[:, :1].repeat(1, model.steps), (3, 3)),
    "how many there are": (lambda model, x: x[:, :1] + torch.arange(model.steps), (3, 3)),
    "one of several sizes": (lambda model, x: x[:, :1] + torch.zeros(3, model.steps + 3), (3, 6)),
}


@pytest.mark.parametrize("way", _SIZES)
def test_a_number_of_its_own_may_be_a_size(way: str) -> None:
    compute, shape = _SIZES[way]

    class Sized(Asking):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return compute(self, x) * 2

    program = capture(Sized(bool).eval(), (X,)).program
    assert [item.name for item in program.decided] == ["steps"]
    assert program.graph.values[program.graph.outputs[0]].spec.shape == shape


@pytest.mark.parametrize(
    "pick",
    [
        lambda table, counts: table.repeat_interleave(counts),
        lambda table, counts: torch.cat([table[table > 1], table.unique(), table.repeat_interleave(1)[:2]]),
        lambda table, counts: table[counts.nonzero()[:, 0]].repeat(2)[:6],
    ],
)
def test_whole_numbers_of_its_own_say_how_many_there_are(pick: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    class Picking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.tensor([3, 1, 2]))
            self.register_buffer("counts", torch.tensor([1, 3, 2]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, pick(self.table, self.counts)] * 2

    model = Picking().eval()
    captured = capture(model, (X,))
    assert {item.name for item in captured.program.decided} <= {"table", "counts"}
    assert captured.program.decided
    (made,) = bind(captured.program, captured.constants).run([X])
    assert torch.equal(made, model(X))


@pytest.mark.parametrize(
    "pick", [lambda scale: scale.unique(), lambda scale: (scale * torch.arange(2.0)).unique(), lambda scale: (scale * 1j).nonzero()]
)
def test_numbers_that_training_changes_do_not_say_how_many_there_are(pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(UnsupportedGraph):
        capture(Asking(lambda model, x: pick(model.scale).shape[0] == 2).eval(), (X,))


def _filled_one_by_one(model: Any, x: torch.Tensor) -> object:
    sizes = torch.empty((2, 2), dtype=torch.long)
    for place, size in enumerate(x.shape):
        sizes[place, 0] = size
        sizes[place, 1] = sizes[place, 0] + 1
    return sizes.prod(1).sum() == 3 * 4 + 4 * 5


def _list_that_grows(model: Any, x: torch.Tensor) -> object:
    sizes = [1, 2]
    made = torch.tensor(sizes)
    sizes.append(4)
    return made.sum() == 3


@pytest.mark.parametrize(
    "decide",
    [
        lambda model, x: torch.full((2,), x.shape[1]).max() == 4,
        lambda model, x: torch.arange(1, x.dim() + 1).tolist() == [1, 2],
        lambda model, x: torch.tensor([x.shape[0], torch.tensor(2)]).prod() == 6,
        lambda model, x: torch.ones(3, dtype=torch.bool).all(),
        lambda model, x: torch.tensor([0.5, 0.5, x.shape[0]]).unique().shape[0] == 2,
        _filled_one_by_one,
        _list_that_grows,
    ],
)
def test_what_a_call_makes_of_numbers_alone_decides(decide: Callable[[Any, torch.Tensor], object]) -> None:
    program = capture(Asking(decide).eval(), (X,)).program
    assert program.decided == ()
    assert _kinds(program)[-1:] == ["aten::relu"]


def _kinds(program: Program) -> list[str]:
    return [call.target.rpartition(".")[0] for operator in program.graph.operators for call in operator.calls]


def _changed_in_place(model: Any, x: torch.Tensor) -> object:
    model.yes.logical_and_(x.sum() > 0)
    return model.yes


def _changed_under_another_name(model: Any, x: torch.Tensor) -> object:
    model.first.logical_and_(x.sum() > 0)
    return model.flags.all()


def _view_through_an_input_changed(model: Any, x: torch.Tensor) -> object:
    model.yes.view(1).expand_as(x[0, :1]).logical_and_(x[0, :1] > 0)
    return model.yes


def _changed_after(model: Any, x: torch.Tensor) -> object:
    found = bool(model.steps > 2)
    model.steps.add_(1)
    return found


def _replaced(model: Any, x: torch.Tensor) -> object:
    model.steps = model.steps + 1
    return model.steps > 3


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("decide", [_changed_in_place, _view_through_an_input_changed, _changed_after, _replaced])
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


def _made_and_changed(model: Any, x: torch.Tensor) -> object:
    made = torch.zeros(3)
    made[0] = x.sum()
    return made.any()


def _view_of_what_is_made_changed(model: Any, x: torch.Tensor) -> object:
    made = torch.zeros(3)
    made.expand(2, 3)[0].add_(x.sum())
    return made.any()


def _view_of_what_is_filled(model: Any, x: torch.Tensor) -> object:
    made = torch.zeros(3)
    view = made[1:]
    made[1] = 1.0
    return view.any()


def _own_numbers_replaced_in_part(model: Any, x: torch.Tensor) -> object:
    steps = model.steps + torch.arange(2)
    steps[0] = 0
    return steps.sum() > 3


def _made_of_an_input(model: Any, x: torch.Tensor) -> object:
    return torch.full((2,), x.sum().item()).any()


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
        _made_and_changed,
        _view_of_what_is_made_changed,
        _view_of_what_is_filled,
        _own_numbers_replaced_in_part,
        _made_of_an_input,
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


def test_a_model_that_calls_itself_is_not_asked_what_it_has_put_in_the_place_of_its_own_by_then() -> None:
    class Again(Asking):
        def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
            if again:
                own, self.yes = self.yes, self.yes & (x.sum() > 0)
                answer: torch.Tensor = self(x, False)
                self.yes = own
                return answer
            return torch.relu(x) if self.yes else torch.sigmoid(x)

    with pytest.raises(UnsupportedGraph, match="a value decides what runs next"):
        capture(Again(bool).eval(), (X,))


def test_what_is_too_large_to_be_compared_at_load_decides_nothing() -> None:
    model = Asking(lambda model, x: model.many.any()).eval()
    model.register_buffer("many", torch.ones(2**16 + 1))
    with pytest.raises(UnsupportedGraph, match="a value decides what runs next"):
        capture(model, (X,))


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
