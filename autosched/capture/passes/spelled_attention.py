"""On a CPU: attention that a model spells out, as products and a softmax, in one call."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.attention import value_of
from autosched.capture.passes.spelling import Spelling
from autosched.capture.passes.views import RESHAPES
from autosched.core.own_attention import fit_own_kernel
from autosched.core.program import Ref

aten = torch.ops.aten
_PRODUCTS = ("aten::matmul.default", "aten::bmm.default")
# Scores of this size, or smaller, leave nothing of their own weight beside any that a model computes.
_HIDES = -1e4
# What is added to scores that a number hides. They are lost in it: a query from which everything is hidden sees all keys alike.
_LOST = -1e30
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
            made[node] = _calls(draft, node, found, finder)
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


@dataclass(frozen=True, slots=True)
class _Mask:
    """A value, and the shape of the scores that it changes: theirs, or a view's of them."""

    value: int
    among: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Hidden:
    """Which scores are replaced.

    Args:
        value: a mask of booleans.
        among: as of :class:`_Mask`.
        shows: whether it is true where they are not.
        finite: whether by a number, and not by what comes to minus infinity.
    """

    value: int
    among: tuple[int, ...]
    shows: bool
    finite: bool


@dataclass(frozen=True, slots=True)
class _Scores:
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
    added: tuple[_Mask, ...] = ()
    hidden: _Hidden | None = None


@dataclass(frozen=True, slots=True)
class _Attention:
    """Its scores, whose keys are ``key``: ``[..., width, keys]`` if they are ``turned``, or ``[..., keys, width]``."""

    scores: _Scores
    value: int
    key: int
    turned: bool


