"""Whether what attributes hold is what it was: lists, small dictionaries, objects such as a model's configuration, and tensors in these.

Libraries keep settings there that ``forward`` reads (``model.config.output_hidden_states``), and notes of what they have done to weights
past all counts (peft: which adapters it has merged). What a tensor there holds, a program has as a constant of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain, repeat
from operator import attrgetter, call, is_
from typing import Any

import torch

from autosched.core.attribute_reach import END, LENGTH, MOST_ITEMS, Place, reach
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
        return not all(map(is_, self._now(), self._held))

    def changed_elsewhere(self) -> bool:
        """What no dictionary counts: what is in lists, sets and tensors, and whether anything is in dictionaries that were empty."""
        if self.sized:
            if any(map(dict.__len__, self._empty)) or list(map(list.__len__, self._lists)) != self._lengths:
                return True
            listed = chain.from_iterable(map(list.__iter__, self.lists))
            if not all(map(is_, listed, chain.from_iterable(self._listed))):
                return True
        return self.changed_uncounted() or self.tensors.changed()

    def changed_uncounted(self) -> bool:
        """What no word in memory tells, either."""
        # Few models have any.
        return bool(self._reads) and not _same(list(chain.from_iterable(map(call, self._reads))), self._all)

    def different(self) -> set[Place]:
        """All that differs."""
        held = {(id(table), key): old for table, key, old in zip(self._tables, self._keys, self._held, strict=True)}
        now = {(id(table), key): item for table in self._dictionaries for key, item in list(dict.items(table))}
        places = (held.keys() | now.keys()) - self._but
        found = {place for place in places if held.get(place, END) is not now.get(place, END)}
        found |= {(id(each), LENGTH) for each in self._empty if dict.__len__(each)}
        sizes = zip(self._sized_tables, self._sizes, strict=True)
        found |= {(id(each), LENGTH) for each, size in sizes if dict.__len__(each) != size}
        lengths = zip(self._lists, self._lengths, strict=True)
        found |= {(id(each), LENGTH) for each, length in lengths if list.__len__(each) != length}
        lists = zip(self.lists, self._listed, strict=True)
        found |= {(id(each), LENGTH) for each, old in lists if not _same(tuple(list.__iter__(each)), old)}
        uncounted = zip(self._uncounted, self._were, strict=True)
        found |= {(id(each.owner), LENGTH) for each, old in uncounted if not _same(tuple(each.read()), old)}
        return found | self.tensors.different()

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


def _same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))
