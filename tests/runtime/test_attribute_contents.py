"""What attributes hold is followed as deep as settings are kept, and no further than that."""

from __future__ import annotations

import argparse
import enum
import logging
import threading
import weakref
from array import array
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from autosched.core import attribute_reach
from autosched.runtime.attribute_contents import AttributeContents, Harmless


class Colour(enum.Enum):
    """No configuration."""

    RED = 1


class Slotted:
    """Without a dictionary of attributes."""

    __slots__ = ("x", "y")

    def __init__(self, x: Any) -> None:
        self.x = x


class AttributeDict(dict[str, Any]):
    """A dictionary whose items are attributes, too, as many libraries have one, and which makes up what is missing."""

    __setattr__ = dict.__setitem__

    def __missing__(self, key: str) -> Any:
        self[key] = AttributeDict()
        return self[key]

    def __len__(self) -> int:
        raise AssertionError("nobody asks a class what it makes of a length")


class Listed(list[Any]):
    """A list that says otherwise what is in it."""

    def __len__(self) -> int:
        return 1_000

    def __iter__(self) -> Any:
        raise AssertionError("nobody asks a class what it makes of its items")


class Paired(tuple[Any, ...]):
    """A tuple that is a value to its library (e3nn's representations), and has no length there."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Any:
        raise NotImplementedError


class Holder:
    """With a dictionary of attributes, and whatever else anybody asks for."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return 7

    @classmethod
    def fromkeys(cls) -> None:
        """A method of no object."""


def _in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(64)


