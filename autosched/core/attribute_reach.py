"""What attributes and hooks of modules lead to: containers, settings, tensors, and modules that are no part of any other."""

from __future__ import annotations

import argparse
import enum
import sys
import types
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

Place = tuple[int, object]
"""Which container or tensor, by its identity, and the key of an item in it, or ``LENGTH``."""

LENGTH = object()
END = object()
OF_EVERY_MODULE = frozenset(torch.nn.Module().__dict__)
"""Attributes that every module has: its mode, hooks, and tables of its parts."""
# Of a container that holds settings; a larger one holds data.
MOST_ITEMS = 64
# A configuration of transformers has about a hundred attributes.
_MOST_ATTRIBUTES = 256
# What is held by what an attribute holds, and so on. Whoever keeps a trainer in his model does not want all of that watched.
_DEPTH = 3
_MOST_CONTAINERS = 64
_MOST_TENSORS = 256
_MOST_MODULES = 64
_NO_SETTINGS = (torch.nn.Module, torch.Tensor, enum.Enum, type)
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size))
_CONFIGURATIONS = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList, ChainMap)
# A logger, a lock or a counter of the standard library changes as it is used, and a schedule of autosched's may be an attribute, too.
_OF_NO_MODEL = sys.stdlib_module_names | {"torch", "autosched"}
_OF_A_MODULE = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True, slots=True)
class Uncounted:
    """A set, a queue, numbers in memory, the slots of an object or a function's variables: to see whether it has changed it must be read.

    Args:
        owner: which it is.
        read: what it holds now.
    """

    owner: object
    read: Callable[[], Iterable[object]]


@dataclass(slots=True)
class Reached:
    """All of it, each once, the nearest first."""

    dictionaries: list[dict[Any, Any]] = field(default_factory=list)
    lists: list[list[Any]] = field(default_factory=list)
    uncounted: list[Uncounted] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    hidden: list[torch.nn.Module] = field(default_factory=list)


def is_literal(value: object) -> bool:
    """Whether it is a number, a text, nothing, or a tuple of such: what a shape or a length is noted as."""
    return type(value) in _PLAIN or (isinstance(value, tuple) and all(map(is_literal, value)))


def put_item(table: dict[str, Any], key: str, value: object) -> None:
    """Put ``value`` at ``key``; for ``END``, take away what is there."""
    if value is END:
        dict.pop(table, key, None)
    else:
        dict.__setitem__(table, key, value)


def reach(values: Iterable[object], but: Set[Place] = frozenset(), known: Set[int] = frozenset()) -> Reached:
    """What ``values`` hold.

    Args:
        values: of attributes.
        but: places to leave out.
        known: identities of modules that are looked at elsewhere.
    """
    search = _Search(but, known)
    search.follow(values)
    for module in search.found.hidden[:]:
        search.open(module)
    return search.found


class _Search:
    """As :func:`reach`."""

    def __init__(self, but: Set[Place], known: Set[int]) -> None:
        self.found = Reached()
        self._but = but
        self._seen = set(known)
        self._modules = set(known)
        self._most_modules = len(known) + _MOST_MODULES
        self._opened = 0

    def follow(self, values: Iterable[object]) -> None:
        """The nearest first; once there is enough, only what tensors and modules are among these."""
        pending: deque[tuple[object, int]] = deque((value, 0) for value in values)
        while pending:
            value, depth = pending.popleft()
            # By its type: whether it is an instance, a proxy answers as what it stands for, which may be gone.
            kind = type(value)
            if kind in _PLAIN or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            if issubclass(kind, torch.Tensor):
                self._hold(cast("torch.Tensor", value), nearby=depth == 0)
            elif issubclass(kind, torch.nn.Module):
                self.found.hidden.append(cast("torch.nn.Module", value))
            elif (behind := _behind(value, kind)) is not None:
                pending.extend((each, depth) for each in behind)
            elif self._opened < _MOST_CONTAINERS:
                inside = [item for part in _parts(value) for item in self._inside(part, value)]
                if depth < _DEPTH:
                    pending.extend((item, depth + 1) for item in inside)

    def open(self, root: torch.nn.Module) -> None:
        """A module that is no part of the model as far as PyTorch knows (in a list, say), and its parts: what is in it, and its weights."""
        for module in root.modules():
            if len(self._modules) >= self._most_modules:
                return
            if id(module) in self._modules:
                continue
            self._modules.add(id(module))
            tables = [vars(module), *(vars(module).get(name) for name in _OF_A_MODULE)]
            for table in [table for table in tables if isinstance(table, dict) and dict.__len__(table) <= _MOST_ATTRIBUTES]:
                self.found.dictionaries.append(table)
                for item in dict.values(table):
                    if isinstance(item, torch.Tensor):
                        self._hold(item)

    def _hold(self, tensor: torch.Tensor, *, nearby: bool = False) -> None:
        if (nearby or len(self.found.tensors) < _MOST_TENSORS) and (id(tensor), LENGTH) not in self._but:
            self.found.tensors.append(tensor)

    def _inside(self, part: _Part, value: object) -> list[object]:
        """Take ``part`` of ``value`` for one to look at, unless it is too large; what is in it."""
        if isinstance(part, tuple):
            # Its items stay the same, and what these hold may not.
            inside = list(tuple.__iter__(part)) if tuple.__len__(part) <= MOST_ITEMS else []
            inside = [] if all(type(item) in _PLAIN for item in inside) else inside
            self._opened += bool(inside)
            return inside
        if isinstance(part, dict):
            if dict.__len__(part) > (MOST_ITEMS if part is value else _MOST_ATTRIBUTES):
                return []
            self.found.dictionaries.append(part)
            inside = [item for key, item in list(dict.items(part)) if (id(part), key) not in self._but]
        elif isinstance(part, list):
            self.found.lists.append(part)
            short = list.__len__(part) <= MOST_ITEMS and (id(part), LENGTH) not in self._but
            inside = list(list.__iter__(part)) if short else []
        else:
            inside = list(part.read()) if (id(part.owner), LENGTH) not in self._but else []
            if len(inside) > MOST_ITEMS:
                return []
            self.found.uncounted.append(part)
        self._opened += 1
        return inside


