"""What variants kernels of our own are: which calls each computes, of what weights and shapes, and who may switch it off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autosched.config import (
    own_attention_wanted,
    own_convolutions_wanted,
    own_pooling_wanted,
    own_products_wanted,
    own_recurrence_wanted,
    winograd_wanted,
)
from autosched.core.graph import Operator, OpGraph
from autosched.core.program import Call
from autosched.core.variants import Variant
from autosched.runtime.cpu_kernels import attention, chain, direct, pooling, recurrent, winograd
from autosched.runtime.cpu_kernels.byte_linear import ByteLinear, geometry_of_bytes, may_be_bytes
from autosched.runtime.cpu_kernels.convolution import Convolution
from autosched.runtime.cpu_kernels.following import read_product
from autosched.runtime.cpu_kernels.library import Entry, Library, kernels_built, kernels_obstacle
from autosched.runtime.cpu_kernels.linear import Linear, geometry_of_halves, may_be_linear
from autosched.runtime.cpu_kernels.weights import in_blocks, of_bytes, of_halves, summed, transformed
from autosched.runtime.instructions import Window


@dataclass(frozen=True, slots=True)
class Calls:
    """What a kernel does: calls, the views of values that those read, by slots of the operator's own, and what others read."""

    calls: tuple[Call, ...]
    windows: Mapping[int, Window]
    writes: tuple[int, ...]

    def made_for(self, call: Call) -> dict[int, Call]:
        """The calls that make what ``call`` reads and nobody else."""
        others = {value for other in self.calls if other is not call for value in other.reads()}.union(self.writes)
        return {value: other for other in self.calls for value in other.outputs if value in call.reads() and value not in others}


Computed = Convolution | chain.Chain | Linear | ByteLinear | recurrent.Recurrence | attention.Attention | pooling.Pooling
"""What a kernel computes in the place of a call, or of two."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a variant computes.

    Args:
        wanted: whether the user has not switched it off, by ``switch``.
        read: what a call computes, if this can, of those of an operator.
        packed: the weights as the library reads them; None if there are none.
        numbers: the shapes as the kernel reads them, for a graph and a number of threads.
        entry: of the library.
        only: what else is refused.
    """

    wanted: Callable[[], bool]
    switch: str
    read: Callable[[Call, OpGraph, Calls], Any]
    packed: Callable[[Any, list[torch.Tensor], Library], torch.Tensor] | None
    numbers: Callable[[Any, OpGraph, int], torch.Tensor]
    entry: Callable[[Library, Any], Entry]
    only: str


def _winograd(outputs: int) -> Way:
    return Way(
        winograd_wanted,
        "AUTOSCHED_WINOGRAD",
        lambda call, graph, calls: winograd.read_winograd(call, graph),
        lambda item, weights, library: transformed(weights[0], outputs, library.lanes, item.groups),
        lambda item, graph, width: winograd.geometry(item, graph, width, outputs),
        lambda library, item: library.winograd[_beside(item)],
        "only 3x3 convolutions of float32 with stride 1, groups of 16 channels and features or more, and channels last are computed so",
    )


def _beside(item: Convolution | Linear) -> tuple[bool, bool]:
    """Whether there is a bias, and whether there is a residual."""
    return item.bias is not None, item.residual is not None


def _factors(item: Linear | ByteLinear, weights: list[torch.Tensor], library: Library) -> torch.Tensor:
    if isinstance(item, ByteLinear):
        return of_bytes(weights[0].t(), library.lanes)
    weight = weights[0].t() if item.turned else weights[0]
    if item.in_halves:
        return of_halves(weight, library.lanes, pairs=library.pairs and item.dtype == "bfloat16")
    return in_blocks(weight.t().unsqueeze(0), library.lanes)


def _sizes(item: Linear | ByteLinear, graph: OpGraph, width: int) -> torch.Tensor:
    if isinstance(item, ByteLinear):
        return geometry_of_bytes(item, width)
    return geometry_of_halves(item, width) if item.in_halves else direct.geometry_of_linear(item, width)


def _multiplying(library: Library, item: Linear | ByteLinear) -> Entry:
    if isinstance(item, ByteLinear):
        return library.bytes[len(item.beside)]
    return library.halves[item.bias is not None] if item.in_halves else library.direct[_beside(item)]