def _closing_over(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _unfilled() -> Callable[..., Any]:
    if not __debug__:
        value = 1
    return lambda: value


def _with_default(*, held: list[int] = []) -> tuple[list[int], None]:  # noqa: B006
    return held, None


_of_this_file: dict[str, int] = {}


def _reading_of_its_file() -> dict[str, int]:
    return _of_this_file


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda value: value.append(2)),
        ([1], lambda value: value.__setitem__(0, 2)),
        ([], lambda value: value.append(1)),
        ({}, lambda value: value.update(a=1)),
        ({"a": 1}, lambda value: value.update(a=2)),
        ({"a": 1}, lambda value: value.update(b=1)),
        ({"a": 1}, lambda value: value.clear()),
        ({"a": [1]}, lambda value: value["a"].append(2)),
        ([0] * 10_000, lambda value: value.append(2)),
        (Holder(a=1), lambda value: setattr(value, "a", 2)),
        (Holder(), lambda value: setattr(value, "a", 2)),
        (SimpleNamespace(a=1), lambda value: setattr(value, "a", 2)),
        (argparse.Namespace(a=1), lambda value: setattr(value, "a", 2)),
        (Holder(**{f"a{number}": number for number in range(200)}), lambda value: setattr(value, "a150", None)),
        (Holder(a=[{"b": Holder(c=1)}]), lambda value: setattr(value.a[0]["b"], "c", 2)),
        (AttributeDict(a=1), lambda value: setattr(value, "a", 2)),
        (AttributeDict(a=1), lambda value: value["b"]),
        (AttributeDict(), lambda value: setattr(value, "a", 2)),
        (OrderedDict(a=1), lambda value: value.update(a=2)),
        (defaultdict(list, a=[1]), lambda value: value["a"].append(2)),
        (defaultdict(list, a=[1]), lambda value: value["b"]),
        (Listed([1, 2]), lambda value: value.append(3)),
        (Listed([1, 2]), lambda value: value.__setitem__(1, 3)),
        ({1, 2}, lambda value: value.discard(2)),
        (set(), lambda value: value.add(2)),
        (deque([1, 2], maxlen=2), lambda value: value.append(3)),
        ((1, [2]), lambda value: value[1].append(3)),
        ((Holder(a=1),), lambda value: setattr(value[0], "a", 2)),
        (Paired((1, [2])), lambda value: value[1].append(3)),
        (Slotted(1), lambda value: setattr(value, "x", 2)),
        (Slotted(1), lambda value: setattr(value, "y", 2)),
        (Slotted(Slotted([1])), lambda value: value.x.x.append(2)),
        (Holder(a=1).__getattr__, lambda value: setattr(value.__self__, "a", 2)),
        (torch.ones(64), lambda value: value.add_(1)),
        (torch.ones(64), lambda value: value.data.add_(1)),
        (torch.ones(64), lambda value: setattr(value, "data", torch.zeros(3))),
        ([torch.ones(4)], lambda value: value[0].add_(1)),
        ({"a": (torch.ones(64),)}, lambda value: value["a"][0].numpy().fill(2)),
        (Holder(a=torch.ones(4)), lambda value: value.a.add_(1)),
        (_in_inference_mode(), lambda value: value.numpy().fill(2)),
        (_closing_over(torch.ones(4)), lambda value: value().add_(1)),
        (_closing_over({"a": [1]}), lambda value: value()["a"].append(2)),
        (_closing_over(1), lambda value: setattr(value.__closure__[0], "cell_contents", 2)),
        (_unfilled(), lambda value: setattr(value.__closure__[0], "cell_contents", 2)),
        (partial(_closing_over([1]), key=Holder(a=1)), lambda value: value.func().append(2)),
        (partial(_closing_over([1]), key=Holder(a=1)), lambda value: setattr(value.keywords["key"], "a", 2)),
        (partial(_closing_over([1]), key=1), lambda value: value.keywords.update(key=2)),
        (bytearray(b"ab"), lambda value: value.__setitem__(1, 0)),
        (bytearray(b"ab"), lambda value: value.append(0)),
        (array("f", [1.0, 2.0]), lambda value: value.__setitem__(1, 3.0)),
        (np.zeros((8, 8)), lambda value: value.__setitem__((7, 7), 1.0)),
        (np.zeros((8, 8)).T[::2], lambda value: value.fill(1)),
        (Holder(a={"b": np.ones(3)}), lambda value: value.a["b"].__imul__(2)),
        (UserDict(a=1), lambda value: value.update(a=2)),
        (UserList([1]), lambda value: value.append(2)),
        (ChainMap({"a": 1}), lambda value: value.update(a=2)),
        (MethodType(_closing_over([1]), Holder(a=1)), lambda value: value.__func__().append(2)),
        (_with_default, lambda value: value()[0].append(2)),
        (_reading_of_its_file, lambda value: _of_this_file.update(a=value().get("a", 0) + 1)),
        (_reading_of_its_file, lambda value: value.__globals__.update(_of_this_file=dict(value()))),
    ],
)  # fmt: skip
def test_a_change_is_seen(value: Any, change: Callable[[Any], object]) -> None:
    contents = AttributeContents([3, "x", None, value])
    assert not contents.changed()
    assert contents.different() == set()
    change(value)
    assert contents.changed()
    different = contents.different()
    assert different
    assert not contents.without(different, [value]).changed()
    assert not AttributeContents([value]).changed()


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([0] * 10_000, lambda value: value.__setitem__(3, 1)),
        (dict.fromkeys(range(10_000)), lambda value: value.update(a=1)),
        (torch.ones(2), lambda value: setattr(value, "note", 3)),
        (torch.optim.SGD([torch.ones(2)]), lambda value: setattr(value, "note", 3)),
        (logging.getLogger("autosched.tests.contents"), lambda value: value.isEnabledFor(logging.ERROR)),
        (threading.Thread(), lambda value: setattr(value, "name", "x")),
        (Colour.RED, lambda value: setattr(value, "note", 3)),
        (Holder, lambda value: setattr(value, "note", 3)),
        (set(range(10_000)), lambda value: value.add(-1)),
        (bytearray(10_000), lambda value: value.__setitem__(3, 1)),
        (array("f", [1.0]) * 10_000, lambda value: value.__setitem__(3, 1)),
        (np.zeros(10_000), lambda value: value.__setitem__(3, 1)),
        ((1, "x"), lambda value: None),
        (Holder(a=[[[[Holder(b=1)]]]]), lambda value: setattr(value.a[0][0][0][0], "b", 2)),
    ],
)  # fmt: skip
def test_what_is_no_setting_is_left_alone(value: Any, change: Callable[[Any], object]) -> None:
    contents = AttributeContents([value])
    change(value)
    assert not contents.changed()


