"""Nested containers in a model's inputs and outputs that hold objects PyTorch does not take apart (``core.objects``).

Each object stands as an :class:`Opened` node in what is written down: its class by name, and what it holds as children.

An object that a model is given has a number, and one that comes back is marked with it: then the caller gets the very object, changed as
the model changes it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autosched.core.objects import LEAVES, change_object, is_ours, make_object, open_object
from autosched.core.opened import DICTIONARY, OPENED, Form, Mark, read_context

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
    leaves, spec = pytree.tree_flatten(tree, is_leaf=is_ours)
    if not any(is_ours(leaf) for leaf in leaves):
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

    def opens(item: Any) -> bool:
        form = open_object(item)
        if form is not None:
            opened[id(item)] = form
        return form is not None

    for leaf in pytree.tree_leaves(tree, is_leaf=opens):
        if (item := opened.get(id(leaf))) is None:
            continue
        form, children = item
        if form.kind != DICTIONARY:
            found.append(leaf)
        for child in children:
            if type(child) not in LEAVES:
                _find(child, found)


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
    return made_object(*read_context(spec.context), children, given) if spec.type is Opened else made_container(spec, children)


def rebuild_packed(spec: pytree.TreeSpec, leaves: Iterator[Any]) -> Any:
    """As :func:`rebuild`, with the nodes left as they are."""
    if spec.is_leaf():
        return next(leaves)
    return made_container(spec, [rebuild_packed(child, leaves) for child in spec.children()])


def map_packed(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """``tree`` with every tensor replaced, and nodes left as they are. PyTorch's own ``tree_map`` makes a tuple of a ``torch.Size``."""
    leaves, spec = pytree.tree_flatten(tree)
    return rebuild_packed(spec, iter([change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]))


def made_container(spec: pytree.TreeSpec, children: list[Any]) -> Any:
    """The container of one node of a tree, which is no :class:`Opened` one, or that node itself."""
    return torch.Size(children) if spec.type is torch.Size else pytree.SUPPORTED_NODES[spec.type].unflatten_fn(children, spec.context)


def made_object(form: Form, mark: Mark, children: list[Any], given: MutableMapping[int, Any]) -> Any:
    """The object of one :class:`Opened` node; ``given`` and errors as in :func:`rebuild`."""
    # A dictionary of the answer is always one of its own.
    number = mark[0] if mark and form.kind != DICTIONARY else None
    found = given.get(number) if number is not None else None
    if found is None:
        found = make_object(form, children)
        if number is not None:
            given[number] = found
    elif len(mark) > 1:
        change_object(found, form, children)
    return found
