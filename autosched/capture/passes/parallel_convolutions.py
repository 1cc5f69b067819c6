"""Convolutions of the same numbers whose results are added become one, with the sum of their weights.

Nets that are trained with several branches in the place of a layer are spelled so: RepVGG, MobileOne, FastViT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from autosched.capture.draft import Draft, Node, contiguous_strides
from autosched.capture.passes.batch_norm import fold_into, is_fixed_norm
from autosched.capture.passes.channel_scales import fold_channel_scales
from autosched.capture.passes.convolution import Convolution, read_convolution
from autosched.core.graph import TensorSpec
from autosched.core.program import Ref

aten = torch.ops.aten
_DTYPES = ("float32", "float64")
_UNMADE = -1


@dataclass(frozen=True, slots=True)
class _Branch:
    """One of two summands: ``node`` is the convolution, or the batch norm of what the other one reads, or None, which is that itself."""

    node: Node | None
    convolution: Convolution
    sizes: tuple[int, ...]


def join_parallel_convolutions(draft: Draft) -> int:
    """``conv(x, w, b) + conv(x, v, c)`` becomes ``conv(x, w + v, b + c)``, with zeros around the smaller kernel; ``-`` likewise.

    One of them may also be a batch norm of ``x``, a convolution of one pixel that leaves channels apart, or ``x`` itself, where all of it
    is apart: beside other channels it would be rounded with them. Only where one kernel lies within the other, so that nothing is
    multiplied which was not before. Returns the number of sums.

    *Source:* Ding et al., "RepVGG: Making VGG-style ConvNets Great Again", CVPR 2021, section 3.3.
    """
    joined = 0
    while changed := _join_once(draft):
        joined += changed
        # What scales a sum stands between it and the next one.
        fold_channel_scales(draft)
    return joined


def _join_once(draft: Draft) -> int:
    joiner = _Joiner(draft)
    joined = sum(joiner.join(node) for node in draft.nodes)
    draft.remove_dead()
    return joined


@dataclass(slots=True)
class _Joiner:
    draft: Draft
    fixed: set[int] = field(init=False)
    alone: dict[int, Node] = field(init=False)
    written: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.fixed, self.alone, self.written = self.draft.fixed_values(), self.draft.made_for_one(), self.draft.written()

    def join(self, node: Node) -> bool:
        """Make ``node`` the convolution of the sum that it is, if that is one."""
        if node.target not in ("aten::add.Tensor", "aten::sub.Tensor") or node.argument("alpha") != 1:
            return False
        specs = self.draft.specs
        values = [node.tensor("self"), node.tensor("other")]
        for value, added in (values, values[::-1]):
            if value is None or added is None or value == added or len({specs[each].shape for each in (value, added, *node.outputs)}) > 1:
                continue
            large = self._convolution(value)
            small = None if large is None else self._convolution(added) or self._pixel(added, large)
            place = None if large is None or small is None else _place(large, small)
            if large is not None and small is not None and place is not None:
                self._write(node, large, small, place, swapped=value != values[0])
                return True
        return False

    def _convolution(self, value: int) -> _Branch | None:
        """The convolution with constant weights that makes ``value`` for one call alone."""
        node = self.alone.get(value)
        found = None if node is None else read_convolution(node)
        if found is None or found.transposed or found.weight not in self.fixed or not (found.bias is None or found.bias in self.fixed):
            return None
        given, weight, made = (self.draft.specs[each] for each in (found.source, found.weight, value))
        alike = weight.dtype == given.dtype == made.dtype and weight.dtype in _DTYPES and len(weight.shape) == len(given.shape)
        # What it reads is read later now.
        stays = self.draft.storage[found.source] not in self.written
        return _Branch(node, found, weight.shape[2:]) if alike and stays else None

    def _pixel(self, value: int, beside: _Branch) -> _Branch | None:
        """What the convolution ``beside`` reads, as it is or normed."""
        source, groups, ones = beside.convolution.source, beside.convolution.groups, (1,) * len(beside.sizes)
        node = self.alone.get(value)
        norm = node if node is not None and is_fixed_norm(node, self.fixed) else None
        apart = norm is not None or groups == self.draft.specs[source].shape[1]
        if (value if norm is None else norm.tensor("input")) != source or not apart:
            return None
        return _Branch(norm, Convolution(source, _UNMADE, None, ones, (0,) * len(ones), ones, False, groups), ones)

    def _write(self, node: Node, large: _Branch, small: _Branch, place: tuple[int, ...], *, swapped: bool) -> None:
        """Make ``node`` the convolution of the sum; ``swapped``: what is ``small`` comes first in it."""
        draft, made = self.draft, large.node
        assert made is not None

        emit = partial(draft.prepare, made, "joined")
        spec = draft.specs[large.convolution.weight]
        if small.convolution.weight == _UNMADE:
            small = self._made(small, large, emit)
        pads = [more for first, size, most in zip(place, small.sizes, large.sizes, strict=True) for more in (most - size - first, first)]
        whole, part = Ref(large.convolution.weight), Ref(small.convolution.weight)
        if any(pads):
            part = Ref(emit(aten.constant_pad_nd.default, part, pads[::-1]))
        weight = emit(node.op, *((part, whole) if swapped else (whole, part)))
        biases = [large.convolution.bias, small.convolution.bias]
        one, other = biases[::-1] if swapped else biases
        if one is not None and other is not None:
            one = emit(node.op, Ref(one), Ref(other))
        elif other is not None:
            one = emit(aten.neg.default, Ref(other)) if node.kind == "aten::sub" else other
        draft.specs[weight] = spec
        self.fixed.update([weight] if one is None else [weight, one])
        node.become(made, weight, one)

    def _made(self, pixel: _Branch, beside: _Branch, emit: Callable[..., int]) -> _Branch:
        """The convolution of one pixel, with weights."""
        draft, like = self.draft, beside.convolution.weight
        spec, groups = draft.specs[like], beside.convolution.groups
        ones = emit(aten.new_ones.default, Ref(like), [groups, spec.shape[1]])
        shape = (*spec.shape[:2], *pixel.sizes)
        weight = emit(aten.reshape.default, Ref(emit(aten.diag_embed.default, Ref(ones))), list(shape))
        draft.specs[weight] = TensorSpec(shape, spec.dtype, contiguous_strides(shape))
        made = replace(pixel.convolution, weight=weight)
        if pixel.node is None:
            return replace(pixel, convolution=made)
        call = Node(aten.convolution.default, (Ref(made.source), Ref(weight), None), {}, (), pixel.node.name, pixel.node.source)
        fold_into(call, made, pixel.node, draft)
        weight, bias = (item.value for item in call.args[1:] if isinstance(item, Ref))
        return replace(pixel, convolution=replace(made, weight=weight, bias=bias))


def _place(large: _Branch, small: _Branch) -> tuple[int, ...] | None:
    """Where the numbers of the smaller kernel begin among those of the larger one; None if one call cannot compute both."""
    one, other = large.convolution, small.convolution
    if (one.source, one.stride, one.groups) != (other.source, other.stride, other.groups):
        return None
    places: list[int] = []
    for size, most, before, mine, step, theirs in zip(
        small.sizes, large.sizes, one.padding, other.padding, one.dilation, other.dilation, strict=True
    ):
        place, apart = divmod(before - mine, step)
        if apart or (size > 1 and step != theirs) or not 0 <= place <= most - size:
            return None
        places.append(place)
    return tuple(places)