def test_no_more_is_watched_than_a_configuration_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribute_reach, "_MOST_CONTAINERS", 3)
    near, far = Holder(a=1, rest=[[number] for number in range(9)]), Holder(a=1)
    last = torch.ones(4)
    contents = AttributeContents([near, far, last])
    assert contents.tables == [near.__dict__, far.__dict__]
    assert contents.lists == [near.rest]
    # A tensor that is itself an attribute is watched in any case.
    last.add_(1)
    assert contents.changed()


_HIDDEN: dict[str, Callable[[torch.nn.Sequential], object]] = {
    "weight in place": lambda module: module[0].weight.detach().add_(1),
    "weight past all counts": lambda module: module[0].weight.data.add_(1),
    "weight replaced": lambda module: setattr(module[0], "weight", torch.nn.Parameter(torch.ones(8, 8))),
    "buffer in place": lambda module: module[1].running_mean.add_(1),
    "mode": lambda module: module.train(),
    "part": lambda module: module.__setitem__(1, torch.nn.Identity()),
    "hook": lambda module: module[0].register_forward_hook(lambda *args: None),
    "attribute": lambda module: setattr(module[1], "eps", 1.0),
    "forward": lambda module: setattr(module[0], "forward", module[1].forward),
}


@pytest.mark.parametrize("name", _HIDDEN)
@pytest.mark.parametrize("hide", [lambda module: [module], lambda module: Holder(a=module), lambda module: module[1].forward])
def test_a_module_that_is_no_part_of_the_model_for_pytorch_is_looked_at(hide: Callable[[torch.nn.Module], Any], name: str) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).eval()
    value = hide(module)
    inner = isinstance(getattr(value, "__self__", None), torch.nn.Module)
    contents = AttributeContents([value])
    aside = AttributeContents([value], known={id(each) for each in module.modules()})
    assert not contents.changed()
    _HIDDEN[name](module)
    # Of a method of a part, that part is what it leads to.
    assert contents.changed() is (name in ("buffer in place", "mode", "attribute") if inner else True)
    assert bool(contents.different()) is contents.changed()
    assert not aside.changed()


def test_of_many_modules_and_tensors_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribute_reach, "_MOST_MODULES", 2)
    monkeypatch.setattr(attribute_reach, "_MOST_TENSORS", 3)
    modules = [torch.nn.Linear(8, 8) for _ in range(4)]
    reached = attribute_reach.reach([modules, modules[0]])
    assert reached.hidden == modules
    assert [id(tensor) for tensor in reached.tensors] == [id(item) for each in modules[:2] for item in (each.weight, each.bias)][:3]
    assert sum(table is vars(each) for table in reached.dictionaries for each in modules) == 2


def test_what_is_gone_or_says_to_be_something_else_is_left_alone() -> None:
    class Lying:
        __slots__ = ("kind",)

        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            return self.kind

    gone = weakref.proxy(Holder(a=1))
    lying = []
    for kind in (dict, list, set, deque, torch.Tensor, torch.nn.Module):
        lying.append(Lying())
        lying[-1].kind = kind
    contents = AttributeContents([gone, *lying, Holder.fromkeys, [gone]])
    assert not contents.changed()
    lying[1].kind = dict
    assert contents.changed()


def test_what_one_set_loses_to_the_next_is_seen() -> None:
    one, other, slotted = {"a"}, {"b"}, Slotted(1)
    contents = AttributeContents([one, other, slotted, set()])
    other.discard("b")
    one.add("b")
    assert contents.changed_uncounted()
    assert contents.different() == {(id(one), attribute_reach.LENGTH), (id(other), attribute_reach.LENGTH)}


