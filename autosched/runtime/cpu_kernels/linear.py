"""Which linear layers the kernels of our own can compute: products with constant weights, in float32 or sixteen bits.

They are found where PyTorch, oneDNN or MKL is called, also by Inductor's own code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autosched.config import own_products_wanted
from autosched.core import specs
from autosched.core.graph import Operator, OpGraph, TensorSpec, ValueRole
from autosched.core.program import Call, Ref
from autosched.runtime.cpu_kernels.convolution import Follows, follows_of
from autosched.runtime.cpu_kernels.formats import FORMATS, HALVES
from autosched.runtime.instructions import Window

# The arguments of each call; weights are [outputs, inputs], and those of ``columns`` [inputs, outputs].
_ARGUMENTS = {
    "aten::linear.default": ("source", "weight", "bias"),
    "aten::mm.default": ("source", "columns"),
    "aten::matmul.default": ("source", "columns"),
    "aten::addmm.default": ("bias", "source", "columns"),
    "mkl::_mkl_linear.default": ("source", "packed", "weight", "bias", "rows"),
    "mkldnn::_linear_pointwise.default": ("source", "weight", "bias", "activation", "scalars", "algorithm"),
}
# What launches of Inductor's code that call one of these are named after.
_LAUNCHES = ("mm", "addmm", "_mkl_linear", "_linear_pointwise")
# With very many, trying takes long and libraries are as fast.
_MOST_ROWS = 8192
_LEAST_CHANNELS = 16
_LEAST_FEATURES = 16  # the longest vector in use


@dataclass(frozen=True, slots=True)
class Linear:
    """One that a kernel can compute.

    Args:
        dtype: of all that it reads and makes.
        source: the slot whose memory begins with the rows.
        weight, bias, made: slots.
        turned: whether the weight is ``[inputs, outputs]``.
        packed: the slot of what a library reads in place of the weight, or None.
        rows, channels, features: the product is ``[rows, channels] x [channels, features]``.
        each: how many of the rows lie side by side, as columns of a matrix, one matrix behind the other; 0 if each lies by itself.
        follows: what is done to results.
        before: the calls that do part of it, which need not run.
    """

    dtype: str
    source: int
    weight: int
    bias: int | None
    made: int
    turned: bool
    packed: int | None
    rows: int
    channels: int
    features: int
    follows: Follows
    each: int = 0
    before: tuple[Call, ...] = ()

    residual = None
    after = None
    groups = 1

    @property
    def beside(self) -> tuple[int, ...]:
        """What is read beside the source."""
        return () if self.bias is None else (self.bias,)

    @property
    def weights(self) -> tuple[int, ...]:
        """Slots of what is packed in the kernel's own way."""
        return (self.weight,)

    @property
    def replaced(self) -> tuple[int, ...]:
        """The slots that it does without."""
        return (self.weight,) if self.packed is None else (self.weight, self.packed)

    @property
    def in_halves(self) -> bool:
        """Whether numbers have sixteen bits."""
        return self.dtype in HALVES


def may_be_linear(operator: Operator, graph: OpGraph) -> bool:
    """Whether ``operator`` has a linear layer for the kernel; of a launch of Inductor's code as far as its tensors tell."""
    return own_products_wanted() and any(_may_be(call, graph) for call in operator.calls)


def _may_be(call: Call, graph: OpGraph) -> bool:
    if call.target in _ARGUMENTS:
        return read_linear(call, graph) is not None
    if call.target.removeprefix("inductor::").split(".")[0] not in _LAUNCHES or len(call.outputs) != 1 or call.outputs[0] < 0:
        return False
    read = [graph.values[value] for value in call.reads() if value >= 0]
    made = graph.values[call.outputs[0]].spec
    sources = [value.spec for value in read if value.role is not ValueRole.CONSTANT]
    weights = [value.spec for value in read if value.role is ValueRole.CONSTANT and len(value.spec.shape) == 2]
    return len(sources) == 1 and any(_of_launch(sources[0], weight, made) for weight in weights)


def _of_launch(source: TensorSpec, weight: TensorSpec, made: TensorSpec) -> bool:
    """Whether ``made`` may be the product of the two: a launch may read ``source`` as if it had another shape."""
    dtype = weight.dtype
    if not made.shape or made.shape[-1] not in weight.shape or not is_dense(source, dtype) or not is_dense(made, dtype):
        return False
    features = made.shape[-1]
    channels = weight.shape[0] if weight.shape[1] == features else weight.shape[1]
    rows = made.elements // max(features, 1)
    return source.elements == rows * channels and _worthwhile(dtype, rows, channels, features)


