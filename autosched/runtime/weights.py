"""Noticing that a model is no longer the one a schedule was bound to: changed or replaced weights, modules, modes, hooks.

Everything is read at every call, so every reading is one pass of C code over flat lists. A large model leaves nothing of this in the
processor's caches, and then what counts is how many places in memory are read: of a dictionary that nobody wrote to, one. Where native
lanes were built, one call tells that nothing was changed (``native.watch``), and only after something was is any of this looked at.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain
from operator import attrgetter, getitem, is_, itemgetter
from typing import Any

import torch

from autosched.core.parts import parts_of, whole_of
from autosched.core.program import ConstantSource, Program
from autosched.runtime.dict_counts import DictCounts
from autosched.runtime.native.watch import NativeWatch, Watched, can_watch, native_watch
from autosched.runtime.optimizer_steps import OptimizerSteps

_Entry = tuple[dict[str, Any], str]

_attributes_of = attrgetter("__dict__")
_version_of = attrgetter("_version")
_training_of = attrgetter("training")
_training_entry = itemgetter("training")
_values_of = dict.values
_END = object()
_address_of = torch.Tensor.data_ptr
_strides_of = torch.Tensor.stride
_size_of = torch.Tensor.numel
_OF_EVERY_MODULE = frozenset(torch.nn.Module().__dict__)
# Of a dictionary that holds settings; a larger one holds data.
_MOST_ENTRIES = 64


class Change(enum.StrEnum):
    """What happened to the model since the last look, the gravest first."""

    MODE = "mode"  # a module went into or out of training mode
    HOOKS = "hooks"  # forward hooks were added or removed
    STRUCTURE = "structure"  # a module, parameter, buffer or setting was replaced, added or removed
    MOVED = "moved"  # a parameter has other memory
    CONTENT = "content"  # a parameter was changed in place
    NONE = "none"


class ModelWatch:
    """Compares a model with how it was when this was made; memory and contents of weights, with the last :meth:`accept`.

    In-place changes are seen through ``Tensor._version``, and steps of optimizers by themselves. Not seen, because PyTorch counts it
    nowhere, is an in-place change through ``parameter.data``, NumPy, a collective of ``torch.distributed`` or another process; nor are
    changes of a list that leave its length, inside what lists and dictionaries hold, of a class's methods, and of the settings of
    PyTorch's own modules (``BatchNorm2d.eps``). Whoever makes one calls ``refresh`` on the loaded model.

    Args:
        model: the module that was tuned.
        program: what was captured from it; its bindings say which tensors matter.
        frozen: the caller vouches that modules and weights stay as they are; only modes and hooks are then looked at.

    Raises:
        UnwatchableModel: if a parameter carries no version counter (it was made under ``torch.inference_mode``).
    """

    def __init__(self, model: torch.nn.Module, program: Program, *, frozen: bool = False) -> None:
        self._frozen = frozen
        modules = list(model.modules())
        self._modes = _Modes(modules_with_a_mode(model))
        self._hooks = _Hooks(modules)
        self._settings = _Settings(modules)
        # A scripted module keeps its parts elsewhere than in dictionaries, and nobody replaces them there.
        plain = [module for module in modules if isinstance(module._modules, dict)]
        self._children = _Entries([module._modules for module in plain if module._modules])
        self._childless = [module._modules for module in plain if not module._modules]
        parts: dict[int, _Entry] = {id(module._modules): (module.__dict__, "_modules") for module in plain if "_modules" in module.__dict__}
        owners: dict[int, dict[str, Any]] = {}
        # Most modules own several tensors, and to find one by its name walks the whole way to it.
        owner_of = lru_cache(maxsize=None)(model.get_submodule)
        self._bound: list[_Entry] = []
        self._tensors: list[torch.Tensor] = []
        for binding in program.bindings:
            if binding.source is ConstantSource.LITERAL:
                continue
            name, part = _whole_here(binding.name, owner_of)
            owner_name, _, key = name.rpartition(".")
            owner = owner_of(owner_name)
            kind = "_parameters" if binding.source is ConstantSource.PARAMETER else "_buffers"
            table: dict[str, Any] = getattr(owner, kind)
            owners[id(table)] = table
            if kind in owner.__dict__:
                parts[id(table)] = owner.__dict__, kind
            self._bound.append((table, key))
            self._tensors.append(table[key] if part is None else parts_of(table[key])[part])
        self._parts = _Items(parts.values())
        # A parameter may be several tensors; it is replaced as a whole.
        self._wholes = [table[key] for table, key in self._bound]
        # A sparse tensor has no one place in memory.
        self._placed = [tensor for tensor in self._tensors if tensor.layout is torch.strided]
        self._steps = OptimizerSteps(() if frozen else self._wholes)
        if not frozen and any(tensor.is_inference() for tensor in self._tensors):
            raise UnwatchableModel(
                "its parameters were made under torch.inference_mode, so changes to them could not be noticed; make them outside of it"
            )
        self._weights = _Entries([table for table in owners.values() if isinstance(table, dict)])
        # That one is empty is seen sooner than its count is read.
        self._empty = [*self._hooks.empty, *self._childless]
        tables = (self._hooks.filled, self._children, self._weights)
        attributes = [*(module.__dict__ for module in modules), *self._settings.dictionaries]
        self._counts = DictCounts([*attributes, *chain.from_iterable(each.tables for each in tables)])
        self._settled: int | None = None
        self._native: NativeWatch | None = None
        self._watchable = not self._modes.elsewhere and can_watch()
        self._calm = True
        self.accept()

    def accept(self) -> None:
        """Take the contents of all parameters, and where they are, for what the schedule is bound to."""
        self._native = None
        if self._frozen:
            return
        # Before the counts are read: what is changed meanwhile is then seen at the next call.
        self._steps.taken = False
        # Held, because an address says nothing once its memory was given back: the next parameter may get it.
        self._held = [tensor.detach() for tensor in self._tensors]
        self._places = _places_of(self._placed)
        self._versions = list(map(_version_of, self._tensors))

    def settle(self) -> bool:
        """Call after the model ran: what it sets itself in ``forward`` is nothing to watch. Whether it did set anything."""
        self._native = None
        return self._settings.settle()

    def change(self) -> Change:
        """The gravest change."""
        if self._native is not None and not self._steps.taken and self._native.unchanged():
            return Change.NONE
        # One that is written to between any two calls, were it only its counter of calls, costs less without.
        restless, self._native = self._native is not None, None
        # Before the look: what is written during it is then seen at the next call.
        native = native_watch(self._watched()) if self._watchable and self._calm and not restless else None
        found = self._look()
        self._calm = found is Change.NONE and not restless
        self._native = native if self._calm else None
        return found

    def _watched(self) -> Watched:
        """All that a look looks at."""
        if self._frozen:
            return Watched(sized=self._hooks.empty, tables=[*self._modes.tables, *self._hooks.filled.tables])
        counted = [*self._tensors, *self._settings.tensors]
        placed = [*self._placed, *self._settings.placed]
        sized = [*self._empty, *self._settings.sized]
        return Watched(self._settings.modules, sized, self._counts.tables, placed, counted)

    def _look(self) -> Change:
        if self._frozen:
            return self._of_calls()
        # Before the look: what is written during it is then seen at the next call.
        counts = self._counts.now()
        if counts is None or counts != self._settled or self._changed_elsewhere():
            change = self._of_calls()
            if change is Change.NONE:
                change = self._of_parts()
            if change is not Change.NONE:
                return change
            self._settled = counts
        if _places_of(self._placed) != self._places:
            return Change.MOVED
        if self._steps.taken or list(map(_version_of, self._tensors)) != self._versions:
            return Change.CONTENT
        return Change.NONE

    def _changed_elsewhere(self) -> bool:
        """Whether anything was changed that is in no counted dictionary."""
        return any(self._empty) or self._settings.changed_elsewhere() or self._modes.changed_elsewhere()

    def _of_calls(self) -> Change:
        """What was changed of how the model is called."""
        if self._modes.changed():
            return Change.MODE
        return Change.HOOKS if self._hooks.changed() else Change.NONE

    def _of_parts(self) -> Change:
        """Whether anything was replaced, added or removed."""
        if self._parts.changed() or self._children.changed() or any(self._childless) or self._settings.changed():
            return Change.STRUCTURE
        if self._weights.changed():
            if any(_replaced(table, key, tensor) for (table, key), tensor in zip(self._bound, self._wholes, strict=True)):
                return Change.STRUCTURE
            # A neighbour that the program does not read.
            self._weights.accept()
        return Change.NONE


def modules_with_a_mode(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Modules that ``train()`` and ``eval()`` switch, each once.

    A program of ``torch.export`` is left out: it has the mode it was exported in, whatever its flags say, and answers both with an error.
    """
    seen: set[torch.nn.Module] = set()
    pending = [model]
    while pending:
        module = pending.pop()
        if module in seen or "train" in module.__dict__:
            continue
        seen.add(module)
        yield module
        pending += module.children()


