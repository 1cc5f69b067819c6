"""Which pictures the kernel of our own pools: the largest numbers or the mean of what lies around each place, or the mean of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autosched.config import own_pooling_wanted
from autosched.core.graph import Operator, OpGraph
from autosched.core.program import Argument, Call, Many, Ref
from autosched.runtime.cpu_kernels.convolution import Pair, is_channels_last, pair_of, strides_of

_MEAN, _MEAN_OF_ALL = "aten::avg_pool2d.default", "aten::mean.dim"
_LARGEST = ("source", "size", "stride", "padding", "dilation", "ceil_mode")
_ARGUMENTS = {
    "aten::max_pool2d.default": _LARGEST,
    "aten::max_pool2d_with_indices.default": _LARGEST,
    _MEAN: ("source", "size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
    "aten::adaptive_avg_pool2d.default": ("source", "output_size"),
    _MEAN_OF_ALL: ("source", "dim", "keepdim", "dtype"),
}


@dataclass(frozen=True, slots=True)
class Pooling:
    """Of a picture in float32.

    Args:
        source, made: slots.
        mean: or else the largest.
        divisor: of a mean, where it is given.
        padded: whether a mean counts zeros of the padding, too.
    """

    source: int
    made: int
    size: Pair
    stride: Pair
    padding: Pair
    dilation: Pair = (1, 1)
    mean: bool = False
    divisor: int | None = None
    padded: bool = True

    after = None
    beside: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    replaced: tuple[int, ...] = ()
    turned = False
    groups = 1


def may_be_pooling(operator: Operator, graph: OpGraph) -> bool:
    """Whether ``operator`` has something for the kernel."""
    return any(read_pooling(call, graph) is not None for call in operator.calls)


def read_pooling(call: Call, graph: OpGraph) -> Pooling | None:
    """What ``call`` computes, if the kernel can and the user has not switched it off; its slots are values of ``graph``."""
    names = _ARGUMENTS.get(call.target)
    if names is None or not own_pooling_wanted() or not call.outputs or call.outputs[0] < 0 or any(made >= 0 for made in call.outputs[1:]):
        return None
    given = {**dict(zip(names, call.args, strict=False)), **dict(call.kwargs)}
    source = given.get("source")
    if not isinstance(source, Ref) or source.value < 0:
        return None
    picture, made = graph.values[source.value].spec, graph.values[call.outputs[0]].spec
    if len(picture.shape) != 4 or picture.dtype != "float32" or made.dtype != "float32" or picture.shape[:2] != made.shape[:2]:
        return None
    if len(picture.strides) != 4 or min(picture.strides) < 0 or min(picture.shape) < 1 or strides_of(picture)[1] != 1:
        return None
    if made.shape[2:] in ((1, 1), ()) and _is_mean_of_all(call.target, given):
        whole = (picture.shape[2], picture.shape[3])
        dense = is_channels_last(made) or made.strides == (made.shape[1], 1)
        return Pooling(source.value, call.outputs[0], whole, whole, (0, 0), mean=True) if dense else None
    return _around(given, source.value, call.outputs[0], mean=call.target == _MEAN) if "size" in given and is_channels_last(made) else None


def _is_mean_of_all(target: str, given: Mapping[str, Argument]) -> bool:
    """Whether one result is the mean of all numbers of a channel, given its shape."""
    if target != _MEAN_OF_ALL:
        # What several results share is of several sizes.
        return "output_size" in given
    dims = given.get("dim")
    return isinstance(dims, Many) and {item % 4 for item in dims.items if isinstance(item, int)} == {2, 3} and given.get("dtype") is None


def _around(given: Mapping[str, Argument], source: int, made: int, *, mean: bool) -> Pooling | None:
    """Of what lies around each place."""
    size = pair_of(given["size"])
    stride = given.get("stride", Many(()))
    step = size if isinstance(stride, Many) and not stride.items else pair_of(stride)
    padding, dilation = pair_of(given.get("padding", 0)), pair_of(given.get("dilation", 1))
    divisor = given.get("divisor_override")
    if size is None or step is None or padding is None or dilation is None or not (divisor is None or isinstance(divisor, int)):
        return None
    if min(*size, *step, *dilation) < 1 or divisor == 0:
        return None
    return Pooling(source, made, size, step, padding, dilation, mean, divisor, bool(given.get("count_include_pad", True)))


def geometry(pooling: Pooling, graph: OpGraph, width: int) -> torch.Tensor:
    """Numbers in the order of ``Pooled`` in ``pooling.h``, int64."""
    source, made = (graph.values[slot].spec for slot in (pooling.source, pooling.made))
    steps = (*pooling.size, *pooling.stride, *pooling.dilation, *pooling.padding)
    rest = (*(made.shape[2:] or (1, 1)), int(pooling.mean), pooling.divisor or 0, int(pooling.padded))
    return torch.tensor((width, *source.shape, *strides_of(source), *steps, *rest), dtype=torch.int64, device="cpu")
