"""Changes after load of what a comparison on random inputs need not show, or of what forward itself has set, are never missed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from autosched.core.errors import IncompatibleArtifact
from autosched.runtime.guard import FallbackWarning, LoadedModel
from autosched.runtime.load import load
from tests.conformance.stateful import Rotary
from tests.runtime.test_guard_models import _encoded


class Limited(nn.Module):
    """Its limit, as a number and as a tensor, is beyond any input that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.activation: nn.Module = nn.ReLU()
        self.limit = 100.0
        self.limits = torch.full((8,), 100.0)
        self.note = "first"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.activation(self.layer(x))
        return made.clamp(max=self.limit).minimum(self.limits)


_BEYOND: dict[str, Callable[[Limited], object]] = {
    "module": lambda model: setattr(model, "activation", nn.ReLU6().eval()),
    "number": lambda model: setattr(model, "limit", 20.0),
    "tensor": lambda model: setattr(model, "limits", torch.full((8,), 20.0)),
    "tensor in place": lambda model: model.limits.fill_(20.0),
}


@pytest.mark.parametrize("name", _BEYOND)
def test_another_limit_is_honoured_although_no_random_input_reaches_it(name: str) -> None:
    model, x = Limited().eval(), torch.randn(4, 8)
    loaded = load(_encoded(model, x), model, strict=True)
    _BEYOND[name](model)
    with pytest.raises(IncompatibleArtifact, match="other operators than before"):
        loaded(x)
    assert not loaded.report().scheduled


def test_what_changes_nothing_of_what_is_called_keeps_the_schedule() -> None:
    model, x = Limited().eval(), torch.randn(4, 8)
    loaded = load(_encoded(model, x), model, strict=True)
    model.note = "second"
    assert _agrees(loaded, model, x)
    model.activation = nn.ReLU().eval()
    assert _agrees(loaded, model, x)
    model.layer = nn.Linear(8, 8).eval()
    assert _agrees(loaded, model, x)
    assert loaded.report().calls == 3


