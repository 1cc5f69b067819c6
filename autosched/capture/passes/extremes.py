"""On a CPU: the largest or least numbers along a dimension where nobody asks for their places."""

from __future__ import annotations

import torch

from autosched.capture.draft import Draft

aten = torch.ops.aten
_WITHOUT_PLACES = {"aten::max.dim": aten.amax.default, "aten::min.dim": aten.amin.default}


def drop_places(draft: Draft) -> int:
    """``x.max(dim)`` whose indices are not read becomes ``amax``, which vectors are used for, and ``x.min(dim)`` becomes ``amin``."""
    changed = 0
    for node in draft.nodes:
        op = _WITHOUT_PLACES.get(node.target)
        if op is None or node.outputs[1] >= 0:
            continue
        node.args, node.kwargs = (node.argument("self"), [node.argument("dim")], node.argument("keepdim")), {}
        node.op, node.outputs = op, node.outputs[:1]
        changed += 1
    return changed
