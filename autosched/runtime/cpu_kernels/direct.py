"""Which convolutions are summed as they are defined by the kernel of our own: of any size, with one group or one for each channel.

It has no setting up to do, which takes oneDNN some twenty microseconds in every call.
"""

from __future__ import annotations

import torch

from autosched.config import own_convolutions_wanted
from autosched.core.graph import Operator, OpGraph, TensorSpec
from autosched.core.program import Call
from autosched.runtime.cpu_kernels.convolution import (
    Convolution,
    is_convolution,
    read_convolution,
    strides_of,
    tensors_of_launch,
)
from autosched.runtime.cpu_kernels.linear import Linear


def may_be_direct(operator: Operator, graph: OpGraph) -> bool:
    """Whether ``operator`` has a convolution for the kernel; of a launch of Inductor's code as far as its tensors tell."""
    return own_convolutions_wanted() and any(_may_be(call, graph) for call in operator.calls)


def _may_be(call: Call, graph: OpGraph) -> bool:
    if read_direct(call, graph) is not None:
        return True
    if not is_convolution(call):
        return False
    weights, pictures = tensors_of_launch(call, graph)
    return any(weight.dtype == "float32" and _grouped_so(weight, picture) for weight in weights for picture in pictures)


def _grouped_so(weight: TensorSpec, source: TensorSpec) -> bool:
    return weight.shape[1] == source.shape[1] or weight.shape[:2] == (source.shape[1], 1)


def read_direct(call: Call, graph: OpGraph) -> Convolution | None:
    """What ``call`` computes, if the kernel can; its slots are values of ``graph``."""
    found = read_convolution(call, graph)
    if found is None:
        return None
    weight = graph.values[found.weight].spec
    return found if found.groups == 1 or (_each_channel(found, weight) and not found.turned) else None


def _each_channel(convolution: Convolution, weight: TensorSpec) -> bool:
    return convolution.groups > 1 and weight.shape[:2] == (convolution.groups, 1)


def geometry(convolution: Convolution, graph: OpGraph, width: int) -> torch.Tensor:
    """Numbers in the order of ``Direct`` in ``direct.h``, int64."""
    source, weight, made = (graph.values[slot].spec for slot in (convolution.source, convolution.weight, convolution.made))
    steps = (*convolution.stride, *convolution.dilation, *convolution.padding)
    rest = (*made.shape[2:], int(_each_channel(convolution, weight)), *convolution.follows.numbers())
    numbers = (width, *source.shape, *strides_of(source), weight.shape[0], *weight.shape[2:], *steps, *rest)
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def geometry_of_linear(linear: Linear, width: int) -> torch.Tensor:
    """The same for a linear layer: each of its rows is a pixel of one line."""
    shape, strides = (
        (1, linear.channels, 1, linear.rows),
        (linear.rows * linear.channels, 1, linear.rows * linear.channels, linear.channels),
    )
    rest = (1, linear.rows, 0, *linear.follows.numbers())
    numbers = (width, *shape, *strides, linear.features, 1, 1, 1, 1, 1, 1, 0, 0, *rest)
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
