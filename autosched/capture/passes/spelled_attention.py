"""On a CPU: attention that a model spells out, as products and a softmax, in one call."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.attention import value_of
from autosched.capture.passes.identities import copied_from
from autosched.capture.passes.joined_attention import Attention, Hidden, Mask, Scores, joined, turns
from autosched.capture.passes.views import RESHAPES
from autosched.core.own_attention import fit_own_kernel
from autosched.core.program import Ref

aten = torch.ops.aten
_PRODUCTS = ("aten::matmul.default", "aten::bmm.default")
# Scores of this size, or smaller, leave nothing of their own weight beside any that a model computes.
_HIDES = -1e4
_SIXTEEN_BITS = ("bfloat16", "float16")
_FUSED = ("float32", *_SIXTEEN_BITS)


def join_attention(draft: Draft) -> int:
    """``softmax(query @ key.T * scale + masks) @ value`` becomes one ``scaled_dot_product_attention``, which keeps no scores.

    In float32, and in sixteen bits, where scores may be made float32 on their way and powers sixteen bits again. Sums are taken in another
    order. A query from which everything is hidden by minus infinity gets zeros, where softmax makes NaN; one from which a score that is not
    finite is hidden may get NaN, since PyTorch hides by adding minus infinity.

    In sixteen bits scores stay in float32, where what is spelled out rounds them at every step; only masks that are added to each other
    are rounded here, too. Results are as near to the model's in float64 as those it makes. Where the lowest number of float16 hides
    everything from a query, its sums with scores are all the same once rounded, and here they are not: that query, which nobody asks, gets
    another mean of the values.
    """
    _name_dtypes(draft)
    finder = _Finder(draft)
    made: dict[Node, list[Node]] = {}
    for node in draft.nodes:
        found = finder.ending_at(node)
        if found is not None:
            made[node] = joined(draft, node, found, finder.users.get(node.outputs[0], ()), leaves=node.outputs[0] in finder.leaving)
    if not made:
        return 0
    draft.nodes = [each for node in draft.nodes for each in made.get(node, [node])]
    draft.remove_dead()
    return len(made)


def _name_dtypes(draft: Draft) -> None:
    """``type_as`` reads a tensor for its dtype alone: scores, as a rule, which are then read again."""
    for node in draft.nodes:
        source = node.tensor("self") if node.target == "aten::type_as.default" else None
        if source is not None and draft.specs[source].dtype != (dtype := draft.specs[node.outputs[0]].dtype):
            node.op, node.args, node.kwargs = aten._to_copy.default, (Ref(source),), {"dtype": getattr(torch, dtype)}


@dataclass(slots=True)
class _Finder:
    draft: Draft
    users: dict[int, list[Node]] = field(init=False)
    producers: dict[int, Node] = field(init=False)
    leaving: set[int] = field(init=False)
    written: set[int] = field(init=False)
    fixed: set[int] = field(init=False)
    fills: dict[int, Node] = field(init=False)
    sees: dict[tuple[int, bool], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.users, self.producers = self.draft.users(), self.draft.producers()
        self.leaving, self.fixed = set(self.draft.output_values()), self.draft.fixed_values()
        self.written = self.draft.written()
        makers = (*self.draft.prologue, *self.draft.nodes)
        self.fills = {node.outputs[0]: node for node in makers if node.kind in ("aten::full", "aten::scalar_tensor")}

    def ending_at(self, node: Node) -> Attention | None:
        """The attention whose last product ``node`` is."""
        product = self._product(node)
        if product is None:
            return None
        weights, value = product
        softmax = self._behind_views(weights)
        rounded = None if softmax is None else self._rounded(softmax, self.draft.specs[value].dtype)
        softmax = softmax if rounded is None else self._only_used(rounded)
        shape = () if softmax is None else self.draft.specs[softmax.outputs[0]].shape
        given = None if softmax is None else _softmax_of(softmax, self.draft.specs[value].dtype, len(shape))
        scores = None if given is None else self._scores(given)
        if scores is None:
            return None
        found = self._attention(scores, value)
        return found if self._fits(found, node) else None

    def _rounded(self, node: Node, dtype: str) -> int | None:
        """What ``node`` makes sixteen bits of, from float32."""
        source = _converted(node)
        known = source is not None and self.draft.specs[source].dtype == "float32" and dtype in _SIXTEEN_BITS
        return source if known and self.draft.specs[node.outputs[0]].dtype == dtype else None

    def _widened(self, node: Node) -> int | None:
        """What ``node`` makes float32 of, from sixteen bits."""
        source = _converted(node)
        known = source is not None and self.draft.specs[source].dtype in _SIXTEEN_BITS
        return source if known and self.draft.specs[node.outputs[0]].dtype == "float32" else None

    def _product(self, node: Node) -> tuple[int, int] | None:
        if node.target not in _PRODUCTS or node.outputs[0] < 0:
            return None
        one, other = node.tensor("self"), node.tensor("mat2" if node.kind == "aten::bmm" else "other")
        if one is None or other is None or one == other:
            return None
        shapes = [self.draft.specs[value].shape for value in (one, other)]
        return (one, other) if len(shapes[0]) in (3, 4) and shapes[0][:-2] == shapes[1][:-2] else None

    def _only_used(self, value: int) -> Node | None:
        """The call that makes ``value``, if one other call reads it and nobody else."""
        return self.producers.get(value) if len(self.users.get(value, ())) == 1 and value not in self.leaving else None

    def _behind_views(self, value: int) -> Node | None:
        """As :meth:`_only_used`, past views that part or join batches and heads: DeBERTa joins them for the values."""
        node = self._only_used(value)
        while node is not None and node.target in RESHAPES:
            source = node.tensor("self")
            node = self._only_used(source) if source is not None and self._same_rows(source, value) else None
        return node

    def _same_rows(self, one: int, other: int) -> bool:
        return self.draft.specs[one].shape[-2:] == self.draft.specs[other].shape[-2:]

    def _scores(self, value: int) -> Scores | None:
        node = self._only_used(value)
        if node is None or node.mutates() or len(node.outputs) != 1:
            return None
        product = self._product(node)
        if product is not None:
            return Scores(*product)
        if node.target in ("aten::add.Tensor", "aten::sub.Tensor"):
            return self._sum(node, value)
        if node.target == "aten::baddbmm.default":
            return self._product_and_mask(node, value)
        if node.kind in ("aten::masked_fill", "aten::where"):
            return self._hiding(node, value)
        if (factor := _factor_of(node)) is not None:
            below = self._below(node, value)
            if below is None or below.hidden is not None:
                return None
            # Falcon with ALiBi multiplies what it has added, too.
            added = tuple(replace(mask, factor=mask.factor * factor) for mask in below.added)
            return replace(below, scale=below.scale * factor, added=added)
        if node.target == "aten::mul.Tensor":
            return self._by_heads(node, value)
        if (source := self._widened(node)) is not None:
            return self._scores(source)
        if node.target in RESHAPES:
            source = node.tensor("self")
            # Batches may be parted, as for windows of pictures, and heads joined with them.
            return self._scores(source) if source is not None and self._same_rows(source, value) else None
        return None

    def _hiding(self, node: Node, value: int) -> Scores | None:
        """Scores, some of which are replaced by a number."""
        for source, mask, shows, by in _replacing(node):
            number = self._number(by)
            if source is None or mask is None or number is None or not number <= _HIDES:
                continue
            below = self._scores(source) if self.draft.specs[source].shape == self.draft.specs[value].shape else None
            if below is None or below.hidden is not None or self.draft.specs[mask].dtype != "bool":
                continue
            finite = math.isfinite(number) and not self._leaves_some(mask, shows)
            return replace(below, hidden=Hidden(mask, self.draft.specs[value].shape, shows, finite))
        return None

    def _number(self, item: object) -> float | None:
        """What ``item`` is, or is filled with."""
        if isinstance(item, Ref):
            node = self.fills.get(item.value)
            item = None if node is None else node.argument("fill_value" if node.kind == "aten::full" else "s")
        return float(item) if isinstance(item, int | float) else None

    def _leaves_some(self, mask: int, shows: bool) -> bool:
        """Whether every query sees a key, in every run."""
        if (mask, shows) not in self.sees:
            known = value_of(self.draft, mask) if mask in self.fixed else None
            self.sees[mask, shows] = known is not None and bool((known if shows else ~known).any(-1).all())
        return self.sees[mask, shows]

    def _by_heads(self, node: Node, value: int) -> Scores | None:
        """As Swin's second version has it."""
        below, factors = self._below(node, value), node.tensor("other")
        if below is None or factors is None or below.added or below.hidden is not None or below.factors is not None:
            return None
        spec, query = self.draft.specs[factors], self.draft.specs[below.query]
        # The queries are multiplied in place of the scores, so their heads must not be parted otherwise.
        alike = query.shape[:-1] == self.draft.specs[value].shape[:-1]
        return replace(below, factors=factors) if alike and spec.shape[-2:] == (1, 1) else None

    def _sum(self, node: Node, value: int) -> Scores | None:
        one, other = node.tensor("self"), node.tensor("other")
        factor = node.argument("alpha")
        if node.argument("other") == 0:
            # XLNet without segments.
            return self._below(node, value)
        if one is None or other is None or one == other or isinstance(factor, bool) or not isinstance(factor, int | float):
            return None
        # XLNet and Funnel take a mask away.
        factor = float(factor if node.kind == "aten::add" else -factor)
        for scores, mask in ((one, other), (other, one)) if factor == 1.0 else ((one, other),):
            if self.draft.specs[scores].shape == self.draft.specs[value].shape:
                below = self._scores(scores)
                if below is not None and below.hidden is None:
                    return replace(below, added=(*below.added, Mask(mask, self.draft.specs[value].shape, factor)))
        return None

    def _product_and_mask(self, node: Node, value: int) -> Scores | None:
        """As ``torch.nn.MultiheadAttention`` has it; BLOOM scales the product, and in Megatron-LM nothing of the first matrix counts."""
        mask, query, turned = node.tensor("self"), node.tensor("batch1"), node.tensor("batch2")
        beta, scale = node.argument("beta"), node.argument("alpha")
        if mask is None or query is None or turned is None or beta not in (0, 1) or not isinstance(scale, int | float):
            return None
        return Scores(query, turned, float(scale), added=(Mask(mask, self.draft.specs[value].shape),) if beta else ())

    def _below(self, node: Node, value: int) -> Scores | None:
        source = node.tensor("self")
        return None if source is None or self.draft.specs[source].shape != self.draft.specs[value].shape else self._scores(source)

    def _attention(self, scores: Scores, value: int) -> Attention:
        """Of queries as they were before all were multiplied by a number, if they were, and of what was made float32 for the product."""
        narrow = self.draft.specs[value].dtype in _SIXTEEN_BITS
        query = self._before(scores.query) if narrow else scores.query
        node = self._only_used(query)
        factor = None if node is None else _factor_of(node)
        source = None if node is None or factor is None else node.tensor("self")
        if source is not None and factor is not None and self.draft.specs[source].shape == self.draft.specs[query].shape:
            query, scores = source, replace(scores, scale=scores.scale * factor)
        turned = self._before(scores.turned) if narrow else scores.turned
        key = self._turned_back(turned)
        found = Attention(replace(scores, query=query), value, turned if key is None else key, turned=key is None)
        return replace(found, scores=replace(found.scores, query=self._before(query)), key=self._before(found.key)) if narrow else found

    def _before(self, value: int) -> int:
        """What ``value`` was before it was made float32, if it was."""
        node = self.producers.get(value)
        source = None if node is None else self._widened(node)
        return value if source is None else source

    def _turned_back(self, turned: int) -> int | None:
        """The keys that ``turned`` is a view of, with its last two dimensions exchanged, or a copy of one: GCViT lays keys out anew."""
        source = copied_from(turned, self.producers, self.written, self.draft)
        node = self.producers.get(turned if source is None else source)
        dimensions = len(self.draft.specs[turned].shape)
        return node.tensor("self") if node is not None and turns(node, dimensions - 2, dimensions) else None

    def _fits(self, found: Attention, last: Node) -> bool:
        specs, scores = self.draft.specs, found.scores
        tensors = [specs[value] for value in (scores.query, found.key, found.value, last.outputs[0])]
        query, key, value, _ = tensors
        lying = (query.strides[-1], key.strides[-2 if found.turned else -1], value.strides[-1]) == (1, 1, 1)
        if not lying or any(spec.dtype != value.dtype or spec.elements < 1 for spec in tensors):
            return False
        if value.dtype not in _FUSED or any(specs[mask.value].dtype not in (value.dtype, "float32") for mask in scores.added):
            return False
        # Queries that are multiplied by float32 would be.
        if scores.factors is not None and specs[scores.factors].dtype != value.dtype:
            return False
        # Between the products a view may have parted batches or heads, or joined them.
        if query.shape[:-2] != value.shape[:-2]:
            return False
        if any(len(specs[mask.value].shape) < 2 for mask in (*scores.added, *(() if scores.hidden is None else (scores.hidden,)))):
            return False
        # Where values are not as wide as keys PyTorch has no fused kernel, and what it does then takes longer than what the model does.
        if query.shape[-1] != value.shape[-1] and not fit_own_kernel(query.shape[-2], specs[scores.turned].shape[-1]):
            return False
        return math.isfinite(scores.scale)


