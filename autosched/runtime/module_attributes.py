"""What modules hold beside their weights, compared with what they held: modes, hooks, parts and attributes.

Each comparison is one pass of C code over flat lists: a loaded model may be looked at after each of its calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from itertools import chain
from operator import attrgetter, getitem, is_, itemgetter
from typing import Any

import torch

from autosched.core.attribute_reach import END, Place
from autosched.runtime.attribute_contents import AttributeContents

Entry = tuple[dict[str, Any], str]
"""A dictionary, and one of its keys."""

_attributes_of = attrgetter("__dict__")
_training_of = attrgetter("training")
_training_entry = itemgetter("training")
_values_of = dict.values
_PLAIN = (type(None), bool, int, float, str, tuple)
_OF_EVERY_MODULE = frozenset(torch.nn.Module().__dict__)


class Modes:
    """Whether a module is in training mode."""

    __slots__ = ("elsewhere", "tables")

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        modules = list(modules)
        self.tables = [module.__dict__ for module in modules if "training" in module.__dict__]
        # A scripted module keeps the flag elsewhere.
        self.elsewhere = [module for module in modules if "training" not in module.__dict__]

    def changed(self) -> bool:
        """Whether any is."""
        try:
            return any(map(_training_entry, self.tables)) or self.changed_elsewhere()
        except KeyError:
            return True

    def changed_elsewhere(self) -> bool:
        """What no dictionary says."""
        return bool(self.elsewhere) and any(map(_training_of, self.elsewhere))


class Hooks:
    """Whether modules, and dictionaries of theirs, most of them empty, hold the hooks that they held."""

    __slots__ = ("_owners", "empty", "filled")

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        names = ("_forward_hooks", "_forward_pre_hooks")
        tables = [*(getattr(module, name) for module in modules for name in names), *_hooks_of_all_modules()]
        self._owners = Items([(module.__dict__, name) for module in modules for name in names if name in module.__dict__])
        self.empty = [table for table in tables if not table]
        self.filled = Entries([table for table in tables if table])

    def changed(self) -> bool:
        """Whether they hold others."""
        return any(self.empty) or self.filled.changed() or self._owners.changed()


def _hooks_of_all_modules() -> list[dict[Any, Any]]:
    names = ("_global_forward_hooks", "_global_forward_pre_hooks")
    return [table for name in names if isinstance(table := getattr(torch.nn.modules.module, name, None), dict)]


class Settings:
    """Whether modules are of the classes they were of, have as many attributes, and the same values there.

    Of tensors, lists, dictionaries and configurations there, whether they hold what they held (``attribute_contents``). Of PyTorch's own
    modules numbers, words and tuples alone: what else they have they make anew as they like (``LSTM`` its list of weights in ``to``).
    """

    __slots__ = ("_items", "_sizes", "_tables", "_types", "contents", "modules")

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self.modules = modules
        self._types = list(map(type, modules))
        self._tables = [module.__dict__ for module in modules]
        self._sizes = list(map(len, self._tables))
        self._items = Items([(module.__dict__, key) for module in modules for key in _settings_of(module)])
        self.contents = AttributeContents(self._items.values, known=frozenset(map(id, modules)))

    def settle(self) -> bool:
        """Forget attributes that are no longer what they were, and count anew; whether there were any."""
        found = self.changed()
        self._sizes = list(map(len, self._tables))
        self._items = Items(self._items.left())
        self.leave_out(self.contents.different())
        return found

    def different(self) -> list[str]:
        """Names of attributes that are others."""
        return self._items.different()

    def leave_out(self, places: Set[Place]) -> None:
        """Forget what is in these places."""
        self.contents = self.contents.without(places, self._items.values)

    def changed(self) -> bool:
        """Whether anything was."""
        found = list(map(len, self._tables)) != self._sizes or self._items.changed() or self.contents.changed()
        return found or self.changed_elsewhere()

    def changed_elsewhere(self) -> bool:
        """What no dictionary counts: classes of modules, that a module's attributes are all others, what is in tensors, lists and sets."""
        if list(map(type, self.modules)) != self._types or not all(map(is_, map(_attributes_of, self.modules), self._tables)):
            return True
        return self.contents.changed_elsewhere()


def _settings_of(module: torch.nn.Module) -> list[str]:
    names = [name for name in module.__dict__ if name not in _OF_EVERY_MODULE]
    if type(module).__module__.startswith("torch."):
        return [name for name in names if type(module.__dict__[name]) in _PLAIN]
    return names


class Items:
    """Whether dictionaries hold, under some names, the very objects that they held."""

    __slots__ = ("_keys", "_tables", "values")

    def __init__(self, entries: Iterable[Entry]) -> None:
        entries = list(entries)
        self._tables = [table for table, _ in entries]
        self._keys = [key for _, key in entries]
        self.values = list(map(getitem, self._tables, self._keys))

    def changed(self) -> bool:
        """Whether any is another, or gone."""
        try:
            return bool(self._keys) and not all(map(is_, map(getitem, self._tables, self._keys), self.values))
        except KeyError:
            return True

    def different(self) -> list[str]:
        """Names of those that are."""
        entries = zip(self._tables, self._keys, self.values, strict=True)
        return [key for table, key, old in entries if table.get(key, END) is not old]

    def left(self) -> list[Entry]:
        """Those that hold what they held."""
        entries = zip(self._tables, self._keys, self.values, strict=True)
        return [(table, key) for table, key, old in entries if table.get(key, END) is old]


class Entries:
    """Whether dictionaries hold the very objects that they held, under the same names, in one pass over all of them."""

    __slots__ = ("_held", "_names", "tables")

    def __init__(self, tables: list[dict[str, Any]]) -> None:
        self.tables = tables
        self.accept()

    def accept(self) -> None:
        """Take what is there now for what was."""
        # The end is marked: an entry too few meets the mark, one too many is met by it.
        self._held = [*chain.from_iterable(map(_values_of, self.tables)), END]
        self._names = [*chain.from_iterable(self.tables)]

    def changed(self) -> bool:
        """Whether any is another, under another name, or gone, or there is one more."""
        if not self.tables:
            return False
        values = chain(chain.from_iterable(map(_values_of, self.tables)), (END,))
        return not all(map(is_, values, self._held)) or [*chain.from_iterable(self.tables)] != self._names