POOLING = Way(
    own_pooling_wanted,
    "AUTOSCHED_POOLING",
    lambda call, graph, calls: pooling.read_pooling(call, graph),
    None,
    pooling.geometry,
    lambda library, item: library.pooling,
    "only pictures of float32, channels last, are pooled so",
)


WAYS: Mapping[int, Way] = {
    Variant.WINOGRAD_2: _winograd(2),
    Variant.WINOGRAD_4: _winograd(4),
    Variant.OWN_CONVOLUTION: Way(
        own_convolutions_wanted,
        "AUTOSCHED_CONVOLUTIONS",
        lambda call, graph, calls: direct.read_scaled(call, graph, calls.made_for(call)),
        lambda item, weights, library: summed(weights[0], library.lanes, groups=item.groups, turned=item.turned),
        direct.geometry,
        lambda library, item: (library.direct if item.scale is None else library.scaled)[_beside(item)],
        "only convolutions of float32 with constant weights, and groups that fill vectors of the processor, are computed so",
    ),
    Variant.OWN_CHAIN: Way(
        own_convolutions_wanted,
        "AUTOSCHED_CONVOLUTIONS",
        lambda call, graph, calls: chain.read_chain(call, graph, calls.made_for(call)),
        lambda item, weights, library: chain.packed(item, weights, library.lanes),
        chain.geometry,
        lambda library, item: library.chain,
        "only convolutions of float32 with constant weights and one group, each with one behind it that has a group for each channel, "
        "are computed so",
    ),
    Variant.OWN_PRODUCT: Way(
        own_products_wanted,
        "AUTOSCHED_PRODUCTS",
        lambda call, graph, calls: read_product(call, graph, calls.calls, calls.writes, calls.windows),
        _factors,
        _sizes,
        _multiplying,
        "only products of some rows with constant weights, in float32 or sixteen bits, and a vector of outputs or more, are computed so",
    ),
    Variant.OWN_RECURRENCE: Way(
        own_recurrence_wanted,
        "AUTOSCHED_RECURRENCE",
        lambda call, graph, calls: recurrent.read_recurrence(call, graph),
        lambda item, weights, library: recurrent.packed(weights, item, library.lanes),
        lambda item, graph, width: recurrent.geometry(item, width),
        lambda library, item: library.gru if item.cell is None else library.lstm,
        "only layers of GRU and LSTM in float32 with constant weights, and as many units as fill whole vectors, are computed so",
    ),
    Variant.OWN_ATTENTION: Way(
        own_attention_wanted,
        "AUTOSCHED_ATTENTION",
        lambda call, graph, calls: attention.read_attention(call, graph, calls.windows),
        None,
        attention.geometry,
        lambda library, item: library.attention[item.mask is not None],
        "only attention in float32 or sixteen bits, with some queries and not too many keys, is computed so",
    ),
    Variant.OWN_POOLING: POOLING,
}
"""By variant."""


def missing_kernel(variant: int) -> str:
    """Why nothing is computed by ``variant`` of :data:`WAYS` here, as far as can be told without trying; empty if nothing is in the way."""
    way = WAYS[variant]
    if not way.wanted():
        return f"switched off by {way.switch}=0"
    return "" if kernels_built() else kernels_obstacle()


def own_variants(operator: Operator, graph: OpGraph) -> tuple[Variant, ...]:
    """Those that may pay for ``operator`` on a CPU."""
    found: list[Variant] = []
    if winograd.may_be_winograd(operator, graph):
        found += [Variant.WINOGRAD_2, Variant.WINOGRAD_4]
    if direct.may_be_direct(operator, graph):
        found.append(Variant.OWN_CONVOLUTION)
    if chain.may_be_chain(operator, graph):
        found.append(Variant.OWN_CHAIN)
    if may_be_linear(operator, graph) or may_be_bytes(operator, graph):
        found.append(Variant.OWN_PRODUCT)
    if recurrent.may_be_recurrent(operator, graph):
        found.append(Variant.OWN_RECURRENCE)
    if attention.may_be_attention(operator, graph):
        found.append(Variant.OWN_ATTENTION)
    if pooling.may_be_pooling(operator, graph):
        found.append(Variant.OWN_POOLING)
    return tuple(found)
