"""What attributes hold is followed as deep as settings are kept, and no further than that."""

from __future__ import annotations

import argparse
import enum
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autosched.runtime import attribute_contents
from autosched.runtime.attribute_contents import AttributeContents, Harmless


class Colour(enum.Enum):
    """No configuration."""

    RED = 1


class Slotted:
    """Without a dictionary of attributes."""

    __slots__ = ("x",)


class Holder:
    """With a dictionary of attributes, and whatever else anybody asks for."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return 7


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
        (torch.nn.Linear(2, 2), lambda value: setattr(value, "in_features", 3)),
        (torch.ones(2), lambda value: setattr(value, "note", 3)),
        (torch.optim.SGD([torch.ones(2)]), lambda value: setattr(value, "note", 3)),
        (logging.getLogger("autosched.tests.contents"), lambda value: value.isEnabledFor(logging.ERROR)),
        (threading.Thread(), lambda value: setattr(value, "name", "x")),
        (Colour.RED, lambda value: setattr(value, "note", 3)),
        (Holder, lambda value: setattr(value, "note", 3)),
        (Slotted(), lambda value: setattr(value, "x", 3)),
        (Holder(a=[[[[Holder(b=1)]]]]), lambda value: setattr(value.a[0][0][0][0], "b", 2)),
    ],
)  # fmt: skip
def test_what_is_no_setting_is_left_alone(value: Any, change: Callable[[Any], object]) -> None:
    contents = AttributeContents([value])
    change(value)
    assert not contents.changed()


def test_no_more_is_watched_than_a_configuration_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribute_contents, "_MOST_CONTAINERS", 3)
    near, far = Holder(a=1, rest=[[number] for number in range(9)]), Holder(a=1)
    contents = AttributeContents([near, far])
    assert contents.tables == [near.__dict__, far.__dict__]
    assert contents.lists == [near.rest]


def test_what_holds_itself_is_watched_once() -> None:
    one = Holder(a=1)
    one.itself = [one, one]
    contents = AttributeContents([one, one, one.itself])
    assert len(contents.tables) == 1
    assert len(contents.lists) == 1


def test_what_is_left_out_is_neither_looked_at_nor_followed() -> None:
    value = Holder(count=1, log=["x"], rest=[1], notes={"a": 1})
    contents = AttributeContents([value])
    value.count, value.log = 2, ["y"]
    value.rest.append(2)
    value.notes["b"] = 2
    left = contents.without(contents.different(), [value])
    value.count = 3
    value.log.append("z")
    value.rest[0] = 5
    value.notes["b"] = 3
    value.notes["c"] = 3
    assert not left.changed()
    assert left.different() - {(id(value.notes), "c")} == set()
    value.notes["a"] = 2
    assert left.changed()


def test_what_was_changed_three_times_is_harmless() -> None:
    value = Holder(count=0, flag=False)
    harmless = Harmless()
    for count in range(1, 4):
        assert harmless.places() == frozenset()
        before = AttributeContents([value], harmless.places())
        value.count = count
        harmless.note(before)
    assert harmless.places() == {(id(value.__dict__), "count")}
    left = AttributeContents([value], harmless.places())
    value.count = 9
    assert not left.changed()
    value.flag = True
    assert left.changed()
