"""Objects that PyTorch does not take apart, in a model's inputs and outputs: caches of transformers, plain dataclasses, dictionaries with
tuples as keys.

Each stands as an :class:`Opened` node in what is written down: its class by name, and what it holds as children. Nothing is registered
for a user's own class, so that whoever registers it with PyTorch later finds it free. A class is only ever one of the closed list or a
dataclass that this process has imported already, and no code of the class runs to make an object of it.

An object that a model is given has a number, and one that comes back is marked with it: then the caller gets the very object, changed as
the model changes it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autosched.core.errors import UnsupportedGraph
from autosched.core.imported import imported_class
from autosched.core.opened import DICTIONARY, OPENED, PLAIN, Form, Mark, read_context, read_key

_CACHES = "transformers.cache_utils"
_KEYS = frozenset((bool, int, float, str))
_LEAVES = frozenset((torch.Tensor, torch.nn.Parameter, *PLAIN))
_CLOSED = frozenset((list, tuple, *_LEAVES))
# What an object says of itself that one of its tensors says too: read off that tensor, so that a schedule is for no device by number.
_OF_A_TENSOR = {torch.dtype: "dtype", torch.device: "device"}

_Marker = Callable[[object], Mark]


class Opened:
    """An object, taken apart.

    Args:
        mark: ``()``, or the number of the object among those that the model is given, and a 1 behind it if the model changes it.
        children: what it holds, in the order of ``form.names``.
    """

    __slots__ = ("children", "form", "mark")

    def __init__(self, form: Form, mark: Mark, children: Iterable[Any]) -> None:
        self.form = form
        self.mark = mark
        self.children = list(children)


def _flatten(item: Opened) -> tuple[list[Any], str]:
    return item.children, json.dumps([item.form.kind, item.form.names, item.form.notes, item.mark])


def _flatten_with_keys(item: Opened) -> tuple[list[tuple[Any, Any]], str]:
    children, context = _flatten(item)
    return [(pytree.SequenceKey(place), child) for place, child in enumerate(children)], context


def _unflatten(children: Iterable[Any], context: str) -> Opened:
    return Opened(*read_context(context), children)


pytree.register_pytree_node(Opened, _flatten, _unflatten, serialized_type_name=OPENED, flatten_with_keys_fn=_flatten_with_keys)


# From objects to nodes.


def _nothing(item: object) -> Mark:
    return ()


def pack(tree: Any, marker: _Marker = _nothing) -> Any:
    """``tree`` with a node for each object of ours; ``tree`` itself if it has none."""
    leaves, spec = pytree.tree_flatten(tree, is_leaf=_is_ours)
    if not any(_is_ours(leaf) for leaf in leaves):
        return tree
    return rebuild(spec, iter([_packed(leaf, marker) for leaf in leaves]), {})


def pack_call(call: Any) -> Any:
    """As :func:`pack`, with every object numbered in the order in which it is met."""
    count = itertools.count()
    return pack(call, lambda item: (next(count),))


def _packed(leaf: Any, marker: _Marker) -> Any:
    found = open_object(leaf)
    if found is None:
        return leaf
    form, children = found
    # Before what it holds: an object comes before its parts.
    mark = marker(leaf) if form.kind != DICTIONARY else ()
    return Opened(form, mark, [pack(child, marker) for child in children])


def objects_in(tree: Any) -> list[Any]:
    """Every object of ours in ``tree`` that is not a dictionary, in the order in which :func:`pack_call` numbers them."""
    found: list[Any] = []
    _find(tree, found)
    return found


def _find(tree: Any, found: list[Any]) -> None:
    opened: dict[int, tuple[Form, list[Any]]] = {}

    def is_ours(item: Any) -> bool:
        form = open_object(item)
        if form is not None:
            opened[id(item)] = form
        return form is not None

    for leaf in pytree.tree_leaves(tree, is_leaf=is_ours):
        if (item := opened.get(id(leaf))) is None:
            continue
        form, children = item
        if form.kind != DICTIONARY:
            found.append(leaf)
        for child in children:
            if type(child) not in _LEAVES:
                _find(child, found)


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
    held = _held(item)
    if held is None:
        return None
    form_name = f"{kind.__module__}.{kind.__qualname__}"
    notes = {name: note for name, value in held.items() if (note := _note(name, value, held)) is not None}
    names = tuple(name for name in held if name not in notes)
    return Form(form_name, names, tuple(notes.values())), [held[name] for name in names]


def _is_ours(item: Any) -> bool:
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


def _held(item: Any) -> dict[str, Any] | None:
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
    if type(item) in _LEAVES:
        return item if isinstance(item, torch.Tensor) else None
    return next((leaf for leaf in pytree.tree_leaves(item) if isinstance(leaf, torch.Tensor)), None)


# From nodes to objects.


def unpack(tree: Any, given: MutableMapping[int, Any] | None = None) -> Any:
    """The opposite of :func:`pack`: as :func:`rebuild` of its leaves."""
    leaves, spec = pytree.tree_flatten(tree)
    return rebuild(spec, iter(leaves), {} if given is None else given)


def rebuild(spec: pytree.TreeSpec, leaves: Iterator[Any], given: MutableMapping[int, Any]) -> Any:
    """The nested containers of ``spec`` with these leaves: as ``tree_unflatten``, but with objects for nodes, and ``torch.Size`` kept.

    Args:
        given: objects by number. One that is there is returned itself, changed as its node says; what is made is added.

    Raises:
        UnsupportedGraph: if a class is not there in this process, or is not what the nodes say.
    """
    if spec.is_leaf():
        return next(leaves)
    children = [rebuild(child, leaves, given) for child in spec.children()]
    return _made(*read_context(spec.context), children, given) if spec.type is Opened else _container(spec, children)


def rebuild_packed(spec: pytree.TreeSpec, leaves: Iterator[Any]) -> Any:
    """As :func:`rebuild`, with the nodes left as they are."""
    if spec.is_leaf():
        return next(leaves)
    return _container(spec, [rebuild_packed(child, leaves) for child in spec.children()])


def _container(spec: pytree.TreeSpec, children: list[Any]) -> Any:
    return torch.Size(children) if spec.type is torch.Size else pytree.SUPPORTED_NODES[spec.type].unflatten_fn(children, spec.context)


def _made(form: Form, mark: Mark, children: list[Any], given: MutableMapping[int, Any]) -> Any:
    if form.kind == DICTIONARY:
        return {read_key(name): child for name, child in zip(form.names, children, strict=True)}
    found = given.get(mark[0]) if mark else None
    if found is not None and len(mark) == 1:
        return found
    held = dict(zip(form.names, children, strict=True))
    for name, what, of_what in form.notes:
        held[name] = class_of(of_what) if what == "class" else getattr(_first_tensor(held.get(of_what)), what, None)
    if found is None:
        found = _new(class_of(form.kind), held)
        if mark:
            given[mark[0]] = found
    else:
        _change(found, held)
    return found


def class_of(name: str) -> type[Any]:
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


def _new(kind: type[Any], held: Mapping[str, Any]) -> Any:
    made = object.__new__(kind)
    if dataclasses.is_dataclass(kind) and {field.name for field in dataclasses.fields(kind)} != held.keys():
        raise UnsupportedGraph(f"the dataclass {kind.__qualname__} has other fields here than where the schedule was made: {list(held)}")
    _set(made, held)
    return made


def _set(item: Any, held: Mapping[str, Any]) -> None:
    """Set attributes without a line of the class's own code, frozen or not."""
    if hasattr(item, "__dict__"):
        item.__dict__.update(held)
        return
    for name, value in held.items():
        object.__setattr__(item, name, value)