def _whole_here(name: str, owner_of: Callable[[str], torch.nn.Module]) -> tuple[str, int | None]:
    """The parameter of the model that ``name`` stands for, and which part of it that is; None: all of it."""
    if (found := whole_of(name)) is None:
        return name, None
    try:
        # A parametrisation of the user's own has the names that export makes up.
        owner_of(name.rpartition(".")[0])
    except AttributeError:
        return found
    return name, None


def _replaced(table: dict[str, Any], key: str, tensor: torch.Tensor) -> bool:
    return isinstance(table, dict) and table.get(key) is not tensor


class _Modes:
    """Whether a module is in training mode."""

    __slots__ = ("elsewhere", "tables")

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        modules = list(modules)
        self.tables = [module.__dict__ for module in modules if "training" in module.__dict__]
        # A scripted module keeps the flag elsewhere.
        self.elsewhere = [module for module in modules if "training" not in module.__dict__]

    def changed(self) -> bool:
        try:
            return any(map(_training_entry, self.tables)) or self.changed_elsewhere()
        except KeyError:
            return True

    def changed_elsewhere(self) -> bool:
        """What no dictionary says."""
        return bool(self.elsewhere) and any(map(_training_of, self.elsewhere))


class _Hooks:
    """Whether modules, and dictionaries of theirs, most of them empty, hold the hooks that they held."""

    __slots__ = ("_owners", "empty", "filled")

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        names = ("_forward_hooks", "_forward_pre_hooks")
        tables = [*(getattr(module, name) for module in modules for name in names), *_hooks_of_all_modules()]
        self._owners = _Items([(module.__dict__, name) for module in modules for name in names if name in module.__dict__])
        self.empty = [table for table in tables if not table]
        self.filled = _Entries([table for table in tables if table])

    def changed(self) -> bool:
        return any(self.empty) or self.filled.changed() or self._owners.changed()


