"""Padding that is a call of its own, or is given by name, becomes the convolution's, by which other passes know the convolution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autosched.capture.draft import Draft, Node
from autosched.core.program import Ref

aten = torch.ops.aten
_BY_NAME = {
    "aten::conv1d.padding": aten.conv1d.default,
    "aten::conv2d.padding": aten.conv2d.default,
    "aten::conv3d.padding": aten.conv3d.default,
}
_BY_NUMBERS = ("aten::conv1d.default", "aten::conv2d.default", "aten::conv3d.default")


def hand_on_padding(draft: Draft) -> int:
    """``padding="same"``, and zeros put around what a convolution alone reads, as numbers of it; as many on both sides, else they stay."""
    alone, written = draft.made_for_one(), draft.written()
    changed = 0
    for node in draft.nodes:
        named = node.target in _BY_NAME
        padding = _named(node, draft) if named else _numbers(node)
        if padding is None:
            continue
        source = node.args[0]
        before = alone.get(source.value) if isinstance(source, Ref) else None
        more = None if before is None else _zeros(before, len(padding))
        if before is not None and more is not None and draft.storage[before.reads()[0]] not in written:
            source, padding = before.args[0], [one + other for one, other in zip(padding, more, strict=True)]
        elif not named:
            continue
        weight, bias, stride, dilation, groups = (node.argument(name) for name in ("weight", "bias", "stride", "dilation", "groups"))
        node.op, node.args, node.kwargs = _BY_NAME.get(node.target, node.op), (source, weight, bias, stride, padding, dilation, groups), {}
        changed += 1
    draft.remove_dead()
    return changed


def _named(node: Node, draft: Draft) -> list[int] | None:
    """What the name means for a weight of this size; ``None`` if it is not the same on both sides."""
    weight, dilation = node.tensor("weight"), node.argument("dilation")
    if weight is None or not isinstance(dilation, list):
        return None
    sizes = draft.specs[weight].shape[2:]
    if node.argument("padding") == "valid":
        return [0] * len(sizes)
    both = [(size - 1) * step for size, step in zip(sizes, dilation * (len(sizes) if len(dilation) == 1 else 1), strict=True)]
    return None if any(number % 2 for number in both) else [number // 2 for number in both]


def _numbers(node: Node) -> list[int] | None:
    padding = node.argument("padding") if node.target in _BY_NUMBERS else None
    if not isinstance(padding, list):
        return None
    dimensions = int(node.kind[-2])
    return padding * dimensions if len(padding) == 1 else list(padding)


def _zeros(node: Node, dimensions: int) -> list[int] | None:
    """How many zeros ``node`` puts on each side along each of the last dimensions, if that is all it does."""
    if node.kind not in ("aten::pad", "aten::constant_pad_nd") or node.argument("value") not in (None, 0):
        return None
    if node.kind == "aten::pad" and node.argument("mode") != "constant":
        return None
    pads = node.argument("pad")
    if not isinstance(pads, list) or len(pads) > 2 * dimensions or not isinstance(node.args[0], Ref):
        return None
    # From the last dimension on.
    pads = [0] * (2 * dimensions - len(pads)) + _turned(pads)
    left, right = pads[::2], pads[1::2]
    return left if left == right and min(left) >= 0 else None


def _turned(pads: Sequence[int]) -> list[int]:
    return [number for place in range(len(pads) - 2, -1, -2) for number in pads[place : place + 2]]
