"""The objects that PyTorch does not take apart and this package does: what each holds, and one made of that again.

They are caches of transformers, plain dataclasses, and dictionaries with tuples as keys. Nothing is registered for a user's own class, so
that whoever registers it with PyTorch later finds it free. A class is only ever one of the closed list or a dataclass that this process has
imported already, and no code of the class runs to make an object of it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autosched.core.errors import UnsupportedGraph
from autosched.core.imported import imported_class
from autosched.core.opened import DICTIONARY, PLAIN, Form, read_key

LEAVES = frozenset((torch.Tensor, torch.nn.Parameter, *PLAIN))
"""What holds nothing."""

_CACHES = "transformers.cache_utils"
_KEYS = frozenset((bool, int, float, str))
_CLOSED = frozenset((list, tuple, *LEAVES))
# What an object says of itself that one of its tensors says too: read off that tensor, so that a schedule is for no device by number.
_OF_A_TENSOR = {torch.dtype: "dtype", torch.device: "device"}


def open_object(item: Any) -> tuple[Form, list[Any]] | None:
    """The form of an object of ours, and what it holds; ``None`` for anything else."""
    kind = type(item)
    if kind in _CLOSED:
        return None
    if kind is dict:
        if all(type(key) in _KEYS for key in item):
            return None
        try:
            return Form(DICTIONARY, tuple(json.dumps(_key(key)) for key in item)), list(item.values())
        except TypeError:
            return None
    if not _is_accepted(kind):
        return None
    held = held_by(item)
    if held is None:
        return None
    form_name = f"{kind.__module__}.{kind.__qualname__}"
    notes = {name: note for name, value in held.items() if (note := _note(name, value, held)) is not None}
    names = tuple(name for name in held if name not in notes)
    return Form(form_name, names, tuple(notes.values())), [held[name] for name in names]


def opener_of(form: Form) -> Callable[[Any], list[Any] | None]:
    """What an object of this form holds, and ``None`` of any other: as :func:`open_object`, in a fraction of the time, for every call.

    Of a cache, whether the tensor that a note names still says what the note is about; whether one before it says so too is seen in that
    one's own dtype and device, which whoever takes a call apart compares.
    """
    if not form.kind.startswith(f"{_CACHES}."):

        def opened(item: Any) -> list[Any] | None:
            found = open_object(item)
            return found[1] if found is not None and found[0] == form else None

        return opened
    names, notes, count = form.names, form.notes, len(form.names) + len(form.notes)
    kinds: set[type[Any]] = set()

    def opened_cache(item: Any) -> list[Any] | None:
        kind = type(item)
        if kind not in kinds:
            if f"{kind.__module__}.{kind.__qualname__}" != form.kind or not _is_accepted(kind):
                return None
            kinds.add(kind)
        own = item.__dict__
        if len(own) != count:
            return None
        try:
            for name, what, of in notes:
                value = own[name]
                if _OF_A_TENSOR.get(type(value)) != what:
                    if _note(name, value, own) != (name, what, of):
                        return None
                elif getattr(_first_tensor(own[of]), what, None) != value:
                    return None
            return [own[name] for name in names]
        except KeyError:
            return None

    return opened_cache


def is_ours(item: Any) -> bool:
    """Whether :func:`open_object` has anything to say of it."""
    return open_object(item) is not None


def _key(key: object) -> object:
    if isinstance(key, tuple):
        return [_key(part) for part in key]
    if type(key) not in PLAIN:
        raise TypeError(f"a key of type {type(key).__name__}")
    return key


def _is_accepted(kind: type[Any]) -> bool:
    if kind.__module__ == _CACHES and str(kind.__name__).endswith(("Cache", "Layer")):
        # What is asked at every call, at every layer.
        return getattr(sys.modules.get(_CACHES), "__dict__", {}).get(kind.__name__) is kind
    name = f"{kind.__module__}.{kind.__qualname__}"
    made_by: object = kind.__new__
    # A subclass of tuple, say, is more than its attributes.
    if made_by is not object.__new__ or imported_class(name) is not kind:
        return False
    if not dataclasses.is_dataclass(kind) or issubclass(kind, torch.nn.Module):
        return False
    # What was registered with a name is taken as it was registered.
    registered = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    nameless = getattr(pytree, "NO_SERIALIZED_TYPE_NAME_FOUND", None)
    return registered is None or registered.serialized_type_name == nameless


def held_by(item: Any) -> dict[str, Any] | None:
    """An object's attributes by name; ``None`` if it is a dataclass with more or less than its fields."""
    own = getattr(item, "__dict__", {})
    if type(item).__module__ == _CACHES:
        # Which was set first says nothing.
        return {name: own[name] for name in sorted(own)}
    names = [field.name for field in dataclasses.fields(item)]
    if not own.keys() <= set(names) or not all(hasattr(item, name) for name in names):
        return None
    return {name: getattr(item, name) for name in names}