def _hooks_of_all_modules() -> list[dict[Any, Any]]:
    names = ("_global_forward_hooks", "_global_forward_pre_hooks")
    return [table for name in names if isinstance(table := getattr(torch.nn.modules.module, name, None), dict)]


class _Settings:
    """Whether modules are of the classes they were of, have as many attributes, and, if they are the user's own, the same values there.

    Of a tensor, whether it was changed in place, or lies elsewhere; of a list, whether it became longer or shorter; of a dictionary,
    whether it holds what it held. Libraries note there what they have done to weights past all counts: peft, which adapters it has merged.

    PyTorch's own modules have a dozen attributes each that nobody changes; to look at them all would double the time of a look.
    """

    __slots__ = (
        "_contents", "_items", "_lengths", "_places", "_sizes", "_tables", "_types", "_versions", "dictionaries", "modules", "placed",
        "sized", "tensors",
    )  # fmt: skip

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self.modules = modules
        self._types = list(map(type, modules))
        self._tables = [module.__dict__ for module in modules]
        self._sizes = list(map(len, self._tables))
        own = [module.__dict__ for module in modules if not type(module).__module__.startswith("torch.")]
        self._take([(table, key) for table in own for key in table if key not in _OF_EVERY_MODULE])

    def _take(self, entries: list[_Entry]) -> None:
        self._items = _Items(entries)
        self.tensors = [item for item in self._items.values if isinstance(item, torch.Tensor) and not item.is_inference()]
        self._versions = list(map(_version_of, self.tensors))
        # One of a class of its own may have no memory.
        plain = [tensor for tensor in self.tensors if type(tensor) in (torch.Tensor, torch.nn.Parameter)]
        self.placed = [tensor for tensor in plain if tensor.layout is torch.strided]
        self._places = _places_of(self.placed)
        # Not every write to an empty dictionary is counted.
        self.sized = [item for item in self._items.values if type(item) is list or (type(item) is dict and not item)]
        self._lengths = list(map(len, self.sized))
        self.dictionaries = [item for item in self._items.values if type(item) is dict and 0 < len(item) <= _MOST_ENTRIES]
        self._contents = _Entries(self.dictionaries)

    def settle(self) -> bool:
        """Forget attributes that are no longer what they were, and count anew; whether there were any."""
        found = self.changed()
        self._sizes = list(map(len, self._tables))
        written = {id(item) for item, length in zip(self.sized, self._lengths, strict=True) if len(item) != length}
        if self._contents.changed():
            written |= set(map(id, self.dictionaries))
        self._take([(table, key) for table, key in self._items.left() if id(table[key]) not in written])
        return found

    def changed(self) -> bool:
        found = list(map(len, self._tables)) != self._sizes or self._items.changed() or self._contents.changed()
        return found or self.changed_elsewhere()

    def changed_elsewhere(self) -> bool:
        """What no dictionary says: classes of modules, that a module's attributes are all others, what is in tensors, how much in lists."""
        if list(map(type, self.modules)) != self._types or not all(map(is_, map(_attributes_of, self.modules), self._tables)):
            return True
        if self.sized and list(map(len, self.sized)) != self._lengths:
            return True
        # Most models have none of these, and to go over nothing takes its time too.
        if not self.tensors:
            return False
        return list(map(_version_of, self.tensors)) != self._versions or _places_of(self.placed) != self._places


