"""On a CPU: large linear layers with weights packed once for oneDNN, and a following ReLU fused in."""

from __future__ import annotations

import math
from collections import Counter

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.linear import Linear, read_linear
from autosched.capture.passes.onednn import as_dense, packable_dtypes
from autosched.core.program import Ref
from autosched.core.row_products import LINEAR, matrix_of

# In float32. Below these, packing costs more in oneDNN's call (about 10 us) than it saves, according to experiments/packing.py. Above, what
# is not packed takes up to six times as long; with one row and on two threads mostly because PyTorch's own product of a matrix and a
# vector is not split among threads.
_LEAST_WEIGHTS = 1 << 17
_LEAST_PRODUCTS = 1 << 19  # multiplications, with more than one row
# From so many multiplications on, the call's own time is nothing, however few weights there are: PyTorch's own product takes up to twice as
# long on processors where MKL is slow, and as long on others.
_MANY_PRODUCTS = 1 << 24
# With one row, every weight is read for a single multiplication, so it counts where they come from: those of a small model, or of an
# operator that runs again and again, from a cache.
_LEAST_CACHED = 1 << 19
_CACHED = 1 << 23  # weights of a whole model
# In sixteen bits: the multiplications from which PyTorch itself calls oneDNN, which then packs the weights at each call. Measured on shapes
# from 1 x 64 x 64 to 1024 x 256 x 256: packed once, 0.5 to 0.9 of the time in bfloat16, 0.7 to 1.0 in float16.
_MOST_BY_LOOPS = 1 << 12
# Where oneDNN has products in float16, weights that fit into no cache of a core's own came at the speed of memory with few rows, packed or
# not. In bfloat16, too, on one processor; on another they took 1.3 to 2 times as long unpacked.
_CACHED_FLOAT16 = 1 << 21
_MANY_ROWS = 64


def pack_cpu_linears(draft: Draft, *, rows: bool = True) -> int:
    """Each large ``linear``, ``addmm`` or ``mm`` with constant weight becomes ``mkldnn::_linear_pointwise``.

    Only ReLU is fused: oneDNN's other epilogues were no faster here than the separate call.

    Args:
        rows: whether those of a single row, too.
    """
    if draft.device.type != "cpu" or not packable_dtypes():
        return 0
    fixed = draft.fixed_values()
    users, outputs = draft.users(), set(draft.output_values())
    cached = _cached(draft, fixed)
    packed: dict[tuple[int, int, bool], int] = {}
    replaced: dict[Node, Node] = {}
    gone: set[Node] = set()
    for node in draft.nodes:
        linear = read_linear(node)
        if linear is None or (not rows and _is_row_product(linear, draft)) or not _worth_packing(linear, draft, fixed, cached):
            continue
        count = math.prod(draft.specs[linear.source].shape[:-1])
        weight = _packed_weight(draft, node, linear, count, packed)
        last, name = node, "none"
        following = users.get(node.outputs[0], [])
        if len(following) == 1 and node.outputs[0] not in outputs and following[0].kind == "aten::relu":
            last, name = following[0], "relu"
            gone.add(node)
        bias = as_dense(draft, node, linear.bias)
        args: tuple[object, ...] = (Ref(linear.source), Ref(weight), bias, name, [], "")
        replaced[last] = Node(torch.ops.mkldnn._linear_pointwise.default, args, {}, last.outputs, node.name, node.source)
    draft.nodes = [replaced.get(node, node) for node in draft.nodes if node not in gone]
    draft.remove_dead()
    return len(replaced)


def _is_row_product(linear: Linear, draft: Draft) -> bool:
    bias = draft.specs[linear.bias] if linear.bias is not None else None
    return not linear.by_rows and matrix_of(LINEAR, (draft.specs[linear.source], draft.specs[linear.weight], bias)) is not None


def turned(draft: Draft, node: Node, weight: int) -> int:
    """A constant ``[inputs, outputs]`` as a dense ``[outputs, inputs]``, which the prologue makes."""
    turned, dense = draft.fresh(), draft.fresh()
    draft.prologue.append(Node(torch.ops.aten.t.default, (Ref(weight),), {}, (turned,), f"{node.name}_t", node.source))
    layout: dict[str, object] = {"memory_format": torch.contiguous_format}
    copy = torch.ops.aten.clone.default
    draft.prologue.append(Node(copy, (Ref(turned),), layout, (dense,), f"{node.name}_dense", node.source))
    return dense


def _cached(draft: Draft, fixed: set[int]) -> set[int]:
    """Constants that are still in a cache when they are read again: all of a small model, else those that one run reads twice."""
    uses = Counter(value for node in draft.nodes for value in node.reads() if value in fixed)
    small = sum(draft.specs[value].elements for value in uses) < _CACHED
    return {value for value, count in uses.items() if small or count > 1}


def _worth_packing(linear: Linear, draft: Draft, fixed: set[int], cached: set[int]) -> bool:
    source, weight = draft.specs[linear.source], draft.specs[linear.weight]
    if source.dtype not in packable_dtypes() or weight.dtype != source.dtype or len(weight.shape) != 2 or len(source.shape) < 2:
        return False
    outputs = weight.shape[1 if linear.by_rows else 0]
    if linear.bias is not None and (linear.bias not in fixed or draft.specs[linear.bias].shape != (outputs,)):
        return False
    rows = math.prod(source.shape[:-1])
    return linear.weight in fixed and large_enough(rows, weight.elements, source.dtype, from_cache=linear.weight in cached)


def large_enough(rows: int, weights: int, dtype: str, *, from_cache: bool) -> bool:
    """Whether a product of ``rows`` rows with that many weights is faster packed.

    Args:
        from_cache: whether the weights are still in a cache when they are read again.
    """
    if dtype == "float16" and (rows == 1 or (rows < _MANY_ROWS and weights > _CACHED_FLOAT16)):
        return False  # a single row has loops of its own
    if dtype != "float32":
        return rows * weights > _MOST_BY_LOOPS
    if rows > 1:
        return rows * weights >= (_LEAST_PRODUCTS if weights >= _LEAST_WEIGHTS else _MANY_PRODUCTS)
    return weights >= (_LEAST_CACHED if from_cache else _LEAST_WEIGHTS)


def _packed_weight(draft: Draft, node: Node, linear: Linear, rows: int, packed: dict[tuple[int, int, bool], int]) -> int:
    key = (linear.weight, rows, linear.by_rows)
    if key not in packed:
        weight = linear.weight
        if linear.by_rows:
            weight = turned(draft, node, weight)
        packed[key] = draft.fresh()
        reorder = torch.ops.mkldnn._reorder_linear_weight.default
        draft.prologue.append(Node(reorder, (Ref(weight), rows), {}, (packed[key],), f"{node.name}_packed", node.source))
    return packed[key]
