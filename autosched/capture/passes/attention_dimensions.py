"""On a CPU: attention of three dimensions, or of more than four, in four, as which fused kernels take it."""

from __future__ import annotations

import math

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.attention import scales_what_it_hides
from autosched.capture.passes.spelling import Spelling, respelled
from autosched.capture.passes.views import depends_on_strides, loosen_views
from autosched.core.program import Ref

aten = torch.ops.aten
_FUSED = frozenset({"float32", "bfloat16", "float16"})


def attend_in_four_dimensions(draft: Draft) -> int:
    """Batches of ``scaled_dot_product_attention`` are joined, but for the last of several, the heads; returns how often.

    In other than four dimensions PyTorch computes it in parts, and keeps the scores. What a view cannot join is copied, as it is then. In
    sixteen bits those parts are float32; a fused kernel rounds powers to sixteen bits, as it does in four dimensions, and a result once.
    """
    if depends_on_strides(draft):
        return 0
    changed = respelled(draft, lambda node: _joined(node, draft))
    if changed:
        # Fused kernels write the heads of a query side by side.
        loosen_views(draft)
    return changed


def _joined(node: Node, draft: Draft) -> list[Node]:
    if node.target != "aten::scaled_dot_product_attention.default" or node.outputs[0] < 0 or node.argument("enable_gqa"):
        return []
    if node.argument("is_causal") and scales_what_it_hides(node):
        return []
    given = [value for value in (node.tensor(name) for name in ("query", "key", "value")) if value is not None]
    shapes = [draft.specs[value].shape for value in given]
    batches = shapes[0][:-2]
    if len(batches) in (0, 2) or any(shape[:-2] != batches for shape in shapes):
        return []
    dtypes = {draft.specs[value].dtype for value in given}
    if len(dtypes) != 1 or not dtypes <= _FUSED:
        return []
    spell = Spelling(draft, node)
    mask = node.tensor("attn_mask")
    seen = None if mask is None else draft.specs[mask].shape
    if len(batches) == 1:
        # One head each, whose rows stay side by side.
        batches = (*batches, 1)
        seen = seen if seen is None or len(seen) < 3 else (seen[0], 1, *seen[1:])
    among = None if seen is None else _joined_mask(seen, batches)
    if mask is not None and among is None:
        return []
    joined = (math.prod(batches[:-1]), batches[-1])
    tensors = [spell.call(aten.reshape.default, Ref(value), [*joined, *shape[-2:]]) for value, shape in zip(given, shapes, strict=True)]
    hidden = None if mask is None or among is None else spell.call(aten.reshape.default, Ref(mask), among)
    options = {name: node.argument(name) for name in ("dropout_p", "is_causal", "scale")}
    made = spell.call(node.op, *tensors, hidden, **options)
    spell.call(aten.reshape.default, made, list(draft.specs[node.outputs[0]].shape))
    return spell.finished()


def _joined_mask(shape: tuple[int, ...], batches: tuple[int, ...]) -> list[int] | None:
    """The shape of a mask once batches are joined; None if that would need a larger one."""
    if len(shape) < 3:
        return list(shape)
    ahead = shape[:-3]
    if set(ahead) <= {1}:
        return [1, *shape[-3:]]
    return [math.prod(ahead), *shape[-3:]] if ahead == batches[:-1] else None
