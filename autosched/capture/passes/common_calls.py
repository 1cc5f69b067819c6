"""Compute equal things once."""

from __future__ import annotations

from autosched.capture.draft import Draft


def eliminate_common_calls(draft: Draft) -> int:
    """Of calls with the same operator and arguments keep the first.

    Calls on memory that the model changes stay, and so do two equal results that both leave the model, whole or as views.
    """
    outputs, leaving = set(draft.output_values()), draft.leaving()
    written = draft.written()

    def both_leave(a: int, b: int) -> bool:
        if draft.storage[a] == draft.storage[b]:
            return a in outputs and b in outputs
        return draft.storage[a] in leaving and draft.storage[b] in leaving

    first: dict[str, tuple[int, ...]] = {}
    mapping: dict[int, int] = {}
    removed = 0
    for node in draft.nodes:
        node.substitute(mapping)
        touches_written = any(draft.storage[value] in written for value in node.reads())
        if node.mutates() or touches_written or "empty" in node.kind:
            continue
        key = f"{node.target} {node.args!r} {sorted(node.kwargs.items())!r}"
        earlier = first.get(key)
        if earlier is None:
            first[key] = node.outputs
            continue
        pairs = [(later, kept) for later, kept in zip(node.outputs, earlier, strict=True) if later >= 0]
        if any(kept < 0 for _, kept in pairs) or any(both_leave(later, kept) for later, kept in pairs):
            continue
        mapping.update(pairs)
        # What stands for a result that leaves the model leaves it from here on.
        outputs.update(kept for later, kept in pairs if later in outputs)
        leaving.update(draft.storage[kept] for later, kept in pairs if draft.storage[later] in leaving)
        removed += 1
    draft.substitute(mapping)
    draft.remove_dead()
    return removed
