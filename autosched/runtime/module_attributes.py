"""What modules hold beside their weights, compared with what they held: modes, hooks, parts and attributes.

Each comparison is one pass of C code over flat lists: a loaded model may be looked at after each of its calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from itertools import chain, compress
from operator import attrgetter, getitem, is_, itemgetter
from typing import Any

import torch

from autosched.core.attribute_reach import END, MOST_ITEMS, OF_EVERY_MODULE, Place, hooks_of
from autosched.runtime.attribute_contents import AttributeContents, is_same, same_items

Entry = tuple[dict[str, Any], str]
"""A dictionary, and one of its keys."""

_attributes_of = attrgetter("__dict__")
_training_of = attrgetter("training")
_training_entry = itemgetter("training")
_values_of = dict.values
# PyTorch makes these anew as it likes, in ``to`` for one; what is in them is among the parameters.
_MADE_ANEW = frozenset(("_flat_weights", "_flat_weight_refs"))


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

    Of tensors, lists, dictionaries and configurations there, and of what hooks use, whether they hold what they held
    (``attribute_contents``).
    """

    __slots__ = ("_items", "_sizes", "_tables", "_types", "contents", "modules", "set_by_calls")

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self.modules = modules
        self._types = list(map(type, modules))
        self._tables = [module.__dict__ for module in modules]
        # Of modules' own attributes, those that calls were seen to set, and not to set each time.
        self.set_by_calls: set[Place] = set()
        self._take()

    def _take(self) -> None:
        self._sizes = list(map(len, self._tables))
        self._items = Items([(module.__dict__, key) for module in self.modules for key in settings_of(module)])
        self.contents = AttributeContents(self._values(), known=frozenset(map(id, self.modules)))

    def renew(self) -> bool:
        """Take attributes for what they are now; whether any was changed, or is new."""
        found, before = self.changed(), self._items
        self._take()
        self.set_by_calls |= self._items.unlike(before)
        return found

    def settle(self) -> None:
        """Forget attributes that are no longer what they were, and count anew."""
        self._sizes = list(map(len, self._tables))
        self._items = Items(self._items.left())
        self.leave_out(self.contents.different())

    def in_vain(self) -> dict[Place, object]:
        """What differs, if that is of no consequence, and may be so each time: all but what only the model's owner sets. With its owner."""
        own: dict[Place, object] = {(id(table), key): table for table, key in self._items.lost() if (id(table), key) in self.set_by_calls}
        return {**dict.fromkeys(self.contents.in_vain(), self.contents), **own}

    def different(self) -> list[str]:
        """Names of attributes that are others."""
        return self._items.different()

    def leave_out(self, places: Set[Place]) -> None:
        """Forget what is in these places."""
        self._items = self._items.without(places)
        self.contents = self.contents.without(places, self._values())

    def took_equal_lists(self) -> bool:
        """Whether all that changed is that lists were made anew and hold what they held; from then on these are watched.

        Whoever selects an adapter for each call (peft) makes a list of its name each time.
        """
        if list(map(len, self._tables)) != self._sizes or self.contents.changed() or not self._items.took_equal_lists():
            return False
        self.leave_out(frozenset())
        return True

    def _values(self) -> list[object]:
        return [*self._items.values, *(hook for module in self.modules for hook in hooks_of(module))]

    def changed(self) -> bool:
        """Whether anything was."""
        found = list(map(len, self._tables)) != self._sizes or self._items.changed() or self.contents.changed()
        return found or self.changed_elsewhere()

    def changed_elsewhere(self) -> bool:
        """What no dictionary counts: classes of modules, that a module's attributes are all others, what is in tensors, lists and sets."""
        if list(map(type, self.modules)) != self._types or not all(map(is_, map(_attributes_of, self.modules), self._tables)):
            return True
        return self.contents.changed_elsewhere()


def settings_of(module: torch.nn.Module) -> list[str]:
    """Names of the attributes that are of this module, and not of every one."""
    left_out = OF_EVERY_MODULE | _MADE_ANEW if isinstance(module, torch.nn.RNNBase) else OF_EVERY_MODULE
    return [name for name in module.__dict__ if name not in left_out]


class Items:
    """Whether dictionaries hold, under some names, the objects that they held, or the same numbers and text."""

    __slots__ = ("_keys", "_tables", "values")

    def __init__(self, entries: Iterable[Entry]) -> None:
        entries = list(entries)
        self._tables = [table for table, _ in entries]
        self._keys = [key for _, key in entries]
        self.values = list(map(getitem, self._tables, self._keys))

    def changed(self) -> bool:
        """Whether any is another, or gone."""
        try:
            return bool(self._keys) and not same_items(list(map(getitem, self._tables, self._keys)), self.values)
        except KeyError:
            return True

    def took_equal_lists(self) -> bool:
        """Whether all that differ are lists in the place of equal ones; then they are taken for what was held."""
        now = [table.get(key, END) for table, key in zip(self._tables, self._keys, strict=True)]
        if not all(map(_is_same_or_equal, now, self.values)):
            return False
        self.values = now
        return True

    def different(self) -> list[str]:
        """Names of those that are."""
        return [key for _, key in self.lost()]

    def left(self) -> list[Entry]:
        """Those that hold what they held."""
        entries = zip(self._tables, self._keys, self.values, strict=True)
        return [(table, key) for table, key, old in entries if is_same(table.get(key, END), old)]

    def lost(self) -> list[Entry]:
        """Those that do not."""
        entries = zip(self._tables, self._keys, self.values, strict=True)
        return [(table, key) for table, key, old in entries if not is_same(table.get(key, END), old)]

    def without(self, places: Set[Place]) -> Items:
        """All but ``places``, and what they held."""
        kept = [place not in places for place in self._by_place()]
        left = Items(())
        left._tables, left._keys, left.values = (list(compress(each, kept)) for each in (self._tables, self._keys, self.values))
        return left

    def unlike(self, other: Items) -> set[Place]:
        """Those that hold what ``other`` did not hold there."""
        held = other._by_place()
        return {place for place, value in self._by_place().items() if held.get(place, END) is not value}

    def _by_place(self) -> dict[Place, Any]:
        return {(id(table), key): value for table, key, value in zip(self._tables, self._keys, self.values, strict=True)}


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

    def other_forms(self, besides: Set[Place]) -> bool:
        """Whether, of what changed, any but ``besides`` is more than a tensor in the place of one of the same shape and dtype."""
        if [*chain.from_iterable(self.tables)] != self._names:
            return True
        places = ((id(table), key) for table in self.tables for key in table)
        entries = zip(places, chain.from_iterable(map(_values_of, self.tables)), self._held, strict=False)
        return any(now is not old and place not in besides and _form_of(now) != _form_of(old) for place, now, old in entries)


def _is_same_or_equal(now: object, was: object) -> bool:
    """Whether this is the same, or a list, short enough to be watched, of the same."""
    if is_same(now, was):
        return True
    return type(now) is list and type(was) is list and len(now) <= MOST_ITEMS and same_items(now, was)


def _form_of(item: Any) -> object:
    try:
        return item.shape, item.dtype
    except (AttributeError, RuntimeError):  # none is there, or it is nested
        return type(item)
