"""A native watch says that nothing was changed only where that is so, and is not there where it could not know."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autosched.runtime.native import dict_words
from autosched.runtime.native import watch as room
from autosched.runtime.native.build import Library, native_library
from autosched.runtime.native.watch import Watched, can_watch, native_watch

pytestmark = pytest.mark.usefixtures("native_watches")


class _Things:
    """One of everything that can be watched."""

    def __init__(self) -> None:
        self.module = torch.nn.Linear(2, 2)
        self.empty: dict[str, Any] = {}
        self.empty_ordered: OrderedDict[str, Any] = OrderedDict()
        self.table: dict[str, Any] = {"a": 1}
        self.weight = torch.nn.Parameter(torch.ones(4, 4))
        self.part = torch.ones(4, 4)[1:]
        self.names = ["first", "second"]

    def watched(self) -> Watched:
        tensors = (self.weight, self.part)
        tables = (self.table, self.module.__dict__)
        sized = (self.empty, self.empty_ordered, self.names)
        return Watched((self.module,), sized, tables, tensors, tensors, (self.names,), (self.weight.data_ptr() + 8,))


def _in_place(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(2.0)


_CHANGES: dict[str, Callable[[_Things], object]] = {
    "class": lambda things: setattr(things.module, "__class__", torch.nn.Identity),
    "attributes": lambda things: setattr(things.module, "__dict__", dict(things.module.__dict__)),
    "filled": lambda things: things.empty.update(a=1),
    "filled, in order": lambda things: things.empty_ordered.update(a=1),
    "written": lambda things: things.table.update(a=2),
    "emptied": lambda things: things.table.clear(),
    "attribute": lambda things: setattr(things.module, "training", False),
    "moved": lambda things: setattr(things.weight, "data", torch.zeros(4, 4)),
    "read in another order": lambda things: setattr(things.weight, "data", things.weight.data.t()),
    "of another shape": lambda things: setattr(things.weight, "data", things.weight.data[:2]),
    "moved in its storage": lambda things: things.part.set_(things.part.untyped_storage(), 0, (3, 4)),
    "storage moved": lambda things: things.part.untyped_storage().resize_(1 << 16),
    "swapped": lambda things: torch.utils.swap_tensors(things.weight, torch.nn.Parameter(torch.ones(4, 4))),
    "list, another item": lambda things: things.names.reverse(),
    "list, longer": lambda things: things.names.append("third"),
    "list, elsewhere": lambda things: (things.names.extend(["more"] * 999), things.names.__delitem__(slice(2, None))),
    "list, gone": lambda things: things.names.clear(),
    "past all counts": lambda things: things.weight.data.mul_(2.0),
    "memory given back": lambda things: things.weight.untyped_storage().resize_(0),
    "in place": lambda things: _in_place(things.weight),
    "in place, through a view": lambda things: _in_place(things.weight.detach()[0]),
}


@pytest.mark.parametrize("name", _CHANGES)
def test_a_change_is_seen_and_what_was_there_before_is_not(name: str) -> None:
    things = _Things()
    first = native_watch(things.watched())
    assert first is not None
    assert first.unchanged()
    _CHANGES[name](things)
    # What was swapped away is gone by then.
    gc.collect()
    assert not first.unchanged()
    tensors = (things.weight, things.part)
    second = native_watch(Watched((things.module,), (things.names,), (things.table,), tensors, tensors, (things.names,)))
    assert second is not None
    assert second.unchanged()
    assert not first.unchanged()


def test_whom_it_watches_lives_as_long_as_it_does_and_no_longer() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    memory, tensor = weakref.ref(weight.untyped_storage()), weakref.ref(weight)
    watch = native_watch(Watched(placed=(weight,), counted=(weight,)))
    del weight
    gc.collect()
    assert watch is not None
    assert watch.unchanged()
    assert tensor() is not None
    del watch
    gc.collect()
    assert tensor() is None
    assert memory() is None


@pytest.mark.parametrize(
    "places",
    [{"_CLASS": 0}, {"_ATTRIBUTES": -16}, {"_MANAGED": 0}, {"_SIZE": 24}, {"_SIZE": 1 << 20}, {"_SIZE_OF_LIST": 48}],
    ids=str,
)
def test_where_the_interpreter_keeps_things_elsewhere_there_is_none(monkeypatch: pytest.MonkeyPatch, places: dict[str, int]) -> None:
    assert can_watch()
    for name, place in places.items():
        monkeypatch.setattr(room, name, place)
    monkeypatch.setattr(room, "_as_expected", room._as_expected.__wrapped__)
    assert not can_watch()
    assert native_watch(_Things().watched()) is None


def _nowhere(library: Library, table: dict[str, Any]) -> int:
    raise RuntimeError("no word")


@pytest.mark.parametrize("word", [lambda library, table: id(table) + 16, _nowhere], ids=["the size", "none"])
def test_where_a_dictionary_has_no_word_that_every_write_changes_there_is_none(
    monkeypatch: pytest.MonkeyPatch, word: Callable[[Library, dict[str, Any]], int]
) -> None:
    assert can_watch()
    monkeypatch.setattr(room, "word_of_writes", word)
    monkeypatch.setattr(room, "_as_expected", room._as_expected.__wrapped__)
    assert not can_watch()
    assert native_watch(_Things().watched()) is None


@pytest.mark.skipif(dict_words._TELLS, reason="this Python keeps no count in a dictionary")
@pytest.mark.parametrize("place", [16, 1 << 20])
def test_where_a_dictionary_keeps_its_count_elsewhere_there_is_none(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    assert can_watch()
    monkeypatch.setattr(dict_words, "_COUNT", place)
    monkeypatch.setattr(room, "_as_expected", room._as_expected.__wrapped__)
    assert not can_watch()
    assert native_watch(_Things().watched()) is None


def test_where_a_tensor_does_not_say_what_it_stands_for_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_word", lambda address: 7)
    monkeypatch.setattr(room, "_place_in_tensors", room._place_in_tensors.__wrapped__)
    library = native_library()
    assert library is not None
    assert room._as_expected(library)
    assert not can_watch()
    assert native_watch(Watched()) is None


def test_without_native_lanes_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_NATIVE", "0")
    assert not can_watch()
    assert native_watch(Watched()) is None


def test_what_has_no_count_or_no_memory_cannot_be_watched() -> None:
    with torch.inference_mode():
        made = torch.ones(2)
    assert native_watch(Watched(counted=(made,))) is None
    assert native_watch(Watched(placed=(torch.ones(2).to_sparse(),))) is None
