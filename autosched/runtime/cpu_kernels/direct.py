"""Which convolutions are summed as they are defined by the kernel of our own: of any size, with groups that fill vectors of the processor.

It has no setting up to do, which takes oneDNN some twenty microseconds in every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations

import torch

from autosched.config import own_convolutions_wanted
from autosched.core.graph import Operator, OpGraph, TensorSpec
from autosched.core.program import Call
from autosched.runtime.cpu_kernels.convolution import (
    Convolution,
    group_of,
    is_channels_last,
    is_launch,
    read_convolution,
    strides_of,
    tensors_of_launch,
)
from autosched.runtime.cpu_kernels.linear import Linear

_MULTIPLY = "aten::mul.Tensor"
# Of a group of several channels. What has fewer features would leave most of a vector empty, unless several such groups fill it.
_LEAST_FEATURES = 8
_NARROW = (1, 2, 4)


def may_be_direct(operator: Operator, graph: OpGraph) -> bool:
    """Whether ``operator`` has a convolution for the kernel; of a launch of Inductor's code as far as its tensors tell."""
    return own_convolutions_wanted() and any(_may_be(call, graph) for call in operator.calls)


def _may_be(call: Call, graph: OpGraph) -> bool:
    if read_direct(call, graph) is not None:
        return True
    if not is_launch(call):
        return False
    weights, pictures = tensors_of_launch(call, graph)
    return any(weight.dtype == "float32" and _grouped_so(weight, picture) for weight in weights for picture in pictures)


def _grouped_so(weight: TensorSpec, source: TensorSpec) -> bool:
    group = group_of(weight, source)
    if group is None:
        return False
    features, channels = group
    narrow = features == channels and features in _NARROW
    return channels == source.shape[1] or narrow or features >= _LEAST_FEATURES


def read_direct(call: Call, graph: OpGraph) -> Convolution | None:
    """What ``call`` computes, if the kernel can; its slots are values of ``graph``."""
    found = read_convolution(call, graph)
    if found is None:
        return None
    weight, source = graph.values[found.weight].spec, graph.values[found.source].spec
    return found if found.groups == 1 or (_grouped_so(weight, source) and not found.turned) else None


def read_scaled(call: Call, graph: OpGraph, makers: Mapping[int, Call]) -> Convolution | None:
    """As :func:`read_direct`; with what channels are multiplied with before, where a call of ``makers`` does so.

    Args:
        makers: of values that no call but ``call`` may read.
    """
    found = read_direct(call, graph)
    before = None if found is None else makers.get(found.source)
    if found is None or before is None or before.target != _MULTIPLY or found.groups > 1 or found.turned:
        return found
    if found.residual == found.source:
        # What is added is the product as a whole.
        return found
    picture = graph.values[found.source].spec
    for source, scale in permutations(before.reads(), 2):
        specs = [graph.values[slot].spec for slot in (source, scale)]
        shapes, alike = (picture.shape, (*picture.shape[:2], 1, 1)), all(spec.dtype == picture.dtype for spec in specs)
        # Where the result is written over what is multiplied, others would read what has been made.
        alike = alike and found.made not in (source, scale)
        if alike and tuple(spec.shape for spec in specs) == shapes and all(is_channels_last(spec) for spec in specs):
            return replace(found, source=source, scale=scale, before=(before,))
    return found


def geometry(convolution: Convolution, graph: OpGraph, width: int) -> torch.Tensor:
    """Numbers in the order of ``Direct`` in ``direct.h``, int64."""
    source, weight, made = (graph.values[slot].spec for slot in (convolution.source, convolution.weight, convolution.made))
    steps = (*convolution.stride, *convolution.dilation, *convolution.padding)
    rest = (*made.shape[2:], convolution.groups, *convolution.follows.numbers())
    numbers = (width, *source.shape, *strides_of(source), weight.shape[0], *weight.shape[2:], *steps, *rest)
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def geometry_of_linear(linear: Linear, width: int) -> torch.Tensor:
    """The same for a linear layer: each of its rows is a pixel of one line, or of one line for each batch."""
    each, channels = linear.each or linear.rows, linear.channels
    shape = (linear.rows // each, channels, 1, each)
    strides = (each * channels, each, each * channels, 1) if linear.each else (each * channels, 1, each * channels, channels)
    rest = (1, each, 1, *linear.follows.numbers())
    numbers = (width, *shape, *strides, linear.features, 1, 1, 1, 1, 1, 1, 0, 0, *rest)
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
