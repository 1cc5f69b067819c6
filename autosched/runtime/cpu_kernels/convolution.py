"""Convolutions that kernels of our own may compute, as oneDNN is called for them with weights that were packed once
(``capture.passes.cpu_convolution``, and Inductor's own code).

Which of them :mod:`winograd` and :mod:`direct` can compute, those say.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from autosched.core.graph import OpGraph, TensorSpec, ValueRole
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
# What kernels do themselves, by oneDNN's name for it, numbered as in ``activations.h``; relu and hardtanh are limits.
_INSIDE = {"none": 0, "swish": 1, "hardswish": 2, "sigmoid": 3, "hardsigmoid": 4, "tanh": 5, "gelu": 6}
_GELU_BY_TANH = 7
# What follows in place.
_AFTERWARDS = {"leaky_relu": "aten::leaky_relu_.default"}

Pair = tuple[int, int]
"""Of rows and columns, or of features and channels."""


@dataclass(frozen=True, slots=True)
class Follows:
    """What kernels do to sums before they write them: an activation by its number, else limits between which results are kept."""

    activation: int = 0
    least: float = -math.inf
    most: float = math.inf

    @property
    def nothing(self) -> bool:
        """Whether sums stay as they are."""
        return self == Follows()

    def numbers(self) -> tuple[int, int, int]:
        """In the order of ``Following`` in ``activations.h``: the bits of two floats, and the activation."""
        least, most = struct.unpack("<II", struct.pack("<ff", self.least, self.most))
        return least, most, self.activation


@dataclass(frozen=True, slots=True)
class Convolution:
    """One of a picture in float32 with constant weights.

    Args:
        source, weight, bias, residual, made: slots; where ``made`` is ``residual``, the result is written over it.
        padding: above and left, as below and right.
        follows: what is done to results.
        after: an activation that the kernels do not have, which changes the result in place.
        turned: whether the channels of a pixel lie apart from each other.
        scale: a slot of numbers that the channels of each picture are multiplied with before, or None.
        before: the call that does it, which need not run; if there is one.
    """

    source: int
    weight: int
    bias: int | None
    residual: int | None
    made: int
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    follows: Follows
    after: Call | None
    turned: bool
    scale: int | None = None
    before: tuple[Call, ...] = ()

    @property
    def beside(self) -> tuple[int, ...]:
        """What is read beside the source."""
        return tuple(slot for slot in (self.bias, self.residual, self.scale) if slot is not None)

    @property
    def weights(self) -> tuple[int, ...]:
        """Slots of what is packed in the kernel's own way."""
        return (self.weight,)

    @property
    def replaced(self) -> tuple[int, ...]:
        """The slots that it does without."""
        return self.weights


def is_launch(call: Call) -> bool:
    """Whether ``call`` is a launch of Inductor's code that has one."""
    return call.target.startswith("inductor::") and _CONVOLUTION in call.target


def tensors_of_launch(call: Call, graph: OpGraph) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """The weights that a launch of Inductor's code reads, and the pictures that it reads and makes, in this order."""
    specs = [graph.values[value].spec for value in (*call.reads(), *call.outputs) if value >= 0]
    square = [spec for spec in specs if len(spec.shape) == 4]
    return [spec for spec in square if not spec.strides], [spec for spec in square if spec.strides]


def read_convolution(call: Call, graph: OpGraph) -> Convolution | None:
    """What ``call`` computes, if it is a convolution for kernels of our own; its slots are values of ``graph``."""
    names = _ARGUMENTS.get(call.target)
    if names is None or call.kwargs or len(call.args) != len(names) or len(call.outputs) != 1:
        return None
    given = dict(zip(names, call.args, strict=True))
    source, weight, bias, residual = (given.get(name) for name in ("source", "weight", "bias", "residual"))
    stride, padding, dilation = (pair_of(given[name]) for name in ("stride", "padding", "dilation"))
    groups, summed = given["groups"], "sum" not in given or (given["sum"] == "add" and given["alpha"] in (1, None))
    if not isinstance(source, Ref) or not isinstance(weight, Ref) or not isinstance(groups, int) or not summed:
        return None
    if stride is None or padding is None or dilation is None or min(source.value, weight.value) < 0:
        return None
    if not (bias is None or isinstance(bias, Ref)) or not (residual is None or (isinstance(residual, Ref) and residual.value >= 0)):
        return None
    other = None if residual is None else residual.value
    made = _made(call, other)
    activation = given["activation"] or "none"
    follows = follows_of(activation, given["scalars"], given["algorithm"])
    if made is None or (follows is None and activation not in _AFTERWARDS):
        return None
    found = Convolution(
        source.value, weight.value, None if bias is None else bias.value, other, made, stride, padding, dilation, groups,
        follows or Follows(), _after(str(activation), made, given["scalars"]), _turned(graph.values[source.value].spec),
    )  # fmt: skip
    return found if _fits(found, graph) else None


