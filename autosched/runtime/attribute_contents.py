"""Whether what attributes hold is what it was: lists, small dictionaries, objects such as a model's configuration, and tensors in these.

Libraries keep settings there that ``forward`` reads (``model.config.output_hidden_states``), and notes of what they have done to weights
past all counts (peft: which adapters it has merged). What a tensor there holds, a program has as a constant of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, repeat
from operator import attrgetter, call, is_
from typing import Any

import torch

from autosched.core.attribute_reach import END, LENGTH, MOST_ITEMS, Place, is_plain, reach
from autosched.runtime.memory_words import MemoryWords

version_of = attrgetter("_version")
_address_of = torch.Tensor.data_ptr
_strides_of = torch.Tensor.stride
_size_of = torch.Tensor.numel
# To compare takes as long as several calls: the third time that it was in vain is the last.
_PATIENCE = 3
_MARK = (object(),)


def places_of(tensors: list[torch.Tensor]) -> list[object]:
    """Where they lie, and how: the same memory may be read in another order, or less of it. To ask for shapes takes twice as long."""
    return [*map(_address_of, tensors), *map(_strides_of, tensors), *map(_size_of, tensors)]


class HeldTensors:
    """Compares tensors with what they were when this was made: how often they were changed in place, where they lie, a few words there."""

    __slots__ = ("_places", "_versions", "_words", "counted", "placed")

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        tensors = list(tensors)
        # Tensors made in inference mode have no count.
        self.counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = list(map(version_of, self.counted))
        # One of a class of its own may have no memory.
        plain = [tensor for tensor in tensors if type(tensor) in (torch.Tensor, torch.nn.Parameter)]
        self.placed = [tensor for tensor in plain if tensor.layout is torch.strided]
        self._places = places_of(self.placed)
        self._words = MemoryWords(self.placed)

    @property
    def words(self) -> Sequence[int]:
        """Addresses of the words that are compared."""
        return self._words.places

    def changed(self) -> bool:
        """Whether anything differs."""
        # Most models have none of these, and to go over nothing takes its time too.
        if not self.counted and not self.placed:
            return False
        # The words last: where memory is another, that was said before they are read.
        moved = list(map(version_of, self.counted)) != self._versions or places_of(self.placed) != self._places
        return moved or self._words.changed()

    def different(self) -> set[Place]:
        """Those that differ."""
        count = len(self.placed)
        changed = [tensor for tensor, was in zip(self.counted, self._versions, strict=True) if version_of(tensor) != was]
        moved = [tensor for place, tensor in enumerate(self.placed) if places_of([tensor]) != self._places[place::count]]
        # Where one has other memory, the words that are read are those of the memory that it had.
        return {(id(tensor), LENGTH) for tensor in (*changed, *moved, *self._words.different())}


class AttributeContents:
    """Compares containers with what they held when this was made: a list or a set as a whole, of a dictionary and of attributes each item.

    Args:
        values: what attributes hold.
        but: places to leave out.
        known: identities of the modules that are looked at elsewhere.
    """

    def __init__(self, values: Iterable[object], but: Set[Place] = frozenset(), known: Set[int] = frozenset()) -> None:
        self._but, self._known = but, known
        reached = reach(values, but, known)
        self.tensors = HeldTensors(reached.tensors)
        self._dictionaries = reached.dictionaries
        self.tables = [each for each in self._dictionaries if dict.__len__(each)]
        whole = [each for each in self._dictionaries if (id(each), LENGTH) not in but]
        # Not every write to an empty dictionary is counted.
        self._empty = [each for each in whole if not dict.__len__(each)]
        self._sized_tables = [each for each in whole if dict.__len__(each)]
        self._sizes = list(map(dict.__len__, self._sized_tables))
        self._lists = [each for each in reached.lists if (id(each), LENGTH) not in but]
        self._lengths = list(map(list.__len__, self._lists))
        self.sized: list[dict[Any, Any] | list[Any]] = [*self._lists, *self._empty]
        self.lists = [each for each in self._lists if list.__len__(each) <= MOST_ITEMS]
        self._listed = [tuple(list.__iter__(each)) for each in self.lists]
        self._all_listed = list(chain.from_iterable(self._listed))
        self._uncounted = [each for each in reached.uncounted if (id(each.owner), LENGTH) not in but]
        # Each with a mark behind it, so that none is taken for what another has lost.
        self._reads = [read for each in self._uncounted for read in (each.read, _MARK.__iter__)]
        self._were = [tuple(each.read()) for each in self._uncounted]
        self._all = [item for were in self._were for item in (*were, *_MARK)]
        items = [(table, key) for table in self.tables for key in dict.keys(table) if (id(table), key) not in but]
        self._tables = [table for table, _ in items]
        self._keys = [key for _, key in items]
        self._held = self._now()

    def changed(self) -> bool:
        """Whether anything differs."""
        if self.changed_elsewhere() or list(map(dict.__len__, self._sized_tables)) != self._sizes:
            return True
        return not same_items(self._now(), self._held)

    def changed_elsewhere(self) -> bool:
        """What no dictionary counts: what is in lists, sets and tensors, and whether anything is in dictionaries that were empty."""
        if self.sized:
            if any(map(dict.__len__, self._empty)) or list(map(list.__len__, self._lists)) != self._lengths:
                return True
            if not same_items(list(chain.from_iterable(map(list.__iter__, self.lists))), self._all_listed):
                return True
        return self.changed_uncounted() or self.tensors.changed()

    def changed_uncounted(self) -> bool:
        """What no word in memory tells, either."""
        # Few models have any.
        return bool(self._reads) and not same_items(list(chain.from_iterable(map(call, self._reads))), self._all)

    def different(self) -> set[Place]:
        """All that differs."""
        return {place for place, _ in self._differences()} | self.tensors.different()

    def in_vain(self) -> set[Place]:
        """Of what differs, if that is of no consequence, what may be so each time: numbers and text.

        Somebody counts or notes something there. That a tensor was written to, or an object put in another's place, says nothing of the
        next time: as often as not the numbers were those that it had.
        """
        return {place for place, items in self._differences() if all(map(is_plain, items))}

    def _differences(self) -> Iterator[tuple[Place, Iterable[object]]]:
        """All that differs but tensors that were written to, each with what is and what was there."""
        held = {(id(table), key): old for table, key, old in zip(self._tables, self._keys, self._held, strict=True)}
        now = {(id(table), key): item for table in self._dictionaries for key, item in list(dict.items(table))}
        for place in (held.keys() | now.keys()) - self._but:
            is_now, was = now.get(place, END), held.get(place, END)
            if not is_same(is_now, was):
                yield place, (is_now, was)
        for table in [each for each in self._empty if dict.__len__(each)]:
            yield (id(table), LENGTH), list(dict.values(table))
        for table, size in zip(self._sized_tables, self._sizes, strict=True):
            if dict.__len__(table) != size:
                yield (id(table), LENGTH), [*dict.values(table), *(old for (owner, _), old in held.items() if owner == id(table))]
        for each, length in zip(self._lists, self._lengths, strict=True):
            if list.__len__(each) != length:
                yield (id(each), LENGTH), list(list.__iter__(each))
        for each, old in zip(self.lists, self._listed, strict=True):
            if not same_items(items := tuple(list.__iter__(each)), old):
                yield (id(each), LENGTH), (*items, *old)
        for uncounted, old in zip(self._uncounted, self._were, strict=True):
            if not same_items(items := tuple(uncounted.read()), old):
                yield (id(uncounted.owner), LENGTH), (*items, *old)

    def without(self, places: Set[Place], values: Iterable[object]) -> AttributeContents:
        """Of ``values`` as they are now, without ``places`` and what is left out here."""
        return AttributeContents(values, self._but | places, self._known)

    def _now(self) -> list[Any]:
        # Not by what a class makes of a key that is not there.
        return list(map(dict.get, self._tables, self._keys, repeat(END)))


class Harmless:
    """Places in which changes have been without consequence often enough that nobody need look at them again.

    Only what a schedule was compared with its model after is known to be without consequence, and to compare takes as long as several
    calls: a count that somebody keeps in a configuration would make each call as slow as that.
    """

    def __init__(self) -> None:
        self._times: Counter[Place] = Counter()
        # Held, so that no other container has the identity of one of them.
        self._held: dict[int, object] = {}

    def note(self, different: Mapping[Place, object]) -> None:
        """That these differ was without consequence; each with what keeps its container alive."""
        self._times.update(different.keys())
        self._held.update((id(owner), owner) for owner in different.values())

    def places(self) -> frozenset[Place]:
        """Those that were changed ``_PATIENCE`` times."""
        return frozenset(place for place, times in self._times.items() if times >= _PATIENCE)


def same_items(now: Sequence[object], were: Sequence[object]) -> bool:
    """Whether these are the very objects, or the same numbers and text made anew: whoever sets something for each call sets it again."""
    return len(now) == len(were) and (all(map(is_, now, were)) or all(map(is_same, now, were)))


def is_same(now: object, was: object) -> bool:
    """Whether this is the very object, or the same number or text; as written, for zero has two signs and a NaN is not equal to itself."""
    return now is was or (type(now) is type(was) and is_plain(now) and repr(now) == repr(was))
