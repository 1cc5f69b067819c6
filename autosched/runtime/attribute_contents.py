"""Whether what attributes hold is what it was: lists, small dictionaries, and objects such as a model's configuration.

Libraries keep settings there that ``forward`` reads (``model.config.output_hidden_states``), and notes of what they have done to weights
past all counts (peft: which adapters it has merged).
"""

from __future__ import annotations

import argparse
import enum
import sys
import types
from collections import Counter, deque
from collections.abc import Iterable, Set
from itertools import chain
from operator import getitem, is_
from typing import Any

import torch

_Container = dict[Any, Any] | list[Any]
Place = tuple[int, object]
"""Which container, by its identity, and the key of an item in it, or ``_LENGTH``."""

_LENGTH = object()
# To compare takes as long as several calls: the third time that it was in vain is the last.
_PATIENCE = 3
# Of a container that holds settings; a larger one holds data.
_MOST_ITEMS = 64
# A configuration of transformers has about a hundred attributes.
_MOST_ATTRIBUTES = 256
# What is held by what an attribute holds, and so on. Whoever keeps a trainer in his model does not want all of that watched.
_DEPTH = 3
_MOST_CONTAINERS = 64
_NO_SETTINGS = (torch.nn.Module, torch.Tensor, enum.Enum, type)
_CONFIGURATIONS = (types.SimpleNamespace, argparse.Namespace)
# A logger, a lock or a counter of the standard library changes as it is used, and a schedule of autosched's may be an attribute, too.
_OF_NO_MODEL = sys.stdlib_module_names | {"torch", "autosched"}


class AttributeContents:
    """Compares containers with what they held when this was made: a list as a whole, of a dictionary and of attributes each item.

    Args:
        values: what attributes hold.
        but: places to leave out.
    """

    def __init__(self, values: Iterable[object], but: Set[Place] = frozenset()) -> None:
        self._but = but
        containers = _containers(values, but)
        self._dictionaries = [each for each in containers if isinstance(each, dict)]
        self.tables = [each for each in self._dictionaries if each]
        whole = [each for each in containers if (id(each), _LENGTH) not in but]
        # Not every write to an empty dictionary is counted.
        self.sized = [each for each in whole if isinstance(each, list) or not each]
        self._lengths = list(map(len, self.sized))
        self.lists = [each for each in self.sized if isinstance(each, list) and len(each) <= _MOST_ITEMS]
        self._listed = list(map(tuple, self.lists))
        self._sized_tables = [each for each in whole if isinstance(each, dict) and each]
        self._sizes = list(map(len, self._sized_tables))
        items = [(table, key) for table in self.tables for key in table if (id(table), key) not in but]
        self._tables = [table for table, _ in items]
        self._keys = [key for _, key in items]
        self._held = list(map(getitem, self._tables, self._keys))

    def changed(self) -> bool:
        """Whether anything differs."""
        if self.changed_elsewhere() or list(map(len, self._sized_tables)) != self._sizes:
            return True
        try:
            return not all(map(is_, map(getitem, self._tables, self._keys), self._held))
        except KeyError:
            return True

    def changed_elsewhere(self) -> bool:
        """What no dictionary counts: what is in lists, and whether anything is in dictionaries that were empty."""
        if not self.sized:
            return False
        if list(map(len, self.sized)) != self._lengths:
            return True
        return not all(map(is_, chain.from_iterable(self.lists), chain.from_iterable(self._listed)))

    def different(self) -> set[Place]:
        """All that differs."""
        held = {(id(table), key): old for table, key, old in zip(self._tables, self._keys, self._held, strict=True)}
        now = {(id(table), key): item for table in self._dictionaries for key, item in list(table.items())}
        places = (held.keys() | now.keys()) - self._but
        found = {place for place in places if held.get(place, _LENGTH) is not now.get(place, _LENGTH)}
        measured = zip((*self.sized, *self._sized_tables), (*self._lengths, *self._sizes), strict=True)
        found |= {(id(each), _LENGTH) for each, length in measured if len(each) != length}
        lists = zip(self.lists, self._listed, strict=True)
        return found | {(id(each), _LENGTH) for each, old in lists if len(each) != len(old) or not all(map(is_, each, old))}

    def without(self, places: Set[Place], values: Iterable[object]) -> AttributeContents:
        """Of ``values`` as they are now, without ``places`` and what is left out here."""
        return AttributeContents(values, self._but | places)


class Harmless:
    """Places in which changes have been without consequence often enough that nobody need look at them again.

    Only what a schedule was compared with its model after is known to be without consequence, and to compare takes as long as several
    calls: a count that somebody keeps in a configuration would make each call as slow as that.
    """

    def __init__(self) -> None:
        self._times: Counter[Place] = Counter()
        # Held, so that no other container has the identity of one of them.
        self._held: list[AttributeContents] = []

    def note(self, before: AttributeContents) -> None:
        """What differs from ``before`` was without consequence."""
        if different := before.different():
            self._times.update(different)
            self._held.append(before)

    def places(self) -> frozenset[Place]:
        """Those that were changed ``_PATIENCE`` times."""
        return frozenset(place for place, times in self._times.items() if times >= _PATIENCE)


def _containers(values: Iterable[object], but: Set[Place]) -> list[_Container]:
    """Lists, dictionaries and attributes of objects among ``values``, and in these, each once, the nearest first."""
    found: dict[int, _Container] = {}
    pending: deque[tuple[object, int]] = deque((value, 0) for value in values)
    while pending and len(found) < _MOST_CONTAINERS:
        value, depth = pending.popleft()
        container: _Container | None = value if isinstance(value, dict | list) and type(value) in (dict, list) else _attributes(value)
        if container is None or id(container) in found:
            continue
        if isinstance(container, list):
            inside = [] if len(container) > _MOST_ITEMS or (id(container), _LENGTH) in but else container
        elif len(container) > (_MOST_ITEMS if container is value else _MOST_ATTRIBUTES):
            continue
        else:
            inside = [item for key, item in list(container.items()) if (id(container), key) not in but]
        found[id(container)] = container
        if depth < _DEPTH:
            pending.extend((item, depth + 1) for item in inside)
    return list(found.values())


def _attributes(value: object) -> dict[str, Any] | None:
    """The attributes of an object that may be a configuration."""
    kind = type(value)
    if isinstance(value, _NO_SETTINGS) or (kind.__module__.partition(".")[0] in _OF_NO_MODEL and kind not in _CONFIGURATIONS):
        return None
    try:
        # Not what a class makes up for whoever asks.
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return table if type(table) is dict else None