@dataclass(slots=True)
class _Finder:
    draft: Draft
    users: dict[int, list[Node]] = field(init=False)
    producers: dict[int, Node] = field(init=False)
    leaving: set[int] = field(init=False)
    fixed: set[int] = field(init=False)
    fills: dict[int, Node] = field(init=False)
    sees: dict[tuple[int, bool], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.users, self.producers = self.draft.users(), self.draft.producers()
        self.leaving, self.fixed = set(self.draft.output_values()), self.draft.fixed_values()
        makers = (*self.draft.prologue, *self.draft.nodes)
        self.fills = {node.outputs[0]: node for node in makers if node.kind in ("aten::full", "aten::scalar_tensor")}

    def ending_at(self, node: Node) -> _Attention | None:
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

    def _scores(self, value: int) -> _Scores | None:
        node = self._only_used(value)
        if node is None or node.mutates() or len(node.outputs) != 1:
            return None
        product = self._product(node)
        if product is not None:
            return _Scores(*product)
        if node.target == "aten::add.Tensor" and node.argument("alpha") == 1:
            return self._sum(node, value)
        if node.target == "aten::baddbmm.default":
            return self._product_and_mask(node, value)
        if node.kind in ("aten::masked_fill", "aten::where"):
            return self._hiding(node, value)
        if (factor := _factor_of(node)) is not None:
            below = self._below(node, value)
            return None if below is None or below.added or below.hidden is not None else replace(below, scale=below.scale * factor)
        if node.target == "aten::mul.Tensor":
            return self._by_heads(node, value)
        if (source := self._widened(node)) is not None:
            return self._scores(source)
        if node.target in RESHAPES:
            source = node.tensor("self")
            # Batches may be parted, as for windows of pictures, and heads joined with them.
            return self._scores(source) if source is not None and self._same_rows(source, value) else None
        return None

    def _hiding(self, node: Node, value: int) -> _Scores | None:
        """Scores, some of which are replaced by a number."""
        for source, mask, shows, by in _replacing(node):
            number = self._number(by)
            if source is None or mask is None or number is None or not number <= _HIDES:
                continue
            below = self._scores(source) if self.draft.specs[source].shape == self.draft.specs[value].shape else None
            if below is None or below.hidden is not None or self.draft.specs[mask].dtype != "bool":
                continue
            finite = math.isfinite(number) and not self._leaves_some(mask, shows)
            return replace(below, hidden=_Hidden(mask, self.draft.specs[value].shape, shows, finite))
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

    def _by_heads(self, node: Node, value: int) -> _Scores | None:
        """As Swin's second version has it."""
        below, factors = self._below(node, value), node.tensor("other")
        if below is None or factors is None or below.added or below.hidden is not None or below.factors is not None:
            return None
        spec, query = self.draft.specs[factors], self.draft.specs[below.query]
        # The queries are multiplied in place of the scores, so their heads must not be parted otherwise.
        alike = query.shape[:-1] == self.draft.specs[value].shape[:-1]
        return replace(below, factors=factors) if alike and spec.shape[-2:] == (1, 1) else None

    def _sum(self, node: Node, value: int) -> _Scores | None:
        one, other = node.tensor("self"), node.tensor("other")
        if one is None or other is None or one == other:
            return None
        for scores, mask in ((one, other), (other, one)):
            if self.draft.specs[scores].shape == self.draft.specs[value].shape:
                below = self._scores(scores)
                if below is not None and below.hidden is None:
                    return replace(below, added=(*below.added, _Mask(mask, self.draft.specs[value].shape)))
        return None

    def _product_and_mask(self, node: Node, value: int) -> _Scores | None:
        """As ``torch.nn.MultiheadAttention`` has it."""
        mask, query, turned = node.tensor("self"), node.tensor("batch1"), node.tensor("batch2")
        if mask is None or query is None or turned is None or (node.argument("beta"), node.argument("alpha")) != (1, 1):
            return None
        return _Scores(query, turned, added=(_Mask(mask, self.draft.specs[value].shape),))

    def _below(self, node: Node, value: int) -> _Scores | None:
        source = node.tensor("self")
        return None if source is None or self.draft.specs[source].shape != self.draft.specs[value].shape else self._scores(source)

    def _attention(self, scores: _Scores, value: int) -> _Attention:
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
        found = _Attention(replace(scores, query=query), value, turned if key is None else key, turned=key is None)
        return replace(found, scores=replace(found.scores, query=self._before(query)), key=self._before(found.key)) if narrow else found

    def _before(self, value: int) -> int:
        """What ``value`` was before it was made float32, if it was."""
        node = self.producers.get(value)
        source = None if node is None else self._widened(node)
        return value if source is None else source

    def _turned_back(self, turned: int) -> int | None:
        """The keys that ``turned`` is a view of, with its last two dimensions exchanged, if it is one."""
        node = self.producers.get(turned)
        dimensions = len(self.draft.specs[turned].shape)
        return node.tensor("self") if node is not None and _turns(node, dimensions - 2, dimensions) else None

    def _fits(self, found: _Attention, last: Node) -> bool:
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


def _calls(draft: Draft, last: Node, found: _Attention, finder: _Finder) -> list[Node]:
    """What stands in the place of ``last``."""
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
    users = finder.users.get(last.outputs[0], ())
    if last.outputs[0] in finder.leaving or not all(_turns(user, *((0, 3) if flat else (1, 4))) for user in users):
        spell.call(aten.clone.default, made, memory_format=torch.contiguous_format)
    return spell.finished()


def _turns(node: Node, place: int, dimensions: int) -> bool:
    """Whether ``node`` exchanges the dimension at ``place`` and the one behind it, of so many, and no others."""
    if node.target == "aten::transpose.int":
        return {dim % dimensions for dim in (node.argument("dim0"), node.argument("dim1")) if isinstance(dim, int)} == {place, place + 1}
    order = node.argument("dims") if node.target == "aten::permute.default" else None
    wanted = [*range(place), place + 1, place, *range(place + 2, dimensions)]
    return isinstance(order, list) and [dim % dimensions for dim in order] == wanted


def _mask(spell: Spelling, scores: _Scores) -> Ref | None:
    """One mask of all there are, of two or four dimensions."""
    specs = spell.draft.specs
    whole = (*specs[scores.query].shape[:-1], specs[scores.turned].shape[-1])

    def laid_out(mask: _Mask | _Hidden) -> Ref:
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
