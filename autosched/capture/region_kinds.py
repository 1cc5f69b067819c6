"""What a compiler can put into one loop nest, and what stays a call of a library: the vocabulary of the region partition."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.traffic import is_view
from autosched.core.custom_operators import is_custom
from autosched.core.graph import TensorSpec
from autosched.core.row_products import BATCHED, LINEAR, matrix_of

# Calls that Inductor writes as loops of its own, beside those that PyTorch tags as pointwise.
_LOOPS = frozenset(
    f"aten::{name}"
    for name in (
        "_log_softmax", "_softmax", "_to_copy", "_unsafe_index", "_unsafe_view", "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "all",
        "amax", "amin", "any", "arange", "argmax", "argmin", "batch_norm", "_native_batch_norm_legit_no_training", "avg_pool2d",
        "avg_pool1d", "cat", "clone", "concat", "constant_pad_nd", "contiguous", "copy", "embedding", "expand_as", "fill", "flip", "full",
        "full_like", "gather", "glu", "group_norm", "index", "index_select", "layer_norm", "linalg_vector_norm", "log_softmax",
        "logsumexp", "masked_fill", "max_pool2d", "max_pool2d_with_indices", "mean", "native_group_norm", "native_layer_norm", "norm",
        "ones", "ones_like", "pad", "pixel_shuffle", "pixel_unshuffle", "prelu", "prod", "repeat", "repeat_interleave", "rms_norm", "roll",
        "scalar_tensor", "slice_scatter", "softmax", "stack", "std", "sum", "to", "tril", "triu", "upsample_bilinear2d",
        "upsample_nearest2d", "var", "var_mean", "where", "zeros", "zeros_like",
    )
) | frozenset(
    f"quantized_decomposed::{name}"
    for name in ("quantize_per_tensor", "dequantize_per_tensor", "quantize_per_channel", "dequantize_per_channel")
)  # fmt: skip
_ANCHOR_WORDS = ("conv", "mm", "linear", "matmul", "attention", "einsum", "dot")
_EACH_BY_ITSELF = frozenset(f"aten::{name}" for name in ("_to_copy", "clone", "contiguous", "embedding", "index", "index_select", "to"))
_TRANSCENDENTAL = ("exp", "sigmoid", "tanh", "silu", "gelu", "erf", "softplus", "mish", "aten::elu", "log", "pow", "sin", "cos", "atan")
# Compiled code would depend on the state of a generator, or on the data.
_NEVER = ("rand", "dropout", "bernoulli", "multinomial", "nonzero", "unique", "masked_select", "item")


class RegionKind(enum.StrEnum):
    """What a region is built around."""

    ANCHOR = "anchor"  # one convolution, matrix product or attention, perhaps with its epilogue
    CLUSTER = "cluster"  # pointwise calls, reductions and copies
    ALONE = "alone"  # must stay as it is: it writes memory, returns a view, or no compiler takes it


def kind_of(calls: Sequence[Node], draft: Draft, written: set[int]) -> RegionKind:
    """The kind of an operator before anything is merged: its views and its one working call.

    Args:
        written: storages that some call of the model changes in place.
    """
    working = [node for node in calls if not is_view(node, draft.storage)]
    touched = [value for node in calls for value in (*node.reads(), *node.outputs) if value >= 0]
    if not working or any(node.mutates() for node in calls) or any(draft.storage[value] in written for value in touched):
        return RegionKind.ALONE
    if any(_refused(node) for node in working) or not all(_owns_outputs(node, draft) for node in working):
        return RegionKind.ALONE
    if any(is_anchor(node) for node in working):
        return RegionKind.ANCHOR
    if any(opaque(draft.specs[value]) for value in touched):
        return RegionKind.ALONE
    return RegionKind.CLUSTER if all(is_loop(node) for node in working) else RegionKind.ALONE


def is_loop(node: Node) -> bool:
    """Whether a compiler writes the call as a loop that may be merged with others."""
    return torch.Tag.pointwise in node.op.tags or node.kind in _LOOPS


def is_anchor(node: Node) -> bool:
    """Whether the call is a convolution, a matrix product or an attention."""
    return any(word in node.kind for word in _ANCHOR_WORDS)


def matrix_read(node: Node, draft: Draft) -> int | None:
    """The matrix of a product of one row, which a compiler writes as loops of sums on a CPU; ``None`` if the call is none."""
    if (draft.target or draft.device.type) != "cpu" or node.target not in (LINEAR, BATCHED):
        return None
    names = ("input", "weight", "bias") if node.target == LINEAR else ("self", "mat2")
    values = [node.tensor(name) for name in names]
    place = matrix_of(node.target, [draft.specs[value] if value is not None else None for value in values])
    return values[place] if place is not None else None


def makes_each_by_itself(node: Node) -> bool:
    """Whether each number that the call makes comes from one place of each tensor that it reads."""
    return torch.Tag.pointwise in node.op.tags or node.kind in _EACH_BY_ITSELF


def is_slow_alone(node: Node) -> bool:
    """Whether the call is much slower for one number at a time than for many, as which it runs at the end of a sum."""
    return torch.Tag.pointwise in node.op.tags and any(word in node.kind for word in _TRANSCENDENTAL)


def rounds_to_whole(node: Node, draft: Draft) -> bool:
    """Whether the call makes whole numbers of others."""
    fractions = [draft.specs[value].dtype for value in node.reads() if value >= 0]
    made = [draft.specs[value].dtype for value in node.outputs if value >= 0]
    return any(dtype.startswith(("int", "uint")) for dtype in made) and any(dtype.startswith(("float", "bfloat")) for dtype in fractions)


def opaque(spec: TensorSpec) -> bool:
    """Whether a tensor has a layout that only its library can read (packed weights)."""
    return len(spec.strides) != len(spec.shape)


def _refused(node: Node) -> bool:
    name = node.kind.partition("::")[2]
    # What a custom operator is called, or tagged, says nothing of what a compiler makes of it.
    return is_custom(node.kind) or any(word in name for word in _NEVER)


def _owns_outputs(node: Node, draft: Draft) -> bool:
    return all(draft.storage[value] == value for value in node.outputs if value >= 0)
