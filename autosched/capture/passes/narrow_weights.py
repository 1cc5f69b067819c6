"""Weights that a model makes from narrower ones: quantized numbers and their scales, or fewer bits. Usually they are made once, wide.

Where each is read only once in a run, making them there instead reads fewer bytes, and no wide copy is kept.
"""

from __future__ import annotations

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.traffic import is_view

_LIKE_POINTWISE = frozenset({"aten::_to_copy", "aten::to", "aten::clone", "aten::contiguous"})
# Which Inductor's loops widen as fast as they come from memory. Not int16 and float8_e4m3fn: which are slower than
# float32 itself (experiments/narrow.py).
NARROW = frozenset({"int8", "uint8", "bfloat16", "float16"})
_FEW = 8  # scales and the like have at most the eighth part of the weight's numbers, and may be anything
_MOST_SHARE = 0.7  # of the bytes of the weight that its narrower ones may have
_MOST_CALLS = 16


class NarrowWeights:
    """The prologue of an observed draft, asked for what its weights are made from."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._makers = {value: node for node in draft.prologue for value in node.outputs if value >= 0}
        self._places = {node: place for place, node in enumerate(draft.prologue)}

    def made_in_place(self, weight: int) -> tuple[list[Node], int] | None:
        """Copies of the calls that make ``weight`` from narrower constants, and what they make; ``None`` if it is not made so.

        Only calls that compute each number by itself, and views, are taken: what a compiler merges into the loop that reads them.
        """
        order, roots = self._makers_of(weight)
        specs = self._draft.specs
        narrow = sum(specs[root].bytes for root in roots)
        many = [specs[root].dtype for root in roots if specs[root].elements * _FEW > specs[weight].elements]
        if not order or narrow > _MOST_SHARE * specs[weight].bytes or not NARROW.issuperset(many):
            return None
        names: dict[int, int] = {}
        made = []
        for node in order:
            names[node.outputs[0]] = self._draft.fresh()
            copy = node.copy((names[node.outputs[0]],))
            copy.substitute(names)
            made.append(copy)
        return made, names[weight]

    def _makers_of(self, weight: int) -> tuple[list[Node], set[int]]:
        """The last calls before ``weight``, at most ``_MOST_CALLS``, in the prologue's order; and what they read of others."""
        taken: dict[Node, None] = {}
        roots: set[int] = set()
        pending = [weight]
        while pending:
            value = pending.pop()
            node = self._makers.get(value)
            if node in taken:
                continue
            if node is None or len(taken) == _MOST_CALLS or len(node.outputs) != 1 or not self._by_itself(node):
                roots.add(value)
            else:
                taken[node] = None
                pending += node.reads()
        return sorted(taken, key=self._places.__getitem__), roots

    def _by_itself(self, node: Node) -> bool:
        if node.mutates():
            return False
        return torch.Tag.pointwise in node.op.tags or node.kind in _LIKE_POINTWISE or is_view(node, self._draft.storage)