def _replacing(node: Node) -> list[tuple[int | None, int | None, bool, object]]:
    """Scores, by which mask some of them are replaced, whether it is true where they are not, and by what: as ``node`` may be read."""
    if node.kind == "aten::masked_fill":
        return [(node.tensor("self"), node.tensor("mask"), False, node.argument("value"))]
    mask, one, other = node.tensor("condition"), node.argument("self"), node.argument("other")
    readings = ((one, True, other), (other, False, one))
    return [(scores.value, mask, shows, by) for scores, shows, by in readings if isinstance(scores, Ref)]


def _softmax_of(node: Node, dtype: str, dimensions: int) -> int | None:
    """What ``node`` is the softmax of, over the last of so many dimensions; for values of ``dtype``."""
    if node.target == "aten::softmax.int":
        plain = node.argument("dtype") in (None, torch.float32, getattr(torch, dtype))
    elif node.target == "aten::_softmax.default":
        plain = node.argument("half_to_float") is False
    else:
        return None
    return node.tensor("self") if plain and node.argument("dim") in (-1, dimensions - 1) else None


def _converted(node: Node) -> int | None:
    """What ``node`` makes another dtype of, if it does nothing else."""
    plain = node.target == "aten::_to_copy.default" and set(node.kwargs) == {"dtype"}
    return node.tensor("self") if plain else None


def _factor_of(node: Node) -> float | None:
    """The number that ``node`` multiplies a tensor by."""
    if (
        len(node.args) != 2
        or node.kwargs
        or node.target not in ("aten::mul.Tensor", "aten::div.Tensor", "aten::mul.Scalar", "aten::div.Scalar")
    ):
        return None
    number = node.args[1]
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    if node.kind == "aten::mul":
        return float(number)
    return 1.0 / number if number else None
