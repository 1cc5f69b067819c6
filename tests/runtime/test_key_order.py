"""Dictionaries whose keys come in another order than in tuning: the schedule runs where the model goes by the keys, and nowhere else."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosched.core.errors import InputMismatch
from autosched.runtime import key_order
from autosched.runtime.guard import FallbackWarning, LoadedModel
from autosched.runtime.load import load
from tests.conformance.stateful import bundle_bytes


class ByKey(nn.Module):
    """Looks features up by name; an attribute has it go through them in their order as well."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)
        self.in_order = False
        self.ran = 0

    def forward(self, features: dict[str, Tensor], more: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        self.ran += 1
        first = next(iter(features.values())) if self.in_order else features["a"]
        return {"sum": self.one(first) + self.two(features["b"]), "more": more[0]["x"] - more[0]["y"]}


class InTheirOrder(nn.Module):
    """Goes through the features; its last layer is all zeros, so that no answer shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))
        self.head = nn.Linear(3, 2, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        made = [layer(feature) for layer, feature in zip(self.layers, features.values(), strict=True)]
        answer: Tensor = self.head(made[0] - made[1])
        return answer


class NamesThem(nn.Module):
    """Computes the same in any order, and answers in the order of the call."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {"a": torch.relu(features["a"]), "b": torch.tanh(features["b"])}
        return {name: made[name] for name in features}


class GivesPlaces(nn.Module):
    """What it computes depends on the order through a number that it makes a tensor of."""

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return features["a"] + features["b"] * torch.tensor(float(list(features).index("b")))


def _features() -> dict[str, Tensor]:
    return {"a": torch.randn(2, 4), "b": torch.randn(2, 4)}


def _call() -> tuple[Any, ...]:
    return _features(), [{"x": torch.randn(2), "y": torch.randn(2)}]


def _turned(item: Any) -> Any:
    if isinstance(item, dict):
        return {name: _turned(item[name]) for name in reversed(item)}
    return type(item)(map(_turned, item)) if isinstance(item, (list, tuple)) else item


def _loaded(model: nn.Module, args: tuple[Any, ...], **options: Any) -> LoadedModel:
    return load(bundle_bytes(model.eval(), args), model, **options)


def _agrees(fast: LoadedModel, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    with torch.no_grad():
        got, wanted = fast(*args, **(kwargs or {})), model(*args, **(kwargs or {}))
    assert type(got) is type(wanted)
    if isinstance(wanted, dict):
        assert list(got) == list(wanted)
        got, wanted = list(got.values()), list(wanted.values())
    torch.testing.assert_close(got, wanted)


def test_another_order_of_keys_runs_the_schedule_and_is_tried_once() -> None:
    model = ByKey()
    fast = _loaded(model, _call(), strict=True)
    _agrees(fast, model, _turned(_call()))
    ran = model.ran
    for _ in range(3):
        with torch.no_grad():
            fast(*_turned(_call()))
    assert model.ran == ran
    assert fast.report().calls == 4
    features, more = _call()
    _agrees(fast, model, (features, _turned(more)))
    _agrees(fast, model, (), {"more": more, "features": _turned(features)})
    assert fast.report().calls == 6


@pytest.mark.parametrize("kind", [InTheirOrder, NamesThem, GivesPlaces])
def test_a_model_that_goes_by_the_order_runs_as_it_came(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    fast = _loaded(model, (_features(),))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    _agrees(fast, model, (_features(),))
    with pytest.warns(FallbackWarning, match="keys in the order 'b', 'a'; the schedule was made for 'a', 'b'"):
        _agrees(fast, model, _turned((_features(),)))
    assert fast.report().calls == 1


def test_what_was_seen_of_a_model_is_forgotten_when_it_is_changed() -> None:
    model = ByKey()
    fast = _loaded(model, _call())
    _agrees(fast, model, _turned(_call()))
    model.in_order = True
    with pytest.warns(FallbackWarning, match="keys in the order"):
        _agrees(fast, model, _turned(_call()))
    _agrees(fast, model, _call())
    model.in_order = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _agrees(fast, model, _turned(_call()))
    assert fast.report().calls == 3


def test_in_the_models_place_the_trial_runs_the_model() -> None:
    model = ByKey()
    fast = _loaded(model, _call(), strict=True)
    model.forward = fast  # type: ignore[method-assign]
    call = _turned(_call())
    with torch.no_grad():
        got = model(*call)
    del model.forward
    with torch.no_grad():
        torch.testing.assert_close(got["sum"], model(*call)["sum"])
    assert fast.report().calls == 1


def test_other_keys_are_another_call() -> None:
    model = ByKey()
    fast = _loaded(model, _call(), strict=True)
    features, more = _call()
    with pytest.raises(InputMismatch, match="has the key 'c', which the schedule was not made for"), torch.no_grad():
        fast({**features, "c": features["a"]}, more)
    with pytest.raises(InputMismatch, match="lacks the key 'b'"), torch.no_grad():
        fast({"a": features["a"]}, more)


def test_orders_without_end_are_not_tried_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_order, "_MOST_TRIED", 1)
    model = ByKey()
    fast = _loaded(model, _call())
    features, more = _call()
    _agrees(fast, model, (_turned(features), more))
    ran = model.ran
    with pytest.warns(FallbackWarning, match="keys in the order"), torch.no_grad():
        fast(features, _turned(more))
    assert model.ran == ran + 1
    _agrees(fast, model, (_turned(features), more))
    assert fast.report().calls == 2


def test_an_order_is_tried_anew_for_each_model_and_those_before_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server puts new weights in place again and again."""
    monkeypatch.setattr(key_order, "_MOST_TRIED", 1)
    model = ByKey()
    fast = _loaded(model, _call(), strict=True)
    for _ in range(3):
        model.one.weight = nn.Parameter(torch.randn(3, 4))
        _agrees(fast, model, _turned(_call()))
    assert fast.report().calls == 3


def test_weights_that_were_replaced_are_not_held_for_an_order() -> None:
    model = ByKey()
    fast = _loaded(model, _call(), strict=True)
    _agrees(fast, model, _turned(_call()))
    former = weakref.ref(model.one.weight)
    model.one.weight = nn.Parameter(torch.randn(3, 4))
    _agrees(fast, model, _call())
    gc.collect()
    assert former() is None


class Doubled(nn.Linear):
    """Computes something else with weights of the same names."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2.0


@pytest.mark.parametrize("prepare", ["all", "first-use"])
def test_a_schedule_that_does_not_fit_is_given_up_by_a_call_in_another_order(prepare: Any) -> None:
    """And not made ready at each such call."""
    model = ByKey()
    fast = _loaded(model, _call(), prepare=prepare)
    model.two = Doubled(4, 3).eval()
    with pytest.warns(FallbackWarning, match=r"outputs differ from the model's|calls other operators than before"), torch.no_grad():
        fast(*_turned(_call()))
    assert not fast.report().scheduled
    ran = model.ran
    with torch.no_grad():
        fast(*_turned(_call()))
    assert model.ran == ran + 1
    assert sum(calls for _, calls in fast.report().stepped_aside) == 2