def _made(call: Call, residual: int | None) -> int | None:
    """Where the result is; ``None`` where nobody reads it, or where what is written over the residual has a second name."""
    in_place, named = call.target.partition(".")[0].endswith("_"), call.outputs[0] >= 0
    if in_place:
        return None if named else residual
    return call.outputs[0] if named else None


def group_of(weight: TensorSpec, source: TensorSpec) -> Pair | None:
    """How many features and how many channels each group has, where ``weight`` is one for ``source``."""
    features, channels = weight.shape[:2]
    if channels < 1 or source.shape[1] % channels or features % (source.shape[1] // channels):
        return None
    return features * channels // source.shape[1], channels


def follows_of(activation: Argument, scalars: Argument = None, algorithm: Argument = None) -> Follows | None:
    """The activation that oneDNN calls so, if kernels have it."""
    if activation == "hardtanh":
        numbers = [float(item) for item in scalars.items if isinstance(item, int | float)] if isinstance(scalars, Many) else []
        return Follows(least=numbers[0], most=numbers[1]) if len(numbers) == 2 else None
    if activation == "relu":
        return Follows(least=0.0)
    if activation == "gelu" and algorithm != "none":
        return Follows(_GELU_BY_TANH) if algorithm == "tanh" else None
    number = _INSIDE.get(activation) if isinstance(activation, str) else None
    return None if number is None else Follows(number)


def _after(activation: str, made: int, scalars: Argument) -> Call | None:
    if activation not in _AFTERWARDS:
        return None
    numbers = scalars.items if isinstance(scalars, Many) else ()
    return Call(_AFTERWARDS[activation], (Ref(made), *(item for item in numbers if item is not None)), (), (-1,))


def _fits(convolution: Convolution, graph: OpGraph) -> bool:
    """Whether all of its tensors are as kernels take them for granted."""
    if convolution.made < 0 or graph.values[convolution.weight].role is not ValueRole.CONSTANT:
        return False
    source, weight, made = (graph.values[slot].spec for slot in (convolution.source, convolution.weight, convolution.made))
    if any(len(spec.shape) != 4 or spec.dtype != "float32" for spec in (source, weight, made)):
        return False
    if len(source.strides) != 4 or min(source.strides) < 0 or min(source.shape) < 1 or min(convolution.stride) < 1:
        return False
    if weight.shape[1] * convolution.groups != source.shape[1] or weight.shape[0] % convolution.groups:
        return False
    if made.shape != (source.shape[0], weight.shape[0], *_size(convolution, source, weight)) or not is_channels_last(made):
        return False
    if convolution.bias is not None and not _one_behind_the_other(graph, convolution.bias, weight.shape[0]):
        return False
    if convolution.residual is None:
        return True
    residual = graph.values[convolution.residual].spec
    # Where it is written over the source, what is still to be read would be what others have made.
    apart = convolution.made not in (convolution.source, convolution.weight, convolution.bias)
    return (residual.shape, residual.strides, residual.dtype) == (made.shape, made.strides, made.dtype) and apart


def _size(convolution: Convolution, source: TensorSpec, weight: TensorSpec) -> Pair:
    """Rows and columns of results."""
    down, across = (
        (pixels + 2 * pad - (taps - 1) * apart - 1) // step + 1
        for pixels, taps, step, pad, apart in zip(
            source.shape[2:], weight.shape[2:], convolution.stride, convolution.padding, convolution.dilation, strict=True
        )
    )
    return (down, across) if min(down, across) >= 1 else (0, 0)


def is_channels_last(spec: TensorSpec) -> bool:
    """Whether it is a picture whose pixels lie one behind the other, the channels of each side by side."""
    if len(spec.shape) != 4 or min(spec.shape) < 1 or len(spec.strides) != 4:
        return False
    return strides_of(spec) == _dense(spec.shape)


def strides_of(spec: TensorSpec) -> tuple[int, ...]:
    """The strides of a picture, channels last where a stride does not matter."""
    return tuple(step if size > 1 else usual for size, step, usual in zip(spec.shape, spec.strides, _dense(spec.shape), strict=True))


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    _, channels, height, width = shape
    return (channels * height * width, 1, width * channels, channels)


def _turned(source: TensorSpec) -> bool:
    return len(source.shape) == len(source.strides) == 4 and strides_of(source)[1] != 1


def _one_behind_the_other(graph: OpGraph, slot: int, count: int) -> bool:
    spec = graph.values[slot].spec if slot >= 0 else None
    return spec is not None and (spec.shape, spec.strides, spec.dtype) == ((count,), (1,), "float32")


def pair_of(argument: Argument) -> Pair | None:
    """The numbers for rows and columns, not below zero: two, or one for both."""
    items = argument.items if isinstance(argument, Many) else (argument,)
    numbers = [item for item in items if isinstance(item, int) and not isinstance(item, bool) and item >= 0]
    return (numbers[0], numbers[-1]) if len(numbers) == len(items) and len(numbers) in (1, 2) else None