class Masked(nn.Module):
    """What it could have and has not: a bias, a mask, and a buffer of a module that has none."""

    mask: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)
        self.activation = nn.ReLU()
        self.register_buffer("mask", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.activation(self.layer(x))
        shift = getattr(self.activation, "shift", None)
        made = made if shift is None else made + shift
        return made if self.mask is None else made * self.mask


_GIVEN: dict[str, Callable[[Masked], object]] = {
    "bias": lambda model: setattr(model.layer, "bias", nn.Parameter(torch.ones(8))),
    "mask": lambda model: setattr(model, "mask", torch.zeros(8)),
    "buffer": lambda model: model.activation.register_buffer("shift", torch.ones(8)),
}


@pytest.mark.parametrize("name", _GIVEN)
def test_a_tensor_where_there_was_none_is_used(name: str) -> None:
    model, x = Masked().eval(), torch.randn(4, 8)
    loaded = load(_encoded(model, x), model, strict=True)
    assert _agrees(loaded, model, x)
    _GIVEN[name](model)
    with pytest.raises(IncompatibleArtifact, match="outputs differ"):
        loaded(x)


class Remembering(nn.Module):
    """Has its state beside what it could have and has not."""

    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("state", torch.zeros(4, 8))
        self.register_buffer("mask", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x) + (self.state if self.state.shape == x.shape else 0.0)
        self.state = made
        return made * 2


def test_state_of_another_shape_is_no_other_model() -> None:
    model, x = Remembering().eval(), torch.randn(4, 8)
    loaded = load(_encoded(model, x), model)
    with torch.no_grad(), pytest.warns(FallbackWarning, match="made for"):
        _ = [loaded(given) for given in (x, x[:3], x, x)]
    assert loaded.report().calls == 2
    assert loaded.report().scheduled


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_mode_that_a_call_is_made_in_is_no_change_of_what_is_called(mode: Callable[[], Any]) -> None:
    model, x = Limited().eval(), torch.randn(4, 8)
    loaded = load(_encoded(model, x), model, strict=True)
    with mode(), torch.no_grad():
        model.note = "second"
        assert _agrees(loaded, model, x)
    model.note = "third"
    assert _agrees(loaded, model, x)
    assert loaded.report().calls == 2


class OfPyTorch(nn.Module):
    """PyTorch's own modules, with attributes that it did not give them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.scale = torch.ones(8)
        plain = self.layer.forward
        self.layer.forward = lambda x: plain(x) * self.layer.scale  # type: ignore[method-assign,operator,assignment]
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation=torch.tanh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.encoder(self.layer(x))
        return made


_OF_PYTORCH: dict[str, Callable[[Any], object]] = {
    "forward": lambda model: setattr(model.layer, "forward", torch.tanh),
    "activation": lambda model: setattr(model.encoder, "activation", nn.functional.silu),
    "tensor in place": lambda model: model.layer.scale.mul_(3.0),
    "tensor": lambda model: setattr(model.layer, "scale", torch.full((8,), 3.0)),
}


@pytest.mark.parametrize("name", _OF_PYTORCH)
def test_attributes_of_pytorchs_own_modules_are_watched(name: str) -> None:
    model, x = OfPyTorch().eval(), torch.randn(4, 3, 8)
    loaded = load(_encoded(model, x), model, strict=True)
    assert _agrees(loaded, model, x)
    _OF_PYTORCH[name](model)
    with pytest.raises(IncompatibleArtifact, match="outputs differ"):
        loaded(x)


def test_what_pytorch_makes_anew_by_itself_is_no_change() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 8, batch_first=True)
            self.layer = nn.utils.weight_norm(nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.layer(self.rnn(x)[0])
            return made

    model, x = Normed().eval(), torch.randn(2, 3, 8)
    loaded = load(_encoded(model, x), model, strict=True)
    assert _agrees(loaded, model, x)
    slot = loaded._table.slots[0] if loaded._table is not None else None
    assert slot is not None
    assert slot.prepared is not None
    runner = slot.prepared.runner
    for _ in range(3):
        model.rnn._flat_weights = list(model.rnn._flat_weights)
        assert _agrees(loaded, model, x)
    assert slot.prepared.runner is runner


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scale: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = 2.0
        made: torch.Tensor = self.layer(x) * self.scale
        return made


def test_what_forward_has_set_once_is_watched_from_then_on() -> None:
    model, x = Lazy().eval(), torch.randn(4, 8)
    data = _encoded(model, x)
    assert model.scale is None
    loaded = load(data, model, strict=True)
    assert _agrees(loaded, model, x)
    model.scale = 30.0
    with pytest.raises(IncompatibleArtifact, match="outputs differ"):
        loaded(x)


class Steps(nn.Module):
    """Its first call of a sequence leaves what the others read."""

    def __init__(self, *, in_a_list: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.h: torch.Tensor | None = None
        self.seen: list[torch.Tensor] = []
        self.in_a_list = in_a_list

    def forward(self, x: torch.Tensor, first: bool = True) -> torch.Tensor:
        if first:
            h: torch.Tensor = self.layer(x)
            if self.in_a_list:
                self.seen.append(h)
            else:
                self.h = h
            return h.relu()
        held = self.seen[-1] if self.in_a_list else self.h
        assert held is not None
        return held + x


@pytest.mark.parametrize("in_a_list", [False, True])
def test_what_one_form_of_call_leaves_for_another_is_refused_and_what_was_left_before_stays(in_a_list: bool) -> None:
    model, x = Steps(in_a_list=in_a_list).eval(), torch.randn(4, 8)
    data = _encoded(model, x)
    with torch.no_grad():
        model(x)
        expected = model(x, first=False)
        with pytest.raises(IncompatibleArtifact, match=f"attribute {'seen' if in_a_list else 'h'!r}, and the schedule leaves none"):
            load(data, model, strict=True)
        assert torch.equal(model(x, first=False), expected)


def test_a_tensor_that_each_call_makes_alike_is_no_state() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mask = torch.full((x.shape[1],), float("nan")).nan_to_num(2.0)
            return x * self.mask

    model, x = Masked().eval(), torch.randn(4, 8)
    loaded = load(_encoded(model, x), model, strict=True)
    assert _agrees(loaded, model, x)


@pytest.mark.parametrize(
    "hold",
    [
        lambda mean: mean,
        lambda mean: (mean, 1),
        lambda mean: [mean],
        lambda mean: {"mean": (mean,)},
        lambda mean: SimpleNamespace(mean=mean),
    ],
    ids=["tensor", "tuple", "list", "dictionary", "object"],
)
def test_what_is_made_of_the_first_inputs_is_not_taken_for_made_of_each(hold: Callable[[torch.Tensor], Any]) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mean is None:
                self.mean = hold(x.mean())
            return x - _tensor_in(self.mean)

    model, x = First().eval(), torch.randn(4, 8)
    with pytest.raises(IncompatibleArtifact, match="outputs differ"):
        load(_encoded(model, x), model, strict=True)
    assert model.mean is None


def _tensor_in(held: Any) -> torch.Tensor:
    inside = vars(held) if isinstance(held, SimpleNamespace) else held
    leaf: torch.Tensor = pytree.tree_leaves(inside)[0]
    return leaf


class Streaming(nn.Module):
    """What it keeps from call to call has no tensor yet, or no name."""

    kept: torch.Tensor | None

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how != "registered":
            self.register_buffer("kept", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self._buffers.get("kept")
        if self.how == "once":
            self.kept = x.mean() if kept is None else kept
            return x - self.kept
        made = x if kept is None else x + kept
        self.register_buffer("kept", made)
        return made


@pytest.mark.parametrize(
    ("how", "words"),
    [("each time", "changes its buffer 1.kept at each call"), ("registered", "changes its buffer 1.kept"), ("once", "outputs differ")],
)
def test_what_calls_leave_in_a_buffer_that_had_none_is_refused_and_taken_out_again(how: str, words: str) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), Streaming(how)).eval(), torch.randn(4, 8)
    data, began = _encoded(model, x), dict(model[1]._buffers)
    with pytest.raises(IncompatibleArtifact, match=words):
        load(data, model, strict=True)
    assert dict(model[1]._buffers) == began


def test_a_buffer_that_each_call_finds_or_makes_alike_is_no_state() -> None:
    model, x = Rotary().eval(), torch.randn(4, 8)
    loaded = load(_encoded(model, x), model, strict=True)
    assert _agrees(loaded, model, x)
    assert _agrees(loaded, model, x + 1)
    assert loaded.report().calls == 2


def _agrees(loaded: LoadedModel, model: nn.Module, x: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.allclose(loaded(x), model(x), atol=1e-5)


_ADAPTER: dict[str, Callable[[torch.Tensor, dict[str, Any], nn.Module], object]] = {
    "tensor": lambda down, settings, up: down.add_(1),
    "tensor past all counts": lambda down, settings, up: down.data.add_(1),
    "number": lambda down, settings, up: settings.update(scale=3.0),
    "weight of a module": lambda down, settings, up: up.weight.detach().mul_(2),
}


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("name", _ADAPTER)
def test_what_the_function_of_a_hook_uses_is_watched(name: str, *, pre: bool) -> None:
    """An adapter that is nothing but a hook: its weights are no part of the model for PyTorch."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval(), torch.randn(4, 8)
    down, settings, up = torch.randn(8, 2), {"scale": 0.5}, nn.Linear(2, 8, bias=False)
    if pre:
        model[1].register_forward_pre_hook(lambda module, args: (args[0] + settings["scale"] * up(args[0] @ down),))
    else:
        model[0].register_forward_hook(lambda module, args, output: output + settings["scale"] * up(args[0] @ down))
    loaded = load(_encoded(model, x), model)
    assert _agrees(loaded, model, x)
    assert loaded.report().calls == 1
    _ADAPTER[name](down, settings, up)
    with pytest.warns(FallbackWarning, match="outputs differ"):
        assert _agrees(loaded, model, x)


def test_what_a_hook_collects_costs_no_more_than_a_few_comparisons() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(4, 8)
    seen: dict[str, torch.Tensor] = {}
    model[0].register_forward_hook(lambda module, args, output: seen.update(output=output))
    loaded = load(_encoded(model, x), model, strict=True)
    for _ in range(12):
        model(x)
        assert _agrees(loaded, model, x)
    assert loaded.report().calls == 12
