"""Move what depends on parameters alone into the prologue."""

from __future__ import annotations

from autosched.capture.draft import Draft, Node


def fold_constants(draft: Draft) -> int:
    """Calls that read only constants run once, when the program is bound, instead of at every inference.

    They stay calls on the parameters, so a bundle needs no weights. What leaves the model, whole or as a view, is computed anew each
    time: its owner may write to it.
    """
    fixed = draft.fixed_values()
    leaving = draft.leaving()
    kept: list[Node] = []
    moved = 0
    for node in draft.nodes:
        leaves = any(draft.storage[value] in leaving for value in node.outputs if value >= 0)
        if node.mutates() or leaves or "empty" in node.kind or not all(value in fixed for value in node.reads()):
            kept.append(node)
            continue
        draft.prologue.append(node)
        fixed.update(value for value in node.outputs if value >= 0)
        moved += 1
    draft.nodes = kept
    draft.remove_dead()
    return moved
