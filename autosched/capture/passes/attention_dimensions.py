"""On a CPU: attention of three dimensions, or of more than four, in four, as which fused kernels take it."""

from __future__ import annotations

import math

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.spelling import Spelling
from autosched.core.program import Ref

aten = torch.ops.aten


def attend_in_four_dimensions(draft: Draft) -> int:
    """Batches of ``scaled_dot_product_attention`` in float32 are joined, but for the last one, which are the heads; returns how often.

    In other than four dimensions PyTorch computes it in parts, and keeps the scores. What a view cannot join is copied, as it is then.
    """
    nodes: list[Node] = []
    changed = 0
    for node in draft.nodes:
        calls = _joined(node, draft)
        nodes += calls or [node]
        changed += bool(calls)
    draft.nodes = nodes
    return changed


def _joined(node: Node, draft: Draft) -> list[Node]:
    if node.target != "aten::scaled_dot_product_attention.default" or node.outputs[0] < 0 or node.argument("enable_gqa"):
        return []
    given = [value for value in (node.tensor(name) for name in ("query", "key", "value")) if value is not None]
    shapes = [draft.specs[value].shape for value in given]
    batches = shapes[0][:-2]
    if len(batches) not in (1, *range(3, 8)) or any(shape[:-2] != batches for shape in shapes):
        return []
    if any(draft.specs[value].dtype != "float32" for value in given):
        return []
    spell = Spelling(draft, node)
    mask = node.tensor("attn_mask")
    among = None if mask is None else _mask_shape(draft.specs[mask].shape, batches)
    if mask is not None and among is None:
        return []
    joined = (math.prod(batches[:-1]), batches[-1])
    tensors = [spell.call(aten.reshape.default, Ref(value), [*joined, *shape[-2:]]) for value, shape in zip(given, shapes, strict=True)]
    hidden = None if mask is None or among is None else spell.call(aten.reshape.default, Ref(mask), among)
    options = {name: node.argument(name) for name in ("dropout_p", "is_causal", "scale")}
    made = spell.call(node.op, *tensors, hidden, **options)
    spell.call(aten.reshape.default, made, list(draft.specs[node.outputs[0]].shape))
    return spell.finished()


def _mask_shape(shape: tuple[int, ...], batches: tuple[int, ...]) -> list[int] | None:
    """The shape of a mask once batches are joined; None if that would need a larger one."""
    if len(shape) < 3:
        return list(shape)
    ahead = shape[:-3]
    if set(ahead) <= {1}:
        return [1, *shape[-3:]]
    return [math.prod(ahead), *shape[-3:]] if ahead == batches[:-1] else None
