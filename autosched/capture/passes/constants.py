"""Move what depends on parameters alone into the prologue."""

from __future__ import annotations

import torch

from autosched.capture.draft import Draft, Node, is_dense

# Calls that ask a tensor for its form alone, and the number that they fill with.
_FILLED: dict[str, float | None] = {
    "aten::new_zeros": 0, "aten::new_ones": 1, "aten::new_full": None, "aten::zeros_like": 0, "aten::ones_like": 1, "aten::full_like": None,
}  # fmt: skip


def fold_constants(draft: Draft) -> int:
    """Calls that read only constants run once, when the program is bound, instead of at every inference.

    They stay calls on the parameters, so a bundle needs no weights. What leaves the model, whole or as a view, is computed anew each
    time: its owner may write to it. A call that fills a tensor as large as another, or of its type, reads none: all sizes are known.
    """
    fixed = draft.fixed_values()
    leaving = draft.leaving()
    kept: list[Node] = []
    moved = 0
    for node in draft.nodes:
        leaves = any(draft.storage[value] in leaving for value in node.outputs if value >= 0)
        if node.mutates() or leaves or "empty" in node.kind:
            kept.append(node)
            continue
        _ask_for_no_form(draft, node)
        if not all(value in fixed for value in node.reads()):
            kept.append(node)
            continue
        draft.prologue.append(node)
        fixed.update(value for value in node.outputs if value >= 0)
        moved += 1
    draft.nodes = kept
    draft.remove_dead()
    return moved


def _ask_for_no_form(draft: Draft, node: Node) -> None:
    """Have ``node`` name the size and the type that it takes from a tensor, if that is all it takes."""
    if node.kind not in _FILLED or len(node.outputs) != 1 or node.outputs[0] < 0:
        return
    number = _FILLED[node.kind]
    fill = node.argument("fill_value") if number is None else number
    spec = draft.specs[node.outputs[0]]
    if is_dense(spec) and isinstance(fill, bool | int | float):
        node.op = torch.ops.aten.full.default
        node.args = (list(spec.shape), fill)
        node.kwargs = {"dtype": getattr(torch, spec.dtype), "device": draft.device}
