"""Which attention the kernel of our own computes: in float32 or sixteen bits, of some queries, whose scores fit into a cache."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autosched.config import own_attention_wanted
from autosched.core.graph import Operator, OpGraph, TensorSpec
from autosched.core.own_attention import fit_own_kernel
from autosched.core.program import Argument, Call, Ref
from autosched.runtime.cpu_kernels.formats import FORMATS
from autosched.runtime.instructions import Window

# The arguments of each call by position; others are named. The second one's other result, of which gradients are made, nobody may read.
_ARGUMENTS = {
    "aten::scaled_dot_product_attention.default": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
    "aten::_scaled_dot_product_flash_attention_for_cpu.default": ("query", "key", "value", "dropout_p", "is_causal"),
}
_LAUNCH = "_scaled_dot_product_flash_attention_for_cpu"  # of Inductor's code
_NONE, _ADDED, _SEEN, _ADDED_FLOATS = range(4)  # as ``Mask`` in ``attention.h``


@dataclass(frozen=True, slots=True)
class Heads:
    """Where a tensor has its rows: elements, and strides by item of the batch, head, row and column."""

    slot: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Attention:
    """One that the kernel can compute.

    Args:
        query: ``[batch, heads, queries, width]``.
        key, value: ``[batch, heads, keys, width]`` and ``[batch, heads, keys, features]``; some heads of queries may share one of these.
        mask: as large as the scores are, what is the same everywhere with a stride of zero; None if there is none. Of booleans, numbers
            as all others are, or float32.
        made: the slot of ``[batch, heads, queries, features]``.
        causal: whether a query sees no key behind its own place.
        scale: of the scores.
    """

    query: Heads
    key: Heads
    value: Heads
    mask: Heads | None
    made: int
    causal: bool
    scale: float

    turned = False
    groups = 1
    after = None
    weights: tuple[int, ...] = ()
    replaced: tuple[int, ...] = ()

    @property
    def source(self) -> int:
        """The slot of the queries."""
        return self.query.slot

    @property
    def beside(self) -> tuple[int, ...]:
        """What is read beside the source."""
        return tuple(heads.slot for heads in (self.key, self.value, self.mask) if heads is not None)


def may_be_attention(operator: Operator, graph: OpGraph) -> bool:
    """Whether ``operator`` has attention for the kernel; of a launch of Inductor's code as far as its tensors tell."""
    return own_attention_wanted() and any(_is_launch(call) or read_attention(call, graph, {}) is not None for call in operator.calls)


def _is_launch(call: Call) -> bool:
    return call.target.startswith("inductor::") and call.target.removeprefix("inductor::").split(".")[0] == _LAUNCH


def read_attention(call: Call, graph: OpGraph, windows: Mapping[int, Window]) -> Attention | None:
    """What ``call`` computes, if the kernel can; its slots are values of ``graph``, or views of some.

    Args:
        windows: those views, by their slots.
    """
    names = _ARGUMENTS.get(call.target)
    if names is None or not call.outputs or call.outputs[0] < 0 or any(output >= 0 for output in call.outputs[1:]):
        return None
    given = {**dict(zip(names, call.args, strict=False)), **dict(call.kwargs)}
    tensors = [_heads(given.get(name), graph, windows) for name in ("query", "key", "value")]
    query, key, value = tensors
    if query is None or key is None or value is None or given.get("dropout_p", 0.0) != 0.0:
        return None
    causal, scale, mask = bool(given.get("is_causal", False)), given.get("scale"), given.get("attn_mask")
    if not _fit(query, key, value) or not (scale is None or isinstance(scale, int | float)):
        return None
    scores = (*query.shape[:3], key.shape[2])
    seen = None if mask is None else _mask(mask, scores, query.dtype, graph, windows)
    if mask is not None and (seen is None or causal):
        return None
    made = graph.values[call.outputs[0]].spec
    if made.shape != (*query.shape[:3], value.shape[3]) or made.dtype != query.dtype or not _rows_apart(made.shape, made.strides):
        return None
    factor = 1.0 / math.sqrt(query.shape[3]) if scale is None else scale
    if not abs(factor) <= torch.finfo(torch.float32).max:
        return None
    return Attention(query, key, value, seen, call.outputs[0], causal, float(factor))


