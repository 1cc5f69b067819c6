"""Counts of dictionaries: every write raises them, and a count that misses one is not relied on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autosched.runtime import dict_counts
from autosched.runtime.dict_counts import DictCounts

needs_counts = pytest.mark.skipif(dict_counts._reader() is None, reason="this PyTorch counts nothing that can be relied on")

_WRITES: dict[str, Callable[[dict[str, Any]], object]] = {
    "set": lambda table: table.__setitem__("a", 5),
    "add": lambda table: table.__setitem__("new", 5),
    "delete": lambda table: table.__delitem__("a"),
    "pop": lambda table: table.pop("a"),
    "pop one": lambda table: table.popitem(),
    "update": lambda table: table.update(a=6, b=7),
    "default": lambda table: table.setdefault("new", 5),
    "merge": lambda table: table.__ior__({"a": 6}),
    "clear": lambda table: table.clear(),
    "clear and fill": lambda table: (table.clear(), table.update(a=1, b=2)),
}


@needs_counts
@pytest.mark.parametrize("name", _WRITES)
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_every_write_to_any_of_them_is_told(name: str, kind: type[dict[str, Any]]) -> None:
    tables = [kind(a=1, b=2) for _ in range(3)]
    counts = DictCounts(tables)
    for table in tables:
        before = counts.now()
        assert counts.now() == before
        _WRITES[name](table)
        assert counts.now() != before


@needs_counts
def test_attributes_of_modules_are_told_and_other_dictionaries_are_not() -> None:
    module, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    counts = DictCounts([module.__dict__, module.__dict__, module._parameters])
    for _ in range(100):
        before = counts.now()
        module.training = not module.training
        assert counts.now() != before
        before = counts.now()
        other.training = not other.training
        assert counts.now() == before
        module.weight = torch.nn.Parameter(torch.ones(2, 2))
        assert counts.now() != before


def _never(table: dict[str, Any]) -> int:
    return 0


def _deletes_unseen(table: dict[str, Any]) -> int:
    return len(table)


def _restless() -> Callable[[dict[str, Any]], int]:
    asked = iter(range(10**6))
    return lambda table: next(asked)


def _fails(table: dict[str, Any]) -> int:
    raise TypeError("no such count")


@pytest.mark.parametrize("count", [_never, _deletes_unseen, _restless(), _fails], ids=["never", "size", "restless", "fails"])
def test_a_count_that_cannot_be_relied_on_is_not_used(monkeypatch: pytest.MonkeyPatch, count: Callable[..., int]) -> None:
    from torch._C._dynamo import guards

    monkeypatch.setattr(guards, "dict_version", count)
    assert dict_counts._reader.__wrapped__() is None


def test_without_a_count_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._C._dynamo import guards

    monkeypatch.delattr(guards, "dict_version")
    monkeypatch.setattr(dict_counts, "_reader", dict_counts._reader.__wrapped__)
    assert DictCounts([{"a": 1}]).now() is None