def is_plain(value: object) -> bool:
    """Whether it is a number, text or the like, which holds nothing; or ``END``, where nothing is."""
    return type(value) in _PLAIN or value is END


def hooks_of(module: torch.nn.Module) -> list[object]:
    """The functions that run before and after ``forward``."""
    tables = (vars(module).get(name) for name in ("_forward_hooks", "_forward_pre_hooks"))
    return [hook for table in tables if isinstance(table, dict) for hook in dict.values(table)]


_Part = dict[Any, Any] | list[Any] | tuple[Any, ...] | Uncounted


def _behind(value: Any, kind: type) -> list[object] | None:
    """What a method or a partial call stands for."""
    if issubclass(kind, types.MethodType):
        return [value.__self__, value.__func__]
    if issubclass(kind, partial):
        return [value.func, *value.args, value.keywords, *value.keywords.values()]
    return None


def _parts(value: object) -> Iterator[_Part]:
    """The container that ``value`` is, and its attributes if it may be a configuration; nothing that its class makes up is asked."""
    kind = type(value)
    if issubclass(kind, _NO_SETTINGS):
        return
    # Of classes that are derived from these, too: many a library's settings are a dictionary.
    if issubclass(kind, dict | list | tuple) and isinstance(value, dict | list | tuple):
        yield value
    elif issubclass(kind, set) and isinstance(value, set):
        yield Uncounted(value, partial(set.__iter__, value))
    elif issubclass(kind, deque) and isinstance(value, deque):
        yield Uncounted(value, partial(deque.__iter__, value))
    elif (read := _memory_of(value, kind)) is not None:
        yield Uncounted(value, _SameBytes(read))
    elif issubclass(kind, types.FunctionType) and isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    if kind.__module__.partition(".")[0] in _OF_NO_MODEL and kind not in _CONFIGURATIONS:
        return
    try:
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        table = None
    if type(table) is dict:
        yield table
    slots = [slot for each in kind.__mro__ for slot in vars(each).values() if isinstance(slot, types.MemberDescriptorType)]
    if slots:
        yield Uncounted(value, partial(_in_slots, value, slots))


def _memory_of(value: Any, kind: type) -> Callable[[], bytes | str] | None:
    """Reads the numbers that ``value`` keeps in memory of its own, if it has few."""
    if issubclass(kind, bytearray):
        return partial(bytearray.hex, value) if bytearray.__len__(value) <= MOST_ITEMS else None
    if issubclass(kind, array):
        return partial(array.tobytes, value) if array.__len__(value) <= MOST_ITEMS else None
    # Whoever holds an array of NumPy has imported it.
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray) and numpy.ndarray.size.__get__(value) <= MOST_ITEMS:
        return partial(numpy.ndarray.tobytes, value)
    return None


class _SameBytes:
    """Reads the very object of the first time as long as it is equal: what is read is compared by identity."""

    def __init__(self, read: Callable[[], bytes | str]) -> None:
        self._read = read
        self._first = read()

    def __call__(self) -> tuple[bytes | str]:
        now = self._read()
        return (self._first if now == self._first else now,)


def _parts_of_function(function: types.FunctionType) -> Iterator[_Part]:
    """What it has without being given it by a call: an adapter may be nothing but a hook and the variables around it."""
    # What a library's functions use, no owner of a model sets.
    if str(function.__module__).partition(".")[0] in _OF_NO_MODEL:
        return
    yield (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    names = [name for name in function.__code__.co_names if _may_be_set(function.__globals__.get(name, END))]
    # Many a library keeps plain functions in attributes, and to read nothing at each call takes its time too.
    if names or function.__closure__:
        yield Uncounted(function, partial(_variables, function, names))


def _in_slots(value: object, slots: Iterable[types.MemberDescriptorType]) -> list[object]:
    return [_in_slot(value, slot) for slot in slots]


def _in_slot(value: object, slot: types.MemberDescriptorType) -> object:
    try:
        return slot.__get__(value)
    except AttributeError:
        return END


def _may_be_set(value: object) -> bool:
    """Whether a variable that holds this is a setting: most hold modules, classes and other functions."""
    kind = type(value)
    if kind in _PLAIN or issubclass(kind, (torch.Tensor, torch.nn.Module, dict, list, tuple, set, deque)):
        return True
    return kind.__module__.partition(".")[0] not in _OF_NO_MODEL or kind in _CONFIGURATIONS


def _variables(function: types.FunctionType, names: Iterable[str]) -> list[object]:
    """What variables around ``function``, and those of its file in ``names``, hold now."""
    held = [_in_cell(cell) for cell in function.__closure__ or ()]
    return [*held, *(function.__globals__.get(name, END) for name in names)]


def _in_cell(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return END