def read_linear(call: Call, graph: OpGraph, windows: Mapping[int, Window] | None = None) -> Linear | None:
    """What ``call`` computes, if the kernel can; its slots are values of ``graph``, or views of some.

    Args:
        windows: those views, by their slots.
    """
    names = _ARGUMENTS.get(call.target)
    if names is None or call.kwargs or len(call.outputs) != 1 or call.outputs[0] < 0 or len(call.args) > len(names):
        return None
    given = dict(zip(names, call.args, strict=False))
    source, bias, packed = given.get("source"), given.get("bias"), given.get("packed")
    weight = given.get("columns") or given.get("weight")
    if not isinstance(source, Ref) or not isinstance(weight, Ref) or not (bias is None or isinstance(bias, Ref)):
        return None
    follows = follows_of(given.get("activation") or "none", given.get("scalars"), given.get("algorithm"))
    if follows is None or not (packed is None or isinstance(packed, Ref)):
        return None
    sizes = _sizes(graph, weight.value, turned="columns" in given)
    if sizes is None:
        return None
    dtype, channels, features = sizes
    begun = _begun(source.value, dtype, graph, windows or {})
    if begun is None:
        return None
    slot, shape, each = begun
    rows = math.prod(shape[:-1])
    made = graph.values[call.outputs[0]].spec
    if shape[-1] != channels or made.shape[-1:] != (features,) or made.elements != rows * features or not is_dense(made, dtype):
        return None
    added = graph.values[bias.value].spec if bias is not None and bias.value >= 0 else None
    if bias is not None and (added is None or added.shape != (features,) or not is_dense(added, dtype)):
        return None
    if not _worthwhile(dtype, rows, channels, features) or (each and dtype in HALVES):
        return None
    return Linear(
        dtype, slot, weight.value, None if bias is None else bias.value, call.outputs[0], "columns" in given,
        None if packed is None else packed.value, rows, channels, features, follows, each,
    )  # fmt: skip


def _begun(slot: int, dtype: str, graph: OpGraph, windows: Mapping[int, Window]) -> tuple[int, tuple[int, ...], int] | None:
    """The value whose memory begins with the rows in ``slot``, the shape of those, and how many lie side by side, if they do."""
    window = windows.get(slot)
    if window is None:
        if slot < 0:
            return None
        spec = graph.values[slot].spec
        each = _side_by_side(spec, dtype)
        return None if each is None else (slot, spec.shape, each)
    spec = graph.values[window.of].spec
    as_seen = TensorSpec(window.size, spec.dtype, window.stride)
    each = _side_by_side(as_seen, dtype)
    inside = window.offset == 0 and is_dense(spec, dtype) and as_seen.elements <= spec.elements
    return (window.of, window.size, each) if inside and each is not None else None


def _side_by_side(spec: TensorSpec, dtype: str) -> int | None:
    """0 where rows lie one behind the other; how many lie side by side where a matrix, or each of a batch, is turned; else None."""
    if len(spec.shape) < 2:
        return None
    if is_dense(spec, dtype):
        return 0
    *batch, rows, channels = range(len(spec.shape))
    order = (*batch, channels, rows)
    if len(spec.strides) != len(spec.shape):
        return None
    turned = TensorSpec(tuple(spec.shape[dim] for dim in order), spec.dtype, tuple(spec.strides[dim] for dim in order))
    return spec.shape[rows] if is_dense(turned, dtype) else None


def _sizes(graph: OpGraph, weight: int, *, turned: bool) -> tuple[str, int, int] | None:
    """The dtype, inputs and outputs of a layer with that weight."""
    value = graph.values[weight] if weight >= 0 else None
    if value is None or value.role is not ValueRole.CONSTANT or len(value.spec.shape) != 2:
        return None
    one, other = value.spec.shape
    return (value.spec.dtype, one, other) if turned else (value.spec.dtype, other, one)


def _worthwhile(dtype: str, rows: int, channels: int, features: int) -> bool:
    # In sixteen bits, two channels may be multiplied at a time.
    fit = dtype == "float32" or (dtype in HALVES and channels % 2 == 0)
    return fit and 1 <= rows <= _MOST_ROWS and channels >= _LEAST_CHANNELS and features >= _LEAST_FEATURES


def geometry_of_halves(linear: Linear, width: int) -> torch.Tensor:
    """Numbers in the order of ``HalfLayer`` in ``half_sums.h``, int64."""
    sizes = (linear.rows, linear.channels, linear.features, FORMATS[linear.dtype])
    return torch.tensor((width, *sizes, *linear.follows.numbers()), dtype=torch.int64, device="cpu")


def is_dense(spec: TensorSpec, dtype: str = "float32") -> bool:
    """Whether it is of ``dtype``, and its elements lie one behind the other."""
    return spec.dtype == dtype and specs.is_dense(spec)
