"""Named tuples are found again by name among modules that are there, and nothing is imported for it."""

from __future__ import annotations

import sys
import types
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from autosched.core.namedtuples import register_named, register_namedtuples


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("users.models")
    monkeypatch.setitem(sys.modules, "users.models", made)
    return made


def structure(item: Any) -> str:
    return pytree.treespec_dumps(pytree.tree_flatten(item)[1])


def test_a_nested_class_is_written_down_and_read_again(module: types.ModuleType) -> None:
    first = namedtuple("First", ["left", "right"])
    first.__module__, first.__qualname__ = "users.models", "Outer.First"
    value = {"a": [first(torch.ones(1), 2)]}
    with pytest.raises(NotImplementedError):
        structure(value)
    register_namedtuples(value)
    assert pytree.treespec_loads(structure(value)) == pytree.tree_flatten(value)[1]


def test_only_a_named_tuple_of_a_module_that_is_there_is_registered(module: types.ModuleType) -> None:
    second = namedtuple("Second", ["left"])
    second.__module__, second.__qualname__ = "users.models", "Outer.Second"
    module.Outer = type("Outer", (), {"Second": second, "Plain": tuple})  # type: ignore[attr-defined]
    for name in ("users.models.Outer.Plain", "users.models.Missing", "absent_module.Point", "users.models.Outer", "Second"):
        register_named(name)
    assert "absent_module" not in sys.modules
    assert second not in pytree.SUPPORTED_SERIALIZED_TYPES
    register_named("users.models.Outer.Second")
    assert pytree.SUPPORTED_SERIALIZED_TYPES[second].serialized_type_name == "users.models.Outer.Second"


def test_a_modules_own_lazy_attributes_are_not_asked(module: types.ModuleType) -> None:
    asked: list[str] = []
    module.__getattr__ = asked.append  # type: ignore[method-assign, assignment, return-value]
    register_named("users.models.Anything")
    assert asked == []
