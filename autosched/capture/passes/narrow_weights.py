"""Weights that a model makes from narrower ones: quantized numbers and their scales, or fewer bits. Usually they are made once, wide.

Where each is read only once in a run, making them there instead reads fewer bytes, and no wide copy is kept.
"""

from __future__ import annotations

import torch

from autosched.capture.arguments import map_refs
from autosched.capture.draft import Draft, Node
from autosched.capture.traffic import is_view
from autosched.core.program import Ref

_LIKE_POINTWISE = frozenset({"aten::_to_copy", "aten::to", "aten::clone", "aten::contiguous"})
_MOST_SHARE = 0.7  # of the bytes of the weight that its narrower ones may have
_MOST_CALLS = 16


class NarrowWeights:
    """The prologue of an observed draft, asked for what its weights are made from."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._makers = {value: node for node in draft.prologue for value in node.outputs if value >= 0}

    def made_in_place(self, weight: int) -> tuple[list[Node], int] | None:
        """Copies of the calls that make ``weight`` from narrower constants, and what they make; ``None`` if it is not made so.

        Only calls that compute each number by itself, and views, are taken: what a compiler merges into the loop that reads them.
        """
        order: list[Node] = []
        roots: set[int] = set()
        self._walk(weight, order, roots)
        specs = self._draft.specs
        narrow = sum(specs[root].bytes for root in roots)
        if not order or len(order) > _MOST_CALLS or narrow > _MOST_SHARE * specs[weight].bytes:
            return None
        names: dict[int, int] = {}
        made = []
        for node in order:
            names[node.outputs[0]] = self._draft.fresh()
            copy = node.copy((names[node.outputs[0]],))
            copy.args = tuple(map_refs(item, lambda value: Ref(names.get(value, value))) for item in copy.args)
            copy.kwargs = {name: map_refs(item, lambda value: Ref(names.get(value, value))) for name, item in copy.kwargs.items()}
            made.append(copy)
        return made, names[weight]

    def _walk(self, value: int, order: list[Node], roots: set[int]) -> None:
        node = self._makers.get(value)
        if node is None or len(node.outputs) != 1 or not self._by_itself(node):
            roots.add(value)
        elif node not in order and len(order) <= _MOST_CALLS:
            for read in node.reads():
                self._walk(read, order, roots)
            order.append(node)

    def _by_itself(self, node: Node) -> bool:
        if node.mutates():
            return False
        return torch.Tag.pointwise in node.op.tags or node.kind in _LIKE_POINTWISE or is_view(node, self._draft.storage)
