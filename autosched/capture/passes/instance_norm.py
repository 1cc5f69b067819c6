"""On a CPU: the norm of each channel of a picture by the kernel that PyTorch has for groups of channels."""

from __future__ import annotations

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.spelling import Spelling, respelled
from autosched.core.program import Ref

aten = torch.ops.aten


def spell_instance_norms(draft: Draft) -> int:
    """``instance_norm`` in float32 becomes ``group_norm`` with a group for each channel: a sixth of the time. Returns how many did."""
    return respelled(draft, lambda node: _spelled(node, draft))


def _spelled(node: Node, draft: Draft) -> list[Node]:
    source = node.tensor("input") if node.target == "aten::instance_norm.default" else None
    if source is None or node.mutates() or not node.argument("use_input_stats") or draft.specs[source].dtype != "float32":
        return []
    spell, read, spec = Spelling(draft, node), Ref(source), draft.specs[source]
    if len(spec.shape) > 3 and spec.strides[1] == 1:
        # As a packed convolution leaves it. With channels side by side, ``group_norm`` takes the variance for the mean of squares less the
        # square of the mean: wrong where the mean is large.
        read = spell.call(aten.clone.default, read, memory_format=torch.contiguous_format)
    weight, bias, epsilon = (node.argument(name) for name in ("weight", "bias", "eps"))
    spell.call(aten.group_norm.default, read, spec.shape[1], weight, bias, epsilon, False)
    return spell.finished()