def _note(name: str, value: object, held: Mapping[str, Any]) -> tuple[str, str, str] | None:
    what = _OF_A_TENSOR.get(type(value))
    if what is not None:
        found = next((other for other, item in held.items() if getattr(_first_tensor(item), what, None) == value), None)
        return (name, what, found) if found is not None else None
    if isinstance(value, type) and _is_accepted(value):
        return name, "class", f"{value.__module__}.{value.__qualname__}"
    return None


def _first_tensor(item: Any) -> torch.Tensor | None:
    if type(item) in LEAVES:
        return item if isinstance(item, torch.Tensor) else None
    return next((leaf for leaf in pytree.tree_leaves(item) if isinstance(leaf, torch.Tensor)), None)


def make_object(form: Form, children: Sequence[Any]) -> Any:
    """An object of this form that holds ``children``; the opposite of :func:`open_object`.

    Raises:
        UnsupportedGraph: if its class is not there in this process, or is not what the form says.
    """
    if form.kind == DICTIONARY:
        return {read_key(name): child for name, child in zip(form.names, children, strict=True)}
    held = _attributes(form, children)
    kind = _class_of(form.kind)
    if dataclasses.is_dataclass(kind) and {field.name for field in dataclasses.fields(kind)} != held.keys():
        raise UnsupportedGraph(f"the dataclass {kind.__qualname__} has other fields here than where the schedule was made: {list(held)}")
    made = object.__new__(kind)
    _set(made, held)
    return made


def change_object(item: Any, form: Form, children: Sequence[Any]) -> None:
    """Make ``item`` hold this, in the lists and dictionaries that it has: the caller may have a hand on them.

    Raises:
        UnsupportedGraph: as :func:`make_object`, of a class that it is to hold.
    """
    settled: dict[str, Any] = {}
    for name, value in _attributes(form, children).items():
        before = getattr(item, name, None)
        if type(before) is type(value) is list:
            before[:] = value
        elif type(before) is type(value) is dict:
            before.clear()
            before.update(value)
        else:
            settled[name] = value
    _set(item, settled)


def _attributes(form: Form, children: Sequence[Any]) -> dict[str, Any]:
    held = dict(zip(form.names, children, strict=True))
    for name, what, of_what in form.notes:
        held[name] = _class_of(of_what) if what == "class" else getattr(_first_tensor(held.get(of_what)), what, None)
    return held


def _class_of(name: str) -> type[Any]:
    """The class of that name, if objects of it are ours.

    Raises:
        UnsupportedGraph: if it is not, or if its module has not been imported.
    """
    kind = imported_class(name)
    if not isinstance(kind, type) or not _is_accepted(kind):
        raise UnsupportedGraph(
            f"the model's call or answer holds a {name[:200]!r}, which this process has not imported, or which is neither a dataclass nor "
            "a cache of transformers. Import the model's module first."
        )
    return kind


def _set(item: Any, held: Mapping[str, Any]) -> None:
    """Set attributes without a line of the class's own code, frozen or not."""
    if hasattr(item, "__dict__"):
        item.__dict__.update(held)
        return
    for name, value in held.items():
        object.__setattr__(item, name, value)