def _places_of(tensors: list[torch.Tensor]) -> list[object]:
    """Where they lie, and how: the same memory may be read in another order, or less of it. To ask for shapes takes twice as long."""
    return [*map(_address_of, tensors), *map(_strides_of, tensors), *map(_size_of, tensors)]


class _Items:
    """Whether dictionaries hold, under some names, the very objects that they held."""

    __slots__ = ("_keys", "_tables", "values")

    def __init__(self, entries: Iterable[_Entry]) -> None:
        entries = list(entries)
        self._tables = [table for table, _ in entries]
        self._keys = [key for _, key in entries]
        self.values = list(map(getitem, self._tables, self._keys))

    def changed(self) -> bool:
        try:
            return bool(self._keys) and not all(map(is_, map(getitem, self._tables, self._keys), self.values))
        except KeyError:
            return True

    def left(self) -> list[_Entry]:
        """Those that hold what they held."""
        entries = zip(self._tables, self._keys, self.values, strict=True)
        return [(table, key) for table, key, old in entries if table.get(key, _END) is old]


class _Entries:
    """Whether dictionaries hold the very objects that they held, under the same names, in one pass over all of them."""

    __slots__ = ("_held", "_names", "tables")

    def __init__(self, tables: list[dict[str, Any]]) -> None:
        self.tables = tables
        self.accept()

    def accept(self) -> None:
        # The end is marked: an entry too few meets the mark, one too many is met by it.
        self._held = [*chain.from_iterable(map(_values_of, self.tables)), _END]
        self._names = [*chain.from_iterable(self.tables)]

    def changed(self) -> bool:
        if not self.tables:
            return False
        values = chain(chain.from_iterable(map(_values_of, self.tables)), (_END,))
        return not all(map(is_, values, self._held)) or [*chain.from_iterable(self.tables)] != self._names


class UnwatchableModel(Exception):
    """A model whose weights could change unseen; the loader keeps the model as it came."""