def test_numbers_that_are_what_they_were_again_are_no_change() -> None:
    value = np.zeros(3)
    contents = AttributeContents([value])
    value[1] = 1.0
    assert contents.changed()
    value[1] = 0.0
    assert not contents.changed()


def test_what_holds_itself_is_watched_once() -> None:
    one = Holder(a=1)
    one.itself = [one, one]
    contents = AttributeContents([one, one, one.itself])
    assert len(contents.tables) == 1
    assert len(contents.lists) == 1


def test_what_is_left_out_is_neither_looked_at_nor_followed() -> None:
    value = Holder(count=1, log=["x"], rest=[1], notes={"a": 1}, names={"a"}, seen=torch.ones(64), other=torch.ones(64))
    contents = AttributeContents([value])
    value.count, value.log = 2, ["y"]
    value.rest.append(2)
    value.notes["b"] = 2
    value.names.add("b")
    value.seen.data.add_(1)
    left = contents.without(contents.different(), [value])
    value.count = 3
    value.log.append("z")
    value.rest[0] = 5
    value.notes["b"] = 3
    value.notes["c"] = 3
    value.names.add("c")
    value.seen.add_(1)
    assert not left.changed()
    assert left.different() - {(id(value.notes), "c")} == set()
    value.notes["a"] = 2
    assert left.changed()
    assert not (again := left.without(left.different(), [value])).changed()
    value.other.data.add_(1)
    assert again.changed()


def test_what_is_set_again_to_what_it_is_is_no_change() -> None:
    value = Holder(rate=float("0.5"), none=float("nan"), zero=0.0, name="a", items=[float("0.5")], slotted=Slotted(float("0.5")))
    contents = AttributeContents([value])
    value.rate, value.none, value.items[0], value.slotted.x = float("0.5"), float("nan"), float("0.5"), float("0.5")
    assert not contents.changed()
    assert contents.different() == set()
    for name, other in {"rate": 0.25, "none": 1.0, "zero": -0.0, "name": "b", "items": [0.5]}.items():
        before = vars(value)[name]
        setattr(value, name, other)
        assert contents.changed()
        assert contents.different() == {(id(vars(value)), name)}
        setattr(value, name, before)


def test_only_where_numbers_and_text_are_may_be_changed_each_time() -> None:
    value = Holder(
        count=0, names=["a"], notes={"a": 1}, none={}, tensor=torch.ones(2), held=torch.ones(2), item=Holder(a=1), rates=[torch.ones(2)],
        slotted=Slotted(torch.ones(2)), kept={"a": torch.ones(2)}, counted=Slotted(1),
    )  # fmt: skip
    contents = AttributeContents([value])
    value.count, value.notes["b"], value.none["a"], value.counted.x = 1, 2, 1, 2
    value.names.append("b")
    value.tensor, value.item, value.rates[0], value.slotted.x = torch.ones(2), Holder(a=1), torch.ones(2), torch.ones(2)
    value.held.add_(0)
    del value.kept["a"]
    plain = {(id(vars(value)), "count"), (id(value.counted), attribute_reach.LENGTH), (id(value.names), attribute_reach.LENGTH)}
    plain |= {(id(table), key) for table, key in ((value.notes, "b"), (value.notes, attribute_reach.LENGTH), (value.none, "a"))}
    plain.add((id(value.none), attribute_reach.LENGTH))
    assert contents.in_vain() == plain
    assert len(contents.different() - plain) == 7


def test_what_was_changed_three_times_is_harmless() -> None:
    value = Holder(count=0, flag=False)
    harmless = Harmless()
    for count in range(1, 4):
        assert harmless.places() == frozenset()
        before = AttributeContents([value], harmless.places())
        value.count = count
        harmless.note(dict.fromkeys(before.different(), before))
    assert harmless.places() == {(id(value.__dict__), "count")}
    left = AttributeContents([value], harmless.places())
    value.count = 9
    assert not left.changed()
    value.flag = True
    assert left.changed()
