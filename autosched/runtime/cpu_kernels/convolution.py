"""Which convolutions Winograd's algorithm can compute.

They are found where oneDNN is called with weights that were packed once (``capture.passes.cpu_convolution``, and Inductor's own code).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from autosched.config import winograd_wanted
from autosched.core.graph import Operator, OpGraph, TensorSpec, ValueRole
from autosched.core.program import Argument, Call, Many, Ref

_CONVOLUTION = "_convolution_pointwise"
_GEOMETRY = ("weight", "bias", "padding", "stride", "dilation", "groups")
_UNARY = ("source", *_GEOMETRY, "activation", "scalars", "algorithm")
_SUM = (*_GEOMETRY, "sum", "alpha", "activation", "scalars", "algorithm")
_ARGUMENTS = {
    "mkldnn::_convolution_pointwise.default": _UNARY,
    "mkldnn::_convolution_pointwise.binary": ("source", "residual", *_SUM),
    "mkldnn::_convolution_pointwise_.binary": ("residual", "source", *_SUM),
}
# What follows a convolution in place, by oneDNN's name for it; relu has its place in the kernel.
_ACTIVATIONS = {
    "swish": "aten::silu_.default",
    "sigmoid": "aten::sigmoid_.default",
    "tanh": "aten::tanh_.default",
    "hardswish": "aten::hardswish_.default",
    "hardsigmoid": "aten::hardsigmoid_.default",
    "hardtanh": "aten::hardtanh_.default",
    "leaky_relu": "aten::leaky_relu_.default",
    "gelu": "aten::gelu_.default",
}
# With fewer of them the transforms take longer than what they save.
_LEAST_CHANNELS = 16
_LEAST_PIXELS = 16
# With more, a thread would need some hundred megabytes for what it works on.
_MOST_CHANNELS = 8192


@dataclass(frozen=True, slots=True)
class Convolution:
    """One that Winograd's algorithm can compute.

    Args:
        source, weight, bias, residual, made: slots; where ``made`` is ``residual``, the result is written over it.
        padding: above and left, as below and right.
        relu: whether it follows. ``after``: another activation, which changes the result in place.
    """

    source: int
    weight: int
    bias: int | None
    residual: int | None
    made: int
    padding: tuple[int, int]
    relu: bool
    after: Call | None

    turned = False

    @property
    def replaced(self) -> tuple[int, ...]:
        """The slots that it does without: its weights are transformed."""
        return (self.weight,)


def may_be_winograd(operator: Operator, graph: OpGraph) -> bool:
    """Whether ``operator`` has a convolution that the algorithm may pay for; of a launch of Inductor's code as far as its tensors tell."""
    return winograd_wanted() and any(_may_be(call, graph) for call in operator.calls)


def _may_be(call: Call, graph: OpGraph) -> bool:
    if call.target in _ARGUMENTS:
        return read_convolution(call, graph) is not None
    if _CONVOLUTION not in call.target:
        return False
    specs = [graph.values[value].spec for value in (*call.reads(), *call.outputs) if value >= 0]
    weights = [spec for spec in specs if not spec.strides and len(spec.shape) == 4]
    # What is read first, and then what the result is added to, or the result.
    pairs = list(combinations([spec for spec in specs if _channels_last(spec)], 2))
    return any(_worthwhile(weight, source) and _without_stride(weight, source, made) for weight in weights for source, made in pairs)


def _without_stride(weight: TensorSpec, source: TensorSpec, made: TensorSpec) -> bool:
    """Whether ``made`` has the shape of a result, and too many pixels for one of every second."""
    sizes = zip(made.shape[2:], source.shape[2:], strict=True)
    return made.shape[:2] == (source.shape[0], weight.shape[0]) and all(mine >= theirs - 2 for mine, theirs in sizes)


def _worthwhile(weight: TensorSpec, source: TensorSpec) -> bool:
    fits = weight.shape[2:] == (3, 3) and weight.shape[1] == source.shape[1] and weight.dtype == source.dtype == "float32"
    enough = all(_LEAST_CHANNELS <= count <= _MOST_CHANNELS for count in weight.shape[:2])
    return fits and enough and source.elements > 0 and source.shape[2] * source.shape[3] >= _LEAST_PIXELS


def _channels_last(spec: TensorSpec) -> bool:
    """Whether the channels of each pixel of a picture lie side by side."""
    return len(spec.shape) == 4 and len(spec.strides) == 4 and spec.strides[1] == 1 and all(step > 0 for step in spec.strides)


