"""The call signature of a program, compiled: taking a call apart and putting an answer together without a general tree walk.

At batch size 1 a general walk over the containers costs as much as a few operators. Tuples, lists, dicts and objects are taken apart by
closures made once; whatever else a model may take goes the general way (``trees``), which is also what explains a mismatch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autosched.core.containers import Opened, made_container, made_object
from autosched.core.objects import opener_of
from autosched.core.opened import DICTIONARY, OPENED, read_context
from autosched.core.program import Argument, NonFinite, Program, Ref
from autosched.runtime.trees import python_value, structure_of


class Leaves(list[Any]):
    """Of a call, with the objects in it that are not dictionaries, numbered as ``core.containers.objects_in`` does."""

    __slots__ = ("objects",)

    def __init__(self, items: Iterable[Any] = ()) -> None:
        super().__init__(items)
        self.objects: list[Any] = []


_Take = Callable[[Any, Leaves], bool]
_Make = Callable[[Sequence[torch.Tensor], MutableMapping[int, Any]], Any]
_PLAIN = frozenset((bool, int, float, str, type(None)))


class CallReader:
    """Leaves of a call that has the containers of ``input_tree``.

    Args:
        input_tree: as in ``Program``.
    """

    __slots__ = ("_args", "_count", "_flat", "_names", "supported")

    def __init__(self, input_tree: str) -> None:
        args, kwargs = json.loads(input_tree)[1]["children_spec"]
        self._names: tuple[str, ...] = tuple(json.loads(kwargs["context"]))
        taken = [_taker(child) for child in (*args["children_spec"], *kwargs["children_spec"])]
        self._args: list[_Take] = [take for take in taken if take is not None]
        self.supported = len(self._args) == len(taken)
        self._count = len(args["children_spec"])
        self._flat = all(child["type"] is None for child in args["children_spec"]) and not self._names

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Leaves | None:
        """The leaves in the program's order, or ``None`` if this is another call (or one that only the general way understands)."""
        if len(args) != self._count or len(kwargs) != len(self._names):
            return None
        if self._flat:
            return Leaves(args)
        leaves = Leaves()
        for position, take in enumerate(self._args):
            if position < self._count:
                item = args[position]
            else:
                name = self._names[position - self._count]
                if name not in kwargs:
                    return None
                item = kwargs[name]
            if not take(item, leaves):
                return None
        return leaves


def _taker(node: Mapping[str, Any]) -> _Take | None:
    kind = node["type"]
    if kind is None:
        return _take_leaf
    children = [_taker(child) for child in node["children_spec"]]
    takers = tuple(take for take in children if take is not None)
    if len(takers) < len(children):
        return None
    if kind in ("builtins.tuple", "builtins.list"):
        return _sequence_taker(tuple if kind == "builtins.tuple" else list, takers)
    if kind == "builtins.dict":
        return _dict_taker(json.loads(node["context"]), takers)
    if kind == OPENED:
        return _object_taker(json.loads(node["context"]), takers)
    return None


def _take_leaf(item: Any, leaves: Leaves) -> bool:
    leaves.append(item)
    return True


def _sequence_taker(kind: type[Any], takers: tuple[_Take, ...]) -> _Take:
    count = len(takers)
    if all(take is _take_leaf for take in takers):

        def take_flat(item: Any, leaves: Leaves) -> bool:
            if type(item) is not kind or len(item) != count:
                return False
            leaves.extend(item)
            return True

        return take_flat

    def take_sequence(item: Any, leaves: Leaves) -> bool:
        if type(item) is not kind:
            return False
        children: Sequence[Any] = item
        return len(children) == count and all(take(child, leaves) for take, child in zip(takers, children, strict=True))

    return take_sequence


def _dict_taker(keys: list[Any], takers: tuple[_Take, ...]) -> _Take:
    if all(take is _take_leaf for take in takers):

        def take_flat(item: Any, leaves: Leaves) -> bool:
            if type(item) is not dict or list(item) != keys:
                return False
            leaves.extend(item.values())
            return True

        return take_flat

    def take_dict(item: Any, leaves: Leaves) -> bool:
        # The order counts: a model may well go through the values.
        if type(item) is not dict or list(item) != keys:
            return False
        return all(take(child, leaves) for take, child in zip(takers, item.values(), strict=True))

    return take_dict


def _object_taker(context: str, takers: tuple[_Take, ...]) -> _Take:
    form, _ = read_context(context)
    opened, numbered = opener_of(form), form.kind != DICTIONARY
    flat = all(take is _take_leaf for take in takers)

    def take_object(item: Any, leaves: Leaves) -> bool:
        children = opened(item)
        if children is None:
            return False
        if numbered:
            leaves.objects.append(item)
        if flat:
            leaves.extend(children)
            return True
        return all(take(child, leaves) for take, child in zip(takers, children, strict=True))

    return take_object


def leaf_key(leaf: Any) -> object:
    """What the table of shapes compares of one leaf of a call; equal to :func:`expected_key` exactly where the leaf fits."""
    if isinstance(leaf, torch.Tensor):
        try:
            return leaf.shape, leaf.dtype
        except RuntimeError:  # a nested tensor has none
            return None
    # Not the value alone: 1, 1.0 and True are equal in Python. Others' own representations are none of ours to call.
    return (type(leaf).__name__, repr(leaf)) if type(leaf) in _PLAIN else None


def expected_key(program: Program, leaf: Argument) -> object:
    """The key of a leaf as ``program`` was captured with it."""
    if isinstance(leaf, Ref):
        spec = program.graph.values[leaf.value].spec
        return torch.Size(spec.shape), getattr(torch, spec.dtype)
    if isinstance(leaf, NonFinite):
        return "float", leaf.name
    return type(leaf).__name__, repr(leaf)


def answer_maker(program: Program) -> Callable[..., Any]:
    """``trees.unflatten_outputs`` of one program: takes the same tensors and ``given``, and builds an output for each call."""
    outputs = program.graph.outputs
    make = _maker(structure_of(program.output_tree), iter(program.output_leaves), {value: index for index, value in enumerate(outputs)})
    count = len(outputs)

    def answer(tensors: Sequence[torch.Tensor], given: Mapping[int, Any] | None = None) -> Any:
        if len(tensors) != count:
            raise ValueError(f"{len(tensors)} tensors for {count} outputs")
        return make(tensors, dict(given or {}))

    return answer


def _maker(spec: pytree.TreeSpec, leaves: Iterator[Argument], place: Mapping[int, int]) -> _Make:
    if spec.is_leaf():
        leaf = next(leaves)
        if not isinstance(leaf, Ref):
            plain = python_value(leaf)
            return lambda tensors, given: plain
        index = place[leaf.value]
        return lambda tensors, given: tensors[index]
    makers = tuple(_maker(child, leaves, place) for child in spec.children())
    if spec.type is tuple:
        return lambda tensors, given: tuple([make(tensors, given) for make in makers])
    if spec.type is list:
        return lambda tensors, given: [make(tensors, given) for make in makers]
    if spec.type is dict:
        keyed = tuple(zip(spec.context, makers, strict=True))
        return lambda tensors, given: {key: make(tensors, given) for key, make in keyed}
    if spec.type is Opened:
        form, mark = read_context(spec.context)
        return lambda tensors, given: made_object(form, mark, [make(tensors, given) for make in makers], given)
    return lambda tensors, given: made_container(spec, [make(tensors, given) for make in makers])
