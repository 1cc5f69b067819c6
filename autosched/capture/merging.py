"""Operators of a draft, two of which can be made one: what the groupings of both lowerings have in common."""

from __future__ import annotations

from autosched.capture.draft import Draft, Node, iterate_regions
from autosched.capture.traffic import is_view
from autosched.core.topological import topological


class Merging:
    """Operators by number, a topological order of those that the draft begins with; and the edges between them.

    Args:
        draft: observed, its views sunk.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.members: dict[int, list[Node]] = {index: list(region) for index, region in enumerate(iterate_regions(draft))}
        self._place = {node: place for place, node in enumerate(node for region in self.members.values() for node in region)}
        self._written = {draft.storage[value] for region in self.members.values() for node in region for value in node.mutates()}
        home = {value: index for index, region in self.members.items() for node in region for value in node.outputs if value >= 0}
        self.before: dict[int, set[int]] = {index: set() for index in self.members}
        self.after: dict[int, set[int]] = {index: set() for index in self.members}
        for index, region in self.members.items():
            for node in region:
                for value in node.reads():
                    self._edge(home.get(value, index), index)

    def _edge(self, first: int, last: int) -> None:
        if first != last:
            self.before[last].add(first)
            self.after[first].add(last)

    def merge(self, keep: int, gone: int) -> None:
        """Make one operator of two, under the number ``keep``; nothing may lie between them."""
        self.members[keep] = sorted(self.members[keep] + self.members.pop(gone), key=self._place.__getitem__)
        for mine, theirs in ((self.before, self.after), (self.after, self.before)):
            for item in mine.pop(gone):
                theirs[item].discard(gone)
                if item != keep:
                    theirs[item].add(keep)
                    mine[keep].add(item)
            mine[keep].discard(gone)

    def _topological(self) -> list[int]:
        names = sorted(self.members, key=lambda index: self._place[self.members[index][-1]])
        rank = {index: position for position, index in enumerate(names)}
        return [names[position] for position in topological(len(names), [[rank[item] for item in self.before[index]] for index in names])]

    def settle(self) -> int:
        """Give the draft its operators in a topological order close to the original one; returns how many have disappeared."""
        draft, began = self._draft, sum(1 for _ in iterate_regions(self._draft))
        draft.regions = [_share_views(self.members[index], draft) for index in self._topological()]
        draft.nodes = [node for region in draft.regions for node in region]
        return began - len(draft.regions)


def _share_views(region: list[Node], draft: Draft) -> list[Node]:
    """The calls of one operator with equal views made once; a view that leaves the model is left alone."""
    first: dict[str, Node] = {}
    mapping: dict[int, int] = {}
    kept: list[Node] = []
    outputs = set(draft.output_values())
    for node in region:
        node.substitute(mapping)
        leaves = any(value in outputs for value in node.outputs)
        if not is_view(node, draft.storage) or leaves:
            kept.append(node)
            continue
        key = f"{node.target} {node.args!r} {sorted(node.kwargs.items())!r}"
        earlier = first.setdefault(key, node)
        if earlier is node:
            kept.append(node)
            continue
        slots = list(earlier.outputs)
        for slot, value in enumerate(node.outputs):
            if value >= 0 and slots[slot] >= 0:
                mapping[value] = slots[slot]
            elif value >= 0:
                slots[slot] = value
        earlier.outputs = tuple(slots)
    return kept