def _change(item: Any, held: Mapping[str, Any]) -> None:
    """Make ``item`` hold this, in the lists and dictionaries that it has: the caller may have a hand on them."""
    settled: dict[str, Any] = {}
    for name, value in held.items():
        before = getattr(item, name, None)
        if type(before) is type(value) is list:
            before[:] = value
        elif type(before) is type(value) is dict:
            before.clear()
            before.update(value)
        else:
            settled[name] = value
    _set(item, settled)


def difference_of_objects(given: pytree.TreeSpec, expected: pytree.TreeSpec) -> str:
    """In what the first object of a call that is not as expected differs; an empty string if none does, or something around it."""
    if given.is_leaf() or expected.is_leaf() or given.type is not expected.type:
        return ""
    if given.type is Opened:
        mine, theirs = read_context(given.context)[0], read_context(expected.context)[0]
        if mine.kind != theirs.kind:
            return f"the call has a {mine.kind} where the schedule was made for a {theirs.kind}"
        if mine != theirs:
            notes = {note[0] for note in set(mine.notes) ^ set(theirs.notes)}
            names = ", ".join(sorted(notes | (set(mine.names) ^ set(theirs.names)))) or "the order of its keys"
            return f"the {mine.kind} of the call differs from the one that the schedule was made for in {names}"
    pairs = zip(given.children(), expected.children(), strict=False)
    return next((found for one, other in pairs if (found := difference_of_objects(one, other))), "")


# What a model does to what it is given.


class Watch:
    """What a model does to the containers that it is given, seen from before and after a call.

    Args:
        call: the arguments, before the call.
        given: every object in them by number.
    """

    def __init__(self, call: Any, given: Mapping[int, Any]) -> None:
        self._call = call
        self._given = dict(given)
        self._before = self._look()

    def packed(self, answer: Any) -> Any:
        """The model's answer, packed, with a mark on every object that it was given.

        Raises:
            UnsupportedGraph: if it changed something that it does not return.
        """
        before, after = self._before, self._look()
        if not _same(before[-1], after[-1]):
            raise UnsupportedGraph(
                "the model changes a list or a dictionary that it is given; expected one that leaves its arguments as they are. Copy it "
                "in the model, and return what was added."
            )
        changed = {number: not _same(before[number], after[number]) for number in self._given}
        marks = {id(item): (number, 1) if changed[number] else (number,) for number, item in self._given.items()}
        returned = {id(item) for item in objects_in(answer)}
        for number, item in self._given.items():
            if changed[number] and id(item) not in returned:
                raise UnsupportedGraph(
                    f"the model changes the {type(item).__name__} that it is given and does not return it; expected one that returns it, "
                    "so that what becomes of it is part of the answer (use_cache=True for models of transformers)."
                )
        return pack(answer, lambda item: marks.get(id(item), ()))

    def _look(self) -> dict[int, tuple[list[Any], Any]]:
        """What each object holds, by number, and at -1 the call itself; objects within are told by which they are."""
        found = {number: _shallow(_held(item)) for number, item in self._given.items()}
        found[-1] = _shallow(self._call)
        return found


def _shallow(tree: Any) -> tuple[list[Any], Any]:
    leaves, spec = pytree.tree_flatten(tree, is_leaf=lambda item: type(item) is not dict and _is_ours(item))
    return leaves, spec


def _same(one: tuple[list[Any], Any], other: tuple[list[Any], Any]) -> bool:
    return one[1] == other[1] and all(
        a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and not _is_ours(a) and repr(a) == repr(b))
        for a, b in zip(one[0], other[0], strict=True)
    )
