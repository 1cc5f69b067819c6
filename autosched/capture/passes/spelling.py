"""Calls in other words: what stands in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from autosched.capture.draft import Draft, Node
from autosched.core.program import Ref


class Spelling:
    """Calls in the place of ``node``, one behind the other; each makes a new value."""

    def __init__(self, draft: Draft, node: Node) -> None:
        self.draft, self.node = draft, node
        self.calls: list[Node] = []

    def call(self, op: OpOverload[..., Any], *args: object, **kwargs: object) -> Ref:
        """What one more call makes."""
        self.calls.append(Node(op, args, kwargs, (self.draft.fresh(),), self.node.name, self.node.source))
        return Ref(self.calls[-1].outputs[0])

    def finished(self) -> list[Node]:
        """All of them; the last makes what ``node`` made."""
        self.calls[-1].outputs = self.node.outputs
        return self.calls


def respelled(draft: Draft, words: Callable[[Node], list[Node]]) -> int:
    """What ``words`` has for a call stands in its place, if that is anything; returns how many it was for."""
    nodes: list[Node] = []
    changed = 0
    for node in draft.nodes:
        calls = words(node)
        nodes += calls or [node]
        changed += bool(calls)
    draft.nodes = nodes
    return changed
