"""Which convolutions Winograd's algorithm computes: 3x3, of every pixel, with groups that are not small, channels last."""

from __future__ import annotations

from itertools import combinations

import torch

from autosched.config import winograd_wanted
from autosched.core.graph import Operator, OpGraph, TensorSpec
from autosched.core.program import Call
from autosched.runtime.cpu_kernels.convolution import Convolution, group_of, is_launch, read_convolution, tensors_of_launch

# Of a group. With fewer of them the transforms take longer than what they save.
_LEAST_CHANNELS = 16
_LEAST_PIXELS = 16
# With more, a thread would need some hundred megabytes for what it works on.
_MOST_CHANNELS = 8192


def may_be_winograd(operator: Operator, graph: OpGraph) -> bool:
    """Whether ``operator`` has a convolution that the algorithm may pay for; of a launch of Inductor's code as far as its tensors tell."""
    return winograd_wanted() and any(_may_be(call, graph) for call in operator.calls)


def _may_be(call: Call, graph: OpGraph) -> bool:
    if read_winograd(call, graph) is not None:
        return True
    if not is_launch(call):
        return False
    weights, pictures = tensors_of_launch(call, graph)
    # What is read first, and then what the result is added to, or the result.
    pairs = list(combinations([spec for spec in pictures if _channels_last(spec)], 2))
    return any(_worthwhile(weight, source) and _of_every_pixel(weight, source, made) for weight in weights for source, made in pairs)


def _of_every_pixel(weight: TensorSpec, source: TensorSpec, made: TensorSpec) -> bool:
    """Whether ``made`` has the shape of a result, and too many pixels for one of every second."""
    sizes = zip(made.shape[2:], source.shape[2:], strict=True)
    return made.shape[:2] == (source.shape[0], weight.shape[0]) and all(mine >= theirs - 2 for mine, theirs in sizes)


def _worthwhile(weight: TensorSpec, source: TensorSpec) -> bool:
    fits = weight.shape[2:] == (3, 3) and weight.dtype == source.dtype == "float32"
    group = group_of(weight, source)
    enough = group is not None and all(_LEAST_CHANNELS <= count <= _MOST_CHANNELS for count in group)
    return fits and enough and source.elements > 0 and source.shape[2] * source.shape[3] >= _LEAST_PIXELS


def _channels_last(spec: TensorSpec) -> bool:
    """Whether the channels of each pixel of a picture lie side by side."""
    return len(spec.shape) == 4 and len(spec.strides) == 4 and spec.strides[1] == 1 and all(step > 0 for step in spec.strides)


def read_winograd(call: Call, graph: OpGraph) -> Convolution | None:
    """What ``call`` computes, if the algorithm can; its slots are values of ``graph``."""
    found = read_convolution(call, graph)
    if found is None or (found.stride, found.dilation) != ((1, 1), (1, 1)):
        return None
    source, weight = graph.values[found.source].spec, graph.values[found.weight].spec
    return found if _channels_last(source) and _worthwhile(weight, source) else None


def geometry(convolution: Convolution, graph: OpGraph, width: int, outputs: int) -> torch.Tensor:
    """Numbers in the order of ``Geometry`` in ``winograd.h``, int64."""
    source, made = graph.values[convolution.source].spec, graph.values[convolution.made].spec
    batch, channels, height, wide = source.shape
    between = (source.strides[0], source.strides[2], source.strides[3])
    results = (made.shape[1], *convolution.padding, *made.shape[2:], convolution.groups, *convolution.follows.numbers())
    numbers = (outputs, width, batch, channels, height, wide, *between, *results)
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
