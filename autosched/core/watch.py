"""What a model does to the containers and objects that it is given, seen from before and after a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autosched.core.containers import objects_in, pack
from autosched.core.errors import UnsupportedGraph
from autosched.core.objects import held_by, is_ours


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
        found = {number: _shallow(held_by(item)) for number, item in self._given.items()}
        found[-1] = _shallow(self._call)
        return found


def _shallow(tree: Any) -> tuple[list[Any], Any]:
    leaves, spec = pytree.tree_flatten(tree, is_leaf=lambda item: type(item) is not dict and is_ours(item))
    return leaves, spec


def _same(one: tuple[list[Any], Any], other: tuple[list[Any], Any]) -> bool:
    return one[1] == other[1] and all(
        a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and not is_ours(a) and repr(a) == repr(b))
        for a, b in zip(one[0], other[0], strict=True)
    )