def read_convolution(call: Call, graph: OpGraph) -> Convolution | None:
    """What ``call`` computes, if the algorithm can; its slots are values of ``graph``."""
    names = _ARGUMENTS.get(call.target)
    if names is None or call.kwargs or len(call.args) != len(names) or len(call.outputs) != 1:
        return None
    given = dict(zip(names, call.args, strict=True))
    source, weight, bias, residual = (given.get(name) for name in ("source", "weight", "bias", "residual"))
    padding, plain = _pair(given["padding"]), all(_pair(given[name]) == (1, 1) for name in ("stride", "dilation"))
    summed = "sum" not in given or (given["sum"] == "add" and given["alpha"] in (1, None))
    if not isinstance(source, Ref) or not isinstance(weight, Ref) or not plain or padding is None or given["groups"] != 1 or not summed:
        return None
    if not (bias is None or isinstance(bias, Ref)) or not (residual is None or isinstance(residual, Ref)):
        return None
    other = None if residual is None else residual.value
    made = _made(call, other)
    activation = given["activation"] or "none"
    if made is None or not (activation in ("none", "relu") or activation in _ACTIVATIONS):
        return None
    found = Convolution(
        source.value, weight.value, None if bias is None else bias.value, other, made, padding, activation == "relu",
        _after(str(activation), made, given["scalars"], given["algorithm"]),
    )  # fmt: skip
    return found if _fits(found, graph) else None


def _made(call: Call, residual: int | None) -> int | None:
    """Where the result is; ``None`` where nobody reads it, or where what is written over the residual has a second name."""
    in_place, named = call.target.partition(".")[0].endswith("_"), call.outputs[0] >= 0
    if in_place:
        return None if named else residual
    return call.outputs[0] if named else None


def _after(activation: str, made: int, scalars: Argument, algorithm: Argument) -> Call | None:
    if activation not in _ACTIVATIONS:
        return None
    numbers = scalars.items if isinstance(scalars, Many) else ()
    named = (("approximate", algorithm),) if activation == "gelu" else ()
    return Call(_ACTIVATIONS[activation], (Ref(made), *(item for item in numbers if item is not None)), named, (-1,))


def _fits(convolution: Convolution, graph: OpGraph) -> bool:
    """Whether all of its tensors are as the kernel takes them for granted."""
    slots = (convolution.source, convolution.weight, convolution.made)
    if any(slot < 0 for slot in slots):
        return False
    if graph.values[convolution.weight].role is not ValueRole.CONSTANT:
        return False
    source, weight, made = (graph.values[slot].spec for slot in slots)
    if not _channels_last(source) or len(weight.shape) != 4 or not _worthwhile(weight, source):
        return False
    size = tuple(pixels + 2 * pad - 2 for pixels, pad in zip(source.shape[2:], convolution.padding, strict=True))
    if made.shape != (source.shape[0], weight.shape[0], *size) or min(size) < 1:
        return False
    if made.dtype != "float32" or made.strides != _dense(made.shape):
        return False
    if convolution.bias is not None and not _one_behind_the_other(graph.values[convolution.bias].spec, weight.shape[0]):
        return False
    if convolution.residual is None:
        return True
    residual = graph.values[convolution.residual].spec
    # Where it is written over the source, a tile would read what another one has made.
    apart = convolution.made not in (convolution.source, convolution.weight, convolution.bias)
    return (residual.shape, residual.strides, residual.dtype) == (made.shape, made.strides, made.dtype) and apart


def _one_behind_the_other(spec: TensorSpec, count: int) -> bool:
    return spec.shape == (count,) and spec.strides == (1,)


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    batch, channels, height, width = shape
    return (channels * height * width, 1, width * channels, channels) if batch else ()


def _pair(argument: Argument) -> tuple[int, int] | None:
    items = argument.items if isinstance(argument, Many) else (argument,)
    numbers = [item for item in items if isinstance(item, int) and not isinstance(item, bool) and item >= 0]
    return (numbers[0], numbers[-1]) if len(numbers) == len(items) and len(numbers) in (1, 2) else None


def geometry(convolution: Convolution, graph: OpGraph, width: int, outputs: int) -> torch.Tensor:
    """Numbers in the order of ``Geometry`` in ``convolution.h``, int64."""
    source, made = graph.values[convolution.source].spec, graph.values[convolution.made].spec
    batch, channels, height, wide = source.shape
    between = (source.strides[0], source.strides[2], source.strides[3])
    results = (made.shape[1], *convolution.padding, *made.shape[2:], int(convolution.relu))
    numbers = (outputs, width, batch, channels, height, wide, *between, *results)
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
