"""Whether nothing at all was written to some objects, asked in one call that reads some words of memory of each.

To read a word of an object from memory that nothing else is read from takes a tenth of a microsecond; one after another, as Python reads,
these add up to half a millisecond for a model of 300 weights, and side by side, as a loop in C++ reads, to a tenth of that. It says only
that nothing was changed; what was, and whether it matters, is found by whoever looks at the objects themselves.

Where an object keeps such a word is the interpreter's and PyTorch's affair. It is tried out where this runs, and where it is not as
expected there is no such watch.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from autosched.runtime.dict_counts import counts_every_write
from autosched.runtime.native.build import Library, native_library
from autosched.runtime.native.dict_words import word_of_writes

# Where CPython has an object's class, the size of a dictionary or a list, and where a list's items are.
_CLASS, _SIZE, _ITEMS = 8, 16, 24
_SIZE_OF_LIST = 40
# And the dictionary of its attributes once somebody has asked for it, where its class leaves that to the interpreter.
_ATTRIBUTES, _MANAGED = -24, 1 << 4


@dataclass(frozen=True, slots=True)
class Watched:
    """What is watched.

    Args:
        objects: may become of another class, or get other attributes, all at once.
        sized: dictionaries and lists that may become longer or shorter.
        tables: dictionaries that may be written to.
        placed: strided tensors that may get other memory.
        counted: tensors that may be changed in place, or become other tensors.
        lists: may get other items; among ``sized``.
        words: addresses of words in the memory of ``placed``, which may be written to.
    """

    objects: Sequence[object] = ()
    sized: Sequence[dict[Any, Any] | list[Any]] = ()
    tables: Sequence[dict[Any, Any]] = ()
    placed: Sequence[torch.Tensor] = ()
    counted: Sequence[torch.Tensor] = ()
    lists: Sequence[list[Any]] = ()
    words: Sequence[int] = ()


class NativeWatch:
    """Compares with what there was when this was made.

    Args:
        library: what was built of ``lanes.cpp``.
        addresses: words in memory of objects in ``watched``, which is held.

    Raises:
        RuntimeError: if a tensor has no memory, or no count.
    """

    __slots__ = ("__weakref__", "_handle", "_unchanged", "_watched")

    def __init__(self, library: Library, addresses: list[int], watched: Watched) -> None:
        self._watched = watched
        self._unchanged = library.unchanged
        self._handle: int = library.watch(addresses, list(watched.placed), list(watched.counted), _inner(watched))
        weakref.finalize(self, library.delete_watch, self._handle).atexit = False

    def unchanged(self) -> bool:
        """True only if nothing of all this was changed; false may also mean that it was changed back, or written anew."""
        return self._unchanged(self._handle) == 1


def can_watch() -> bool:
    """Whether there are such watches here: native lanes were built, and objects are as expected."""
    return _means() is not None


def native_watch(watched: Watched) -> NativeWatch | None:
    """A watch that begins now, if there can be one."""
    if (means := _means()) is None:
        return None
    library, place = means
    if not all(map(_has_attributes, watched.objects)):
        return None
    try:
        return NativeWatch(library, _words(library, place, watched), watched)
    except RuntimeError:
        return None


def _words(library: Library, place: int, watched: Watched) -> list[int]:
    return [
        *(id(each) + offset for each in watched.objects for offset in (_CLASS, _ATTRIBUTES)),
        *(id(each) + _SIZE for each in watched.sized),
        *(id(each) + _ITEMS for each in watched.lists),
        *(word_of_writes(library, table) for table in watched.tables),
        # Most are in both, and one look at each will do.
        *{id(tensor) + place for tensor in (*watched.placed, *watched.counted)},
    ]


def _inner(watched: Watched) -> list[int]:
    """Words that are there as long as no other has changed: of a list's items, and of tensors."""
    items = (_word(id(each) + _ITEMS) + 8 * place for each in watched.lists for place in range(list.__len__(each)))
    return [*items, *watched.words]


def _means() -> tuple[Library, int] | None:
    """The library, and where a tensor of Python's has the address of what it stands for; ``None`` if there are no watches here."""
    library = native_library()
    place = _place_in_tensors(library) if library is not None and _as_expected(library) else None
    return None if library is None or place is None else (library, place)


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _has_attributes(thing: object) -> bool:
    """Whether the dictionary of its attributes is where it is looked for."""
    # No read before an object's own memory.
    return bool(type(thing).__flags__ & _MANAGED) and id(thing.__dict__) == _word(id(thing) + _ATTRIBUTES)


@lru_cache(maxsize=1)
def _as_expected(library: Library) -> bool:
    """Whether this interpreter has classes, attributes and sizes where they are read here, and every write to a dictionary counts."""
    table: dict[str, int] = {"a": 1}
    # No read beyond an object's own memory.
    if min(dict.__basicsize__, OrderedDict.__basicsize__, list.__basicsize__) < _SIZE + 8 or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    modules = (torch.nn.Identity(), torch.nn.ReLU())
    numbers = [1, 2, 3]
    sizes: tuple[dict[str, int] | list[int], ...] = ({}, table, OrderedDict(), OrderedDict(a=1, b=2), [], numbers)
    return (
        all(_word(id(each) + _CLASS) == id(type(each)) for each in (table, *modules))
        and all(map(_has_attributes, modules))
        and all(_word(id(each) + _SIZE) == len(each) for each in sizes)
        and list.__basicsize__ == _SIZE_OF_LIST
        and [_word(_word(id(numbers) + _ITEMS) + 8 * place) for place in range(3)] == list(map(id, numbers))
        and counts_every_write(lambda each: _word(word_of_writes(library, each)))
    )


@lru_cache(maxsize=1)
def _place_in_tensors(library: Library) -> int | None:
    """Where a tensor of Python's has the address of what it stands for, if that can be found."""
    plain = torch.ones(2, device="cpu")
    tensors = [plain, plain.view(1, 2), torch.nn.Parameter(plain), torch.ones((), device="cpu", requires_grad=True) * 2]
    places = set(range(object.__basicsize__, torch._C.TensorBase.__basicsize__ - 7, 8))
    for tensor, address in zip(tensors, library.implementations(tensors), strict=True):
        places = {place for place in places if _word(id(tensor) + place) == address}
    return min(places, default=None)
