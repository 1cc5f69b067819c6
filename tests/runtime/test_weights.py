"""A watch sees at the next look what a schedule would read stale, and says of every model what a look at all of it would say."""

from __future__ import annotations

from collections import OrderedDict, UserList
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autosched.runtime import dict_counts, weights
from autosched.runtime.native.watch import can_watch, native_watch
from autosched.runtime.weights import Change, ModelWatch
from tests.conformance.graphs import TwoBranches, two_branches_program


class Configuration:
    """What libraries keep settings in."""

    def __init__(self) -> None:
        self.verbose = False
        self.names = ["first"]
        self.nested = SimpleNamespace(rate=0.1)


class AttributeDict(dict[str, float]):
    """What others keep them in."""

    __setattr__ = dict.__setitem__


class Rates:
    """And others."""

    __slots__ = ("first",)

    def __init__(self) -> None:
        self.first = 1.0


class Watched(TwoBranches):
    """A model that has something of every kind that is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.mask = torch.ones(8)
        self.merged: list[str] = ["first"]
        self.scaling = {"first": 1.0}
        self.options: dict[str, float] = {}
        self.active = {"first"}
        self.rates = (Rates(), torch.ones(64))
        self.table = AttributeDict(rate=0.1)
        self.hidden = [torch.nn.Linear(8, 8)]
        self.config = Configuration()
        self.inner = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.ReLU())
        self.norm = torch.nn.LayerNorm(8)
        self.lstm = torch.nn.LSTM(2, 2)
        self.register_buffer("unread", torch.zeros(2))
        self.plain = torch.nn.Linear(8, 8, bias=False)
        # Nobody calls it; its weights have a second name here.
        self.tied = torch.nn.Linear(8, 8)
        self.tied.weight = self.right.weight
        self.tied.register_buffer("offset", self.offset)
        self.right.register_forward_hook(_unchanged)


class Doubling(torch.nn.Linear):
    """Another class for a linear layer."""


def _unchanged(module: torch.nn.Module, args: object, output: object) -> object:
    return output


def _hook_instead_of_another(model: Watched) -> None:
    key = next(iter(model.right._forward_hooks))
    model.right._forward_hooks[key] = lambda module, args, output: output


def _made_anew_and(model: Watched, change: Callable[[], object]) -> None:
    model.merged = list(model.merged)
    change()


def _renamed(model: Watched) -> None:
    model._modules["renamed"] = model._modules.pop("right")


def _order_changed(model: Watched) -> None:
    model._modules["left"] = model._modules.pop("left")


def _other() -> torch.nn.Linear:
    return torch.nn.Linear(8, 8).eval()


def _in_place(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1.0)


def _put(table: dict[str, object], key: str, value: object) -> None:
    table[key] = value


def _set_item(items: list[str], item: str) -> None:
    items[0] = item


def _another(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.detach().clone())


def _stepped(parameters: Iterable[torch.nn.Parameter], **options: bool) -> None:
    parameters = list(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(parameters, lr=0.1, **options).step()


_CHANGES: dict[str, tuple[Callable[[Watched], object], Change]] = {
    "train, one module": (lambda model: model.left.train(), Change.MODE),
    "train, a module without weights": (lambda model: model.inner[0].train(), Change.MODE),
    "train, past nn.Module": (lambda model: _put(model.right.__dict__, "training", True), Change.MODE),
    "no mode": (lambda model: model.left.__dict__.pop("training"), Change.MODE),
    "hook": (lambda model: model.left.register_forward_hook(_unchanged), Change.HOOKS),
    "hook, before": (lambda model: model.inner[1].register_forward_pre_hook(lambda module, args: None), Change.HOOKS),
    "hook, past nn.Module": (lambda model: _put(model.left._forward_hooks, 7, _unchanged), Change.HOOKS),
    "hook, another one": (_hook_instead_of_another, Change.HOOKS),
    "hook, one more": (lambda model: model.right.register_forward_hook(_unchanged), Change.HOOKS),
    "hooks, all at once": (lambda model: setattr(model.left, "_forward_hooks", OrderedDict({7: _unchanged})), Change.HOOKS),
    "hooks, before, all at once": (lambda model: setattr(model, "_forward_pre_hooks", OrderedDict()), Change.HOOKS),
    "hooks, none left": (lambda model: model.right._forward_hooks.clear(), Change.HOOKS),
    "module replaced": (lambda model: setattr(model, "left", torch.nn.Linear(8, 8).eval()), Change.STRUCTURE),
    "module replaced, in a container": (lambda model: _put(model.inner._modules, "1", torch.nn.ReLU().eval()), Change.STRUCTURE),
    "module added": (lambda model: model.add_module("new", torch.nn.Tanh().eval()), Change.STRUCTURE),
    "module added where there was none": (lambda model: model.left.add_module("new", torch.nn.Tanh().eval()), Change.STRUCTURE),
    "module removed": (lambda model: delattr(model, "inner"), Change.STRUCTURE),
    "modules removed": (lambda model: model._modules.clear(), Change.STRUCTURE),
    "modules, all at once": (lambda model: setattr(model, "_modules", dict(model._modules)), Change.STRUCTURE),
    "modules, all at once, where there was none": (lambda model: setattr(model.left, "_modules", {"new": model.right}), Change.STRUCTURE),
    "module renamed": (_renamed, Change.STRUCTURE),
    "modules in another order": (_order_changed, Change.STRUCTURE),
    "class": (lambda model: setattr(model.left, "__class__", Doubling), Change.STRUCTURE),
    "forward of an instance": (lambda model: setattr(model.left, "forward", model.right.forward), Change.STRUCTURE),
    "attribute of PyTorch's own module added": (lambda model: setattr(model.inner[0], "new", 1), Change.STRUCTURE),
    "setting of PyTorch's own module": (lambda model: setattr(model.norm, "eps", 0.5), Change.STRUCTURE),
    "setting of PyTorch's own, past nn.Module": (lambda model: _put(model.norm.__dict__, "normalized_shape", (2,)), Change.STRUCTURE),
    "what PyTorch's own module makes anew": (lambda model: model.lstm.flatten_parameters(), Change.NONE),
    "moved to where it is": (lambda model: model.to("cpu").float(), Change.NONE),
    "attributes, all at once": (lambda model: setattr(model, "__dict__", dict(model.__dict__)), Change.STRUCTURE),
    "attributes, all at once, of PyTorch's own": (lambda model: setattr(model.left, "__dict__", _other().__dict__), Change.STRUCTURE),
    "attribute added where one was removed": (lambda model: _put(model.__dict__, "new", model.__dict__.pop("scale")), Change.STRUCTURE),
    "attribute removed, past nn.Module": (lambda model: object.__delattr__(model, "scale"), Change.STRUCTURE),
    "attribute removed": (lambda model: delattr(model, "scale"), Change.STRUCTURE),
    "number": (lambda model: setattr(model, "scale", 2.0), Change.STRUCTURE),
    "list, longer": (lambda model: model.merged.append("second"), Change.STRUCTURE),
    "list, shorter": (lambda model: model.merged.pop(), Change.STRUCTURE),
    "list, another item": (lambda model: _set_item(model.merged, "other"), Change.STRUCTURE),
    "list, another order": (lambda model: (model.merged.append("second"), model.merged.reverse(), model.merged.pop()), Change.STRUCTURE),
    "list, written and as it was": (lambda model: _set_item(model.merged, model.merged[0]), Change.NONE),
    "list, elsewhere": (lambda model: (model.merged.extend(["more"] * 99), model.merged.__delitem__(slice(1, None))), Change.NONE),
    "configuration": (lambda model: setattr(model.config, "verbose", True), Change.STRUCTURE),
    "configuration, more": (lambda model: setattr(model.config, "new", 1), Change.STRUCTURE),
    "configuration, less": (lambda model: delattr(model.config, "verbose"), Change.STRUCTURE),
    "configuration, a list": (lambda model: model.config.names.append("second"), Change.STRUCTURE),
    "configuration, in it": (lambda model: setattr(model.config.nested, "rate", 0.2), Change.STRUCTURE),
    "configuration, another one": (lambda model: setattr(model, "config", Configuration()), Change.STRUCTURE),
    "list, another one": (lambda model: setattr(model, "merged", ["other"]), Change.STRUCTURE),
    "list, another one, of another class": (lambda model: setattr(model, "merged", UserList(["first"])), Change.STRUCTURE),
    "list, made anew, and an attribute": (lambda model: _made_anew_and(model, lambda: setattr(model, "new", 1)), Change.STRUCTURE),
    "list, made anew, and a number": (lambda model: _made_anew_and(model, lambda: setattr(model, "scale", 2.0)), Change.STRUCTURE),
    "list, made anew, and a setting": (lambda model: _made_anew_and(model, lambda: setattr(model.config, "new", 1)), Change.STRUCTURE),
    "list, made anew, and a module": (lambda model: _made_anew_and(model, lambda: setattr(model, "left", _other())), Change.STRUCTURE),
    "list, made anew, and a weight": (lambda model: _made_anew_and(model, lambda: _in_place(model.offset)), Change.CONTENT),
    "list, made anew, and the mode": (lambda model: _made_anew_and(model, model.train), Change.MODE),
    "list, made anew": (lambda model: setattr(model, "merged", ["first"]), Change.NONE),
    "list, made anew, of a module": (lambda model: setattr(model, "hidden", list(model.hidden)), Change.NONE),
    "dictionary, another value": (lambda model: _put(model.scaling, "first", 2.0), Change.STRUCTURE),
    "dictionary, one more": (lambda model: model.scaling.update(second=1.0), Change.STRUCTURE),
    "dictionary, one less": (lambda model: model.scaling.clear(), Change.STRUCTURE),
    "dictionary, no longer empty": (lambda model: model.options.update(first=1.0), Change.STRUCTURE),
    "dictionary, written and as it was": (lambda model: _put(model.scaling, "first", model.scaling["first"]), Change.NONE),
    "dictionary of a class of its own": (lambda model: setattr(model.table, "rate", 0.2), Change.STRUCTURE),
    "set": (lambda model: model.active.add("second"), Change.STRUCTURE),
    "slot": (lambda model: setattr(model.rates[0], "first", 2.0), Change.STRUCTURE),
    "slot, the same again": (lambda model: setattr(model.rates[0], "first", model.rates[0].first), Change.NONE),
    "tensor in a tuple, in place": (lambda model: _in_place(model.rates[1]), Change.STRUCTURE),
    "tensor in a tuple, past all counts": (lambda model: model.rates[1].data.mul_(2.0), Change.STRUCTURE),
    "module in a list, replaced": (lambda model: model.hidden.__setitem__(0, _other()), Change.STRUCTURE),
    "module in a list, its weight in place": (lambda model: _in_place(model.hidden[0].weight), Change.STRUCTURE),
    "module in a list, its weight replaced": (lambda model: setattr(model.hidden[0], "weight", model.tied.weight), Change.STRUCTURE),
    "tensor that is an attribute": (lambda model: setattr(model, "mask", torch.ones(8)), Change.STRUCTURE),
    "tensor that is an attribute, in place": (lambda model: _in_place(model.mask), Change.STRUCTURE),
    "tensor that is an attribute, other memory": (lambda model: setattr(model.mask, "data", torch.zeros(8)), Change.STRUCTURE),
    "tensor that is an attribute, swapped": (lambda model: torch.utils.swap_tensors(model.mask, torch.zeros(8)), Change.STRUCTURE),
    "parameters, all at once": (lambda model: setattr(model.left, "_parameters", _other()._parameters), Change.STRUCTURE),
    "buffers, all at once": (lambda model: setattr(model, "_buffers", dict(model._buffers)), Change.STRUCTURE),
    "parameter replaced": (lambda model: setattr(model.left, "weight", _another(model.left.weight)), Change.STRUCTURE),
    "parameter, no longer there": (lambda model: setattr(model.left, "bias", None), Change.STRUCTURE),
    "parameters removed": (lambda model: model.left._parameters.clear(), Change.STRUCTURE),
    "buffer replaced": (lambda model: setattr(model, "offset", torch.ones(8)), Change.STRUCTURE),
    "tied, under its other name": (lambda model: setattr(model.tied, "weight", _another(model.tied.weight)), Change.STRUCTURE),
    "tied, not there under its other name": (lambda model: model.tied._buffers.pop("offset"), Change.STRUCTURE),
    "tied, all at once": (lambda model: setattr(model.tied, "_parameters", _other()._parameters), Change.STRUCTURE),
    "neighbour of a tied one replaced": (lambda model: setattr(model.tied, "bias", _another(model.tied.bias)), Change.NONE),
    "assigned": (lambda model: model.load_state_dict(Watched().state_dict(), assign=True), Change.STRUCTURE),
    "converted, there and back": (lambda model: model.double().float(), Change.STRUCTURE),
    "memory": (lambda model: setattr(model.left.bias, "data", torch.zeros(8)), Change.MOVED),
    "memory, read in another order": (lambda model: setattr(model.left.weight, "data", model.left.weight.data.t()), Change.STRUCTURE),
    "memory, part of it": (lambda model: setattr(model.left.bias, "data", model.left.bias.data[:4]), Change.STRUCTURE),
    "memory, swapped": (lambda model: torch.utils.swap_tensors(model.left.bias, _another(model.left.bias)), Change.MOVED),
    "memory, of the storage": (lambda model: model.left.bias.untyped_storage().resize_(4096), Change.MOVED),
    "parameter in place": (lambda model: _in_place(model.right.weight), Change.CONTENT),
    "buffer in place": (lambda model: _in_place(model.offset), Change.CONTENT),
    "through a view": (lambda model: _in_place(model.left.weight.detach()[0]), Change.CONTENT),
    "past all counts, folded": (lambda model: model.right.weight.data.mul_(2.0), Change.CONTENT),
    "past all counts, with NumPy": (lambda model: model.right.weight.detach().numpy().fill(0.5), Change.CONTENT),
    # A schedule reads it where it is.
    "past all counts, read in place": (lambda model: model.left.weight.data.mul_(2.0), Change.NONE),
    "state loaded": (lambda model: model.load_state_dict(Watched().state_dict()), Change.CONTENT),
    "step of an optimizer": (lambda model: _stepped(model.parameters()), Change.CONTENT),
    # It writes to the parameters past PyTorch's count of changes.
    "step of a fused optimizer": (lambda model: _stepped(model.parameters(), fused=True), Change.CONTENT),
    "step on another model": (lambda model: _stepped(Watched().parameters(), fused=True), Change.NONE),
    "neighbour replaced": (lambda model: setattr(model, "unread", torch.ones(2)), Change.NONE),
    "neighbour of another shape": (lambda model: setattr(model, "unread", torch.ones(3)), Change.STRUCTURE),
    "neighbour, no longer there": (lambda model: setattr(model, "unread", None), Change.STRUCTURE),
    "neighbour added": (lambda model: model.register_buffer("another", torch.ones(2)), Change.STRUCTURE),
    "parameter where there was none": (lambda model: setattr(model.plain, "bias", _another(model.tied.bias)), Change.STRUCTURE),
    "buffer where there were none": (lambda model: model.inner[1].register_buffer("new", torch.ones(2)), Change.STRUCTURE),
    "buffers, all at once, where there were none": (lambda model: setattr(model.inner[1], "_buffers", {"new": None}), Change.STRUCTURE),
    "the same again": (lambda model: setattr(model, "scale", model.scale), Change.NONE),
    "there and back": (lambda model: model.train().eval(), Change.NONE),
}  # fmt: skip


@pytest.fixture
def model() -> Watched:
    return Watched().eval()


@pytest.fixture(params=["native", "counted", "looked at"])
def watch(request: pytest.FixtureRequest, model: Watched) -> ModelWatch:
    """Of ``model``, with and without what spares it a look at everything."""
    if request.param == "native":
        request.getfixturevalue("native_watches")
    return _watch(model, request.param)


def _watch(model: TwoBranches, way: str, *, frozen: bool = False) -> ModelWatch:
    program = two_branches_program(model)[0]
    with pytest.MonkeyPatch.context() as patch:
        if way == "native":
            assert can_watch()
        else:
            patch.setattr(weights, "can_watch", lambda: False)
        if way == "looked at":
            patch.setattr(dict_counts, "_reader", lambda: None)
        return ModelWatch(model, program, frozen=frozen)


@pytest.mark.parametrize("name", _CHANGES)
def test_each_change_is_noticed_at_the_next_look_and_at_every_later_one(model: Watched, watch: ModelWatch, name: str) -> None:
    change, kind = _CHANGES[name]
    assert [watch.change() for _ in range(3)] == [Change.NONE] * 3
    change(model)
    assert [watch.change(), watch.change(), watch.change()] == [kind] * 3


def test_a_list_made_anew_is_watched_from_then_on(model: Watched, watch: ModelWatch) -> None:
    before = model.merged
    for _ in range(4):
        model.merged = list(model.merged)
        assert watch.change() is Change.NONE
    # Enough for the next look to be the short one.
    assert [watch.change() for _ in range(3)] == [Change.NONE] * 3
    before.append("second")
    assert watch.change() is Change.NONE
    model.merged[0] = "other"
    assert [watch.change() for _ in range(2)] == [Change.STRUCTURE] * 2


@pytest.mark.parametrize("name", _CHANGES)
def test_a_change_is_noticed_beside_one_that_is_none(model: Watched, watch: ModelWatch, name: str) -> None:
    change, kind = _CHANGES[name]
    model.unread = torch.ones(2)
    assert watch.change() is Change.NONE
    model.unread = torch.zeros(2)
    change(model)
    assert watch.change() is kind


# It changes nothing between examples.
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(sorted(_CHANGES)), st.integers(0, 3)), min_size=1, max_size=6), st.booleans())
def test_all_ways_of_looking_say_the_same(native: None, steps: list[tuple[str, int]], frozen: bool) -> None:
    model = Watched().eval()
    # Where there is no native watch, the others are compared.
    ways = ("native", "counted", "looked at")[not can_watch() :]
    watches = [_watch(model, way, frozen=frozen) for way in ways]
    for name, looks in steps:
        # What an earlier step took away is not there to be changed.
        with suppress(AttributeError, LookupError, StopIteration, RuntimeError, TypeError):
            _CHANGES[name][0](model)
        for _ in range(looks):
            assert len({watch.change() for watch in watches}) == 1
    assert len({watch.change() for watch in watches}) == 1


def test_a_hook_of_all_modules_is_noticed(watch: ModelWatch) -> None:
    assert watch.change() is Change.NONE
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: None)
    try:
        assert watch.change() is Change.HOOKS
    finally:
        handle.remove()
    assert watch.change() is Change.NONE


def test_what_was_undone_is_no_change(model: Watched, watch: ModelWatch) -> None:
    model.right.train()
    assert watch.change() is Change.MODE
    model.eval()
    assert watch.change() is Change.NONE
    handle = model.left.register_forward_pre_hook(lambda module, args: None)
    assert watch.change() is Change.HOOKS
    handle.remove()
    assert watch.change() is Change.NONE
    _renamed(model)
    assert watch.change() is Change.STRUCTURE
    model._modules["right"] = model._modules.pop("renamed")
    # It is the last now, and was not.
    assert watch.change() is Change.STRUCTURE
    for name in ("inner", "norm", "lstm", "plain", "tied"):
        model._modules[name] = model._modules.pop(name)
    assert watch.change() is Change.NONE


def test_what_was_accepted_is_no_change(model: Watched, watch: ModelWatch) -> None:
    _in_place(model.offset)
    model.left.bias.data = torch.zeros(8)
    assert watch.change() is Change.MOVED
    watch.accept()
    assert watch.change() is Change.NONE
    _in_place(model.left.bias)
    assert watch.change() is Change.CONTENT


def test_what_a_forward_sets_is_watched_no_longer_and_all_else_is(model: Watched, watch: ModelWatch) -> None:
    model.scale = 3.0
    assert watch.renew()
    assert watch.change() is Change.NONE
    model.scale = 3.5
    watch.settle()
    assert watch.change() is Change.NONE
    model.scale = 4.0
    assert watch.change() is Change.NONE
    model.mask = torch.zeros(8)
    assert watch.change() is Change.STRUCTURE


def test_what_a_forward_sets_once_is_watched_like_all_else(model: Watched, watch: ModelWatch) -> None:
    model.scale = 3.0
    model.added = 1.0  # type: ignore[assignment]
    assert watch.renew()
    watch.settle()
    assert not watch.renew()
    for name in ("scale", "added"):
        before = getattr(model, name)
        setattr(model, name, 4.0)
        assert watch.change() is Change.STRUCTURE
        setattr(model, name, before)
        assert watch.change() is Change.NONE


def test_what_a_forward_sets_for_each_of_several_shapes_is_watched_until_it_was_changed_in_vain_three_times(
    model: Watched, watch: ModelWatch
) -> None:
    model.scale = 3.0
    assert watch.renew()
    watch.settle()
    for count in range(3):
        model.scale = float(count)
        assert watch.change() is Change.STRUCTURE
        anew = _like(watch, model)
        anew.learn(watch)
        watch = anew
    model.scale = 9.0
    assert watch.change() is Change.NONE
    model.first = 9.0
    assert watch.change() is Change.STRUCTURE


@pytest.mark.parametrize("way", ["native", "counted"])
@pytest.mark.parametrize("name", _CHANGES)
def test_of_a_frozen_model_modes_and_hooks_alone_are_looked_at(request: pytest.FixtureRequest, model: Watched, name: str, way: str) -> None:
    if way == "native":
        request.getfixturevalue("native_watches")
    change, kind = _CHANGES[name]
    watch = _watch(model, way, frozen=True)
    assert [watch.change() for _ in range(2)] == [Change.NONE] * 2
    change(model)
    assert watch.change() is (kind if kind in (Change.MODE, Change.HOOKS) else Change.NONE)


def test_a_model_that_is_left_alone_is_not_looked_at_again(model: Watched, native_watches: None, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = _watch(model, "native")
    looks: list[None] = []
    look = watch._look
    monkeypatch.setattr(watch, "_look", lambda: looks.append(None) or look())
    assert [watch.change() for _ in range(5)] == [Change.NONE] * 5
    assert len(looks) == 1
    model.unread = torch.ones(2)
    assert watch.change() is Change.NONE
    assert len(looks) == 2
    for _ in range(5):
        watch.change()
    assert len(looks) == 4


def test_a_model_that_is_written_to_between_all_calls_is_seldom_watched_anew(
    model: Watched, native_watches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = _watch(model, "native")
    begun: list[None] = []
    monkeypatch.setattr(weights, "native_watch", lambda watched: begun.append(None) or native_watch(watched))
    for _ in range(12):
        assert watch.change() is Change.NONE
        model.unread = torch.ones(2)
    assert len(begun) == 4


def test_what_a_model_writes_to_its_own_lists_and_dictionaries_is_nothing_to_watch(model: Watched, watch: ModelWatch) -> None:
    model.merged.append("a call")
    model.scaling["calls"] = 1.0
    assert watch.renew()
    assert watch.change() is Change.NONE
    model.merged.append("another call")
    model.scaling["calls"] = 1.5
    watch.settle()
    assert watch.change() is Change.NONE
    model.merged.append("another")
    model.scaling["calls"] = 2.0
    assert watch.change() is Change.NONE
    model.options["first"] = 1.0
    assert watch.change() is Change.STRUCTURE


def test_a_number_that_is_set_again_to_what_it_is_is_no_change(model: Watched, watch: ModelWatch) -> None:
    for _ in range(3):
        model.scale = model.scaling["first"] = float("1.0")
        assert watch.change() is Change.NONE
    model.scale = 0.5
    assert watch.change() is Change.STRUCTURE


def test_what_was_changed_in_vain_three_times_is_watched_no_longer_and_all_else_is(model: Watched, watch: ModelWatch) -> None:
    for count in range(3):
        model.config.calls = count
        assert watch.change() is Change.STRUCTURE
        anew = _like(watch, model)
        anew.learn(watch)
        watch = anew
        assert watch.change() is Change.NONE
    model.config.calls = 4
    model.config.nested.rate = 0.5
    assert watch.change() is Change.STRUCTURE
    anew = _like(watch, model)
    anew.learn(watch)
    model.config.calls = 5
    assert anew.change() is Change.NONE
    model.config.nested.rate = 0.7
    assert anew.change() is Change.STRUCTURE


def _like(watch: ModelWatch, model: Watched) -> ModelWatch:
    """Made anew of the model as it is now."""
    return _watch(model, "native" if watch._watchable else "counted" if watch._counts._read else "looked at")
