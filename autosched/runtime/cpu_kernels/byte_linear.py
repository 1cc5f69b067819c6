"""Which products of whole numbers in eight bits the kernel of our own computes, with what makes numbers of their sums.

It is there for whole operators alone: ``capture.regions`` makes operators of what it can compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autosched.config import own_products_wanted
from autosched.core.byte_products import INT_MM, ByteProduct, byte_product, whole_views
from autosched.core.graph import Operator, OpGraph, ValueRole
from autosched.core.program import Call
from autosched.runtime.cpu_kernels.convolution import Follows, follows_of
from autosched.runtime.cpu_kernels.formats import FORMATS
from autosched.runtime.cpu_kernels.linear import is_dense

# With very many, trying takes long and the library is as fast.
_MOST_ROWS = 8192
_LEAST_CHANNELS = 16
_LEAST_FEATURES = 16  # the longest vector in use
_FOUR = 4  # channels that are multiplied at a time


@dataclass(frozen=True, slots=True)
class ByteLinear:
    """One that the kernel can compute.

    Args:
        dtype: of what is made: int32, sums alone, or that of numbers.
        source: the slot whose memory begins with the rows, int8.
        weight: the slot of a constant, int8 ``[channels, features]``.
        of_rows, of_features, bias: slots of what sums are multiplied with, float32 and ``dtype``, and of what is added, ``dtype``; or None.
        made: a slot.
        rows, channels, features: the product is ``[rows, channels] x [channels, features]``.
        follows: what is done to results.
        before: the calls but the last, which need not run.
    """

    dtype: str
    source: int
    weight: int
    of_rows: int | None
    of_features: int | None
    bias: int | None
    made: int
    rows: int
    channels: int
    features: int
    follows: Follows
    before: tuple[Call, ...]

    residual = None
    after = None
    groups = 1
    turned = True

    @property
    def beside(self) -> tuple[int, ...]:
        """What is read beside the source."""
        return tuple(slot for slot in (self.of_rows, self.of_features, self.bias) if slot is not None)

    @property
    def weights(self) -> tuple[int, ...]:
        """Slots of what is packed in the kernel's own way."""
        return (self.weight,)

    @property
    def replaced(self) -> tuple[int, ...]:
        """The slots that it does without."""
        return (self.weight,)


def may_be_bytes(operator: Operator, graph: OpGraph) -> bool:
    """Whether ``operator`` is a product for the kernel, if the processor has the instructions for it."""
    return own_products_wanted() and read_bytes(operator, graph) is not None


def read_bytes(operator: Operator, graph: OpGraph) -> tuple[Call, ByteLinear] | None:
    """The last call of ``operator``, and what all of its calls compute, if the kernel can."""
    products = [call for call in operator.calls if call.target == INT_MM]
    if len(products) != 1 or operator.mutates or len(operator.writes) != 1:
        return None
    slots = {value for call in operator.calls for value in (*call.reads(), *call.outputs)}
    if min(slots) < 0:
        return None
    specs = {value: graph.values[value].spec for value in slots}
    views = whole_views(operator.calls, specs)
    readers = {value: [call for call in operator.calls if value in call.reads()] for value in slots}
    found = byte_product(products[0], specs, views, readers, operator.writes)
    if found is None or found.made not in operator.writes:
        return None
    last, aside = found.path[-1], [call for call in operator.calls if call not in found.path]
    if any(call.outputs[0] not in views for call in aside) or not isinstance(last, Call):
        return None
    before = tuple(call for call in operator.calls if call is not last)
    item = _linear(found, graph, before)
    return None if item is None else (last, item)


def _linear(found: ByteProduct, graph: OpGraph, before: tuple[Call, ...]) -> ByteLinear | None:
    specs = [value.spec for value in graph.values]
    dtype, follows = specs[found.made].dtype, follows_of(found.activation, None, found.algorithm)
    weight = graph.values[found.weight]
    of_kinds = ((found.source, "int8"), (found.of_rows, "float32"), (found.of_features, dtype), (found.bias, dtype))
    if follows is None or any(slot is not None and not is_dense(specs[slot], kind) for slot, kind in of_kinds):
        return None
    if weight.role is not ValueRole.CONSTANT or weight.spec.dtype != "int8" or not 1 <= found.rows <= _MOST_ROWS:
        return None
    if found.channels < _LEAST_CHANNELS or found.channels % _FOUR or found.features < _LEAST_FEATURES:
        return None
    return ByteLinear(
        dtype, found.source, found.weight, found.of_rows, found.of_features, found.bias, found.made, found.rows, found.channels,
        found.features, follows, before,
    )  # fmt: skip


def geometry_of_bytes(linear: ByteLinear, width: int) -> torch.Tensor:
    """Numbers in the order of ``ByteLayer`` in ``byte_products.h``, int64."""
    sizes = (linear.rows, linear.channels, linear.features, FORMATS[linear.dtype])
    there = (int(slot is not None) for slot in (linear.of_rows, linear.of_features, linear.bias))
    return torch.tensor((width, *sizes, *there, *linear.follows.numbers()), dtype=torch.int64, device="cpu")
