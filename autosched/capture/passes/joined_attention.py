"""What stands in the place of attention that a model spells out: one call, and the one mask that it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.spelling import Spelling
from autosched.core.program import Ref

aten = torch.ops.aten
# What is added to scores that a number hides. They are lost in it: a query from which everything is hidden sees all keys alike.
_LOST = -1e30


@dataclass(frozen=True, slots=True)
class Mask:
    """A value, the shape of the scores that it changes (theirs, or a view's of them), and what it is multiplied by before."""

    value: int
    among: tuple[int, ...]
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Hidden:
    """Which scores are replaced.

    Args:
        value: a mask of booleans.
        among: as of :class:`Mask`.
        shows: whether it is true where they are not.
        finite: whether by a number, and not by what comes to minus infinity.
    """

    value: int
    among: tuple[int, ...]
    shows: bool
    finite: bool


@dataclass(frozen=True, slots=True)
class Scores:
    """What scores are made of.

    Args:
        query: ``[..., queries, width]``.
        turned: the keys, ``[..., width, keys]``.
        scale: of the products.
        factors: what they are multiplied by as well, a number for each head.
        added: what is added to them.
        hidden: where they become minus infinity, or a number that comes to the same, afterwards.
    """

    query: int
    turned: int
    scale: float = 1.0
    factors: int | None = None
    added: tuple[Mask, ...] = ()
    hidden: Hidden | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """Its scores, whose keys are ``key``: ``[..., width, keys]`` if they are ``turned``, or ``[..., keys, width]``."""

    scores: Scores
    value: int
    key: int
    turned: bool


def joined(draft: Draft, last: Node, found: Attention, users: Sequence[Node], *, leaves: bool) -> list[Node]:
    """What stands in the place of ``last``.

    Args:
        users: who reads its result.
        leaves: whether that is a result of the model's.
    """
    spell = Spelling(draft, last)
    flat = len(draft.specs[found.value].shape) == 3
    key = spell.call(aten.transpose.int, Ref(found.key), -2, -1) if found.turned else Ref(found.key)
    query = Ref(found.scores.query)
    if found.scores.factors is not None:
        query = spell.call(aten.mul.Tensor, query, Ref(found.scores.factors))
    operands = [query, key, Ref(found.value)]
    if flat:
        operands = [spell.call(aten.unsqueeze.default, value, 0) for value in operands]
    mask = _mask(spell, found.scores)
    made = spell.call(aten.scaled_dot_product_attention.default, *operands, *(() if mask is None else (mask,)), scale=found.scores.scale)
    spell.calls[-1].name = "scaled_dot_product_attention"
    if flat:
        made = spell.call(aten.squeeze.dim, made, 0)
    # Rows of all heads lie side by side, as most models go on; for one that goes on otherwise they are laid out head by head, as before.
    if leaves or not all(turns(user, *((0, 3) if flat else (1, 4))) for user in users):
        spell.call(aten.clone.default, made, memory_format=torch.contiguous_format)
    return spell.finished()


def turns(node: Node, place: int, dimensions: int) -> bool:
    """Whether ``node`` exchanges the dimension at ``place`` and the one behind it, of so many, and no others."""
    if node.target == "aten::transpose.int":
        return {dim % dimensions for dim in (node.argument("dim0"), node.argument("dim1")) if isinstance(dim, int)} == {place, place + 1}
    order = node.argument("dims") if node.target == "aten::permute.default" else None
    wanted = [*range(place), place + 1, place, *range(place + 2, dimensions)]
    return isinstance(order, list) and [dim % dimensions for dim in order] == wanted


def _mask(spell: Spelling, scores: Scores) -> Ref | None:
    """One mask of all there are, of two or four dimensions."""
    specs = spell.draft.specs
    whole = (*specs[scores.query].shape[:-1], specs[scores.turned].shape[-1])

    def laid_out(mask: Mask | Hidden) -> Ref:
        value, spec = Ref(mask.value), specs[mask.value]
        same = _same_at_end(mask.among, whole)
        shape = spec.shape
        if len(shape) > same:
            value = spell.call(aten.expand.default, value, [*mask.among[:-same], *shape[-same:]])
            shape = (*whole[:-same], *shape[-same:])
            value = spell.call(aten.clone.default, value, memory_format=torch.contiguous_format)
            value = spell.call(aten.view.default, value, list(shape))
        elif spec.shape[-1] > 1 and spec.strides[-1] > 1:
            # Kernels go along keys: numbers that lie apart, as of tables of places and heads, would take them longer at every query.
            value = spell.call(aten.clone.default, value, memory_format=torch.contiguous_format)
        return spell.call(aten.unsqueeze.default, value, 0) if len(shape) == 3 else value

    made: Ref | None = None
    for each in scores.added:
        mask = laid_out(each)
        if each.factor != 1.0:
            mask = spell.call(aten.mul.Scalar, mask, each.factor)
        made = mask if made is None else spell.call(aten.add.Tensor, made, mask)
    if (hides := scores.hidden) is None:
        return made
    hidden = laid_out(hides)
    if made is None and not hides.finite:
        return hidden if hides.shows else spell.call(aten.logical_not.default, hidden)
    hidden = spell.call(aten.logical_not.default, hidden) if hides.shows else hidden
    if made is not None:
        if hides.finite and all(specs[each.value].dtype != "float32" for each in scores.added):
            # Which float16 does not reach.
            made = spell.call(aten._to_copy.default, made, dtype=torch.float32)
        return spell.call(aten.masked_fill.Scalar, made, hidden, _LOST if hides.finite else -math.inf)
    # Minus infinity would make NaN of a query that sees nothing.
    return spell.call(aten.mul.Tensor, spell.call(aten._to_copy.default, hidden, dtype=torch.float32), _LOST)


def _same_at_end(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many dimensions, counted from the last, are the same in both; as many as there are, if all are."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(one), len(other)))
