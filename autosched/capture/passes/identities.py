"""Drop calls that give back what they were given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import copysign

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.resizing import RESIZES
from autosched.core.extents import lie_alike
from autosched.core.graph import TensorSpec
from autosched.core.program import Ref

_DROPOUTS = frozenset({"aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout"})
_SAME_WHEN_SAME_SHAPE = frozenset(
    {
        "aten::view", "aten::_unsafe_view", "aten::reshape", "aten::expand", "aten::permute", "aten::transpose", "aten::slice",
        "aten::squeeze", "aten::unsqueeze", "aten::flatten", "aten::to", "aten::_to_copy", "aten::contiguous", "aten::clone",
        "aten::repeat", "aten::repeat_interleave", "aten::alias", "aten::expand_as", "aten::view_as", "aten::type_as", "aten::detach",
    }
)  # fmt: skip
_OTHER_NUMBERS = ("aten::view.dtype", "aten::repeat_interleave.self_Tensor", "aten::repeat_interleave.Tensor")
# The scalar that changes nothing, and the name of the argument that holds it. Not +0.0 for a sum: it makes +0.0 of -0.0.
_NEUTRAL: dict[str, tuple[str, float]] = {
    "aten::add": ("other", -0.0), "aten::sub": ("other", 0.0), "aten::mul": ("other", 1), "aten::div": ("other", 1),
    "aten::pow": ("exponent", 1),
}  # fmt: skip
COPIES = ("aten::clone.default", "aten::contiguous.default")


def drop_identities(draft: Draft) -> int:
    """Dropout switched off, views and copies that change neither shape nor layout, padding by nothing, ``x - 0``, ``x * 1``,
    concatenations of one tensor, pictures resized to their own size.

    A copy stays if it leaves the model, whole or as a view, or if the model changes the memory it was taken from.
    """
    return drop_unchanged(draft, lambda node: _candidate(node, draft))


def drop_unchanged(draft: Draft, given_back: Callable[[Node], int | None]) -> int:
    """Drop calls that give back an argument, laid out as it is, by ``given_back``; how many. Copies stay as for :func:`drop_identities`.

    Args:
        given_back: the value whose numbers a call gives back, or ``None`` if it computes something.
    """
    leaving = draft.leaving()
    written = draft.written()
    mapping: dict[int, int] = {}
    for node in draft.nodes:
        if len(node.outputs) != 1 or node.outputs[0] < 0 or node.mutates():
            continue
        source = given_back(node)
        if source is None or not same_layout(draft.specs[source], draft.specs[node.outputs[0]]):
            continue
        made = node.outputs[0]
        copies = draft.storage[made] != draft.storage[source]
        if copies and (draft.storage[made] in leaving or draft.storage[source] in written):
            continue
        mapping[made] = source
    draft.substitute(mapping)
    draft.remove_dead()
    return len(mapping)


def _candidate(node: Node, draft: Draft) -> int | None:
    """Value id whose numbers the call gives back, if its layout is the same, or None."""
    first = node.args[0] if node.args else None
    if node.kind == "aten::cat" and isinstance(first, list) and len(first) == 1 and isinstance(first[0], Ref):
        return first[0].value
    if not isinstance(first, Ref):
        return None
    if node.kind in _DROPOUTS and (node.argument("train") is False or node.argument("p") == 0):
        return first.value
    if node.kind in ("aten::pad", "aten::constant_pad_nd"):
        pads = node.argument("pad")
        return first.value if isinstance(pads, list) and not any(pads) else None
    if node.target in RESIZES and node.argument("scale_factors") is None:
        # Beside an infinite number PyTorch may add nothing times infinity.
        return first.value
    if node.kind in _SAME_WHEN_SAME_SHAPE and node.target not in _OTHER_NUMBERS:
        return first.value
    if node.kind in _NEUTRAL:
        name, neutral = _NEUTRAL[node.kind]
        scalar = node.argument(name)
        # An alpha turns the sign of a zero, a rounding mode rounds.
        plain = len(node.args) == 2 and not node.kwargs
        if isinstance(scalar, int | float) and not isinstance(scalar, bool) and scalar == neutral and plain:
            dtype: torch.dtype = getattr(torch, draft.specs[first.value].dtype)
            same = not dtype.is_floating_point or copysign(1, scalar) == copysign(1, neutral)
            # Beside complex numbers the scalar is one, and its imaginary zero makes other zeros, and NaN of infinity.
            return first.value if same and not dtype.is_complex else None
    return None


def copied_from(value: int, producers: Mapping[int, Node], written: set[int], draft: Draft) -> int | None:
    """What ``value`` is a copy of, if it is one and nothing changes that afterwards: its memory is among none that is ``written``."""
    copy = producers.get(value)
    source = copy.tensor("self") if copy is not None and copy.target in COPIES else None
    return source if source is not None and draft.storage[source] not in written else None


def same_layout(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether shape, dtype and strides agree; the stride of a dimension of size one means nothing."""
    if a.shape != b.shape or a.dtype != b.dtype or len(a.strides) != len(b.strides):
        return False
    return lie_alike(a.shape, a.strides, b.strides)