def _heads(argument: Argument, graph: OpGraph, windows: Mapping[int, Window]) -> Heads | None:
    """A tensor with four dimensions, whose numbers of a row are side by side."""
    found = _place(argument, graph, windows)
    if found is None or found.dtype not in FORMATS or len(found.shape) != 4 or min(found.shape) < 1 or min(found.strides) < 0:
        return None
    return found if found.strides[3] == 1 or found.shape[3] == 1 else None


def _place(argument: Argument, graph: OpGraph, windows: Mapping[int, Window]) -> Heads | None:
    if not isinstance(argument, Ref):
        return None
    window = windows.get(argument.value)
    if window is not None:
        spec = graph.values[window.of].spec
        return Heads(window.of, window.offset, window.size, window.stride, spec.dtype) if _inside(window, spec) else None
    if argument.value < 0:
        return None
    spec = graph.values[argument.value].spec
    return Heads(argument.value, 0, spec.shape, spec.strides, spec.dtype) if len(spec.strides) == len(spec.shape) else None


def _inside(window: Window, spec: TensorSpec) -> bool:
    """Whether the memory of ``spec`` has all that ``window`` shows."""
    if len(spec.strides) != len(spec.shape) or min((*window.size, *spec.shape), default=1) < 1:
        return False
    last, behind = (
        sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        for sizes, strides in ((window.size, window.stride), (spec.shape, spec.strides))
    )
    return window.offset >= 0 and min(window.stride, default=0) >= 0 and window.offset + last <= behind


def _fit(query: Heads, key: Heads, value: Heads) -> bool:
    batch, heads, queries, width = query.shape
    _, shared, keys, _ = key.shape
    alike = query.dtype == key.dtype == value.dtype
    same = key.shape == (batch, shared, keys, width) and value.shape[:3] == (batch, shared, keys)
    return alike and same and heads % shared == 0 and fit_own_kernel(queries, keys)


def _mask(argument: Argument, scores: tuple[int, ...], dtype: str, graph: OpGraph, windows: Mapping[int, Window]) -> Heads | None:
    """The mask as it lies over the scores."""
    found = _place(argument, graph, windows)
    if found is None or found.dtype not in (dtype, "float32", "bool") or len(found.shape) > 4 or min(found.strides, default=0) < 0:
        return None
    shape = (1,) * (4 - len(found.shape)) + found.shape
    strides = (0,) * (4 - len(found.shape)) + found.strides
    if any(size not in (1, all_) for size, all_ in zip(shape, scores, strict=True)):
        return None
    spread = tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
    return Heads(found.slot, found.offset, scores, spread, found.dtype) if spread[3] in (0, 1) else None


def _rows_apart(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether no two elements are in one place, and those of a row are side by side."""
    if len(strides) != len(shape) or (strides[-1] != 1 and shape[-1] != 1):
        return False
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride < step:
            return False
        step = stride * size
    return True


def geometry(item: Attention, graph: OpGraph, width: int) -> torch.Tensor:
    """Numbers in the order of ``Attention`` in ``attention.h``, int64."""
    batch, heads, queries, channels = item.query.shape
    made = graph.values[item.made].spec
    places = [(each.offset, *each.strides[:3]) for each in (item.query, item.key, item.value)]
    mask = (0, 0, 0, 0, 0) if item.mask is None else (item.mask.offset, *item.mask.strides)
    sizes = (batch, heads, heads // item.key.shape[1], queries, item.key.shape[2], channels, item.value.shape[3])
    scale = struct.unpack("<I", struct.pack("<f", item.scale))[0]
    read = (number for place in places for number in place)
    numbers = (width, *sizes, *read, 0, *made.strides[:3], *mask, _kind_of(item), int(item.causal), scale, FORMATS[item.query.dtype])
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _kind_of(item: Attention) -> int:
    if item.mask is None:
        return _NONE
    if item.mask.dtype == "bool":
        return _SEEN
    return _ADDED if item.mask.dtype == item.query.dtype else _ADDED_FLOATS
