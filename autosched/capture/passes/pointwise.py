"""Fuse chains of pointwise calls, and pointwise epilogues of heavier calls, into one operator of several calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.merging import Merging
from autosched.capture.passes.timing import rough_us
from autosched.capture.traffic import is_view
from autosched.core.custom_operators import is_custom

# A call on fewer elements takes about as long as launching it: what runs beside what no longer matters, how many launches does.
_SMALL_ELEMENTS = 16_384


def fuse_pointwise(draft: Draft) -> int:
    """Merge operators where nothing that could run beside something else has to wait for it.

    Three rules, none of which can make a cycle:

    1. *gate*: small pointwise operators that all start when the same heavy operator ends, and are connected, become one (an LSTM cell).
    2. *chain*: a small pointwise operator joins its only reader, if that is small and pointwise too.
    3. *epilogue*: a pointwise operator joins what it reads, if it is the only reader and everything else it reads is ready before.

    Returns how many operators disappeared.
    """
    chains = _Chains(draft)
    chains.merge_gates()
    chains.merge_chains()
    return chains.settle()


class _Chains(Merging):
    """Small pointwise operators, and what they would delay."""

    def __init__(self, draft: Draft) -> None:
        super().__init__(draft)
        self._pointwise = {index: self._is_pointwise(region) for index, region in self.members.items()}
        self._fixed = {index for index, region in self.members.items() if self._touches(region)}
        self._small = {
            index: self._pointwise[index] and index not in self._fixed and self._elements(region) <= _SMALL_ELEMENTS
            for index, region in self.members.items()
        }
        self._start: dict[int, float] = {}
        self._finish: dict[int, float] = {}
        for index, region in self.members.items():
            self._start[index] = max((self._finish[item] for item in self.before[index]), default=0.0)
            self._finish[index] = self._start[index] + rough_us(region, draft)

    def _is_pointwise(self, region: Sequence[Node]) -> bool:
        working = [node for node in region if not is_view(node, self._draft.storage)]
        return bool(working) and all(torch.Tag.pointwise in node.op.tags and not node.mutates() for node in working)

    def _touches(self, region: Sequence[Node]) -> bool:
        # Where memory changes in place, order is not only a matter of data; and what a custom operator's tags promise is its owner's
        # word: leave those operators as they are.
        return any(is_custom(node.kind) or any(self._draft.storage[value] in self._written for value in node.reads()) for node in region)

    def _elements(self, region: Sequence[Node]) -> int:
        return max((self._draft.specs[value].elements for node in region for value in node.outputs if value >= 0), default=0)

    def merge_gates(self) -> None:
        """Rule 1."""
        ancestors: dict[int, int] = {}
        frontier: dict[int, set[int]] = {}
        cluster: dict[int, int] = {}  # operator -> first operator of its cluster
        gate: dict[int, int | None] = {}
        for index in list(self.members):
            mask = 0
            for item in self.before[index]:
                mask |= ancestors[item] | (1 << item)
            ancestors[index] = mask
            reached: set[int] = set()
            for item in self.before[index]:
                reached |= frontier[item] if self._small[item] else {item}
            frontier[index] = {item for item in reached if not any(ancestors[other] >> item & 1 for other in reached)}
            gate[index] = next(iter(frontier[index])) if len(frontier[index]) == 1 else None
        for index in list(self.members):
            if not self._small[index] or gate[index] is None:
                continue
            for item in self.before[index]:
                if self._small[item] and gate[item] == gate[index]:
                    self._join(cluster, item, index)
        groups: dict[int, list[int]] = {}
        for index in cluster:
            groups.setdefault(self._root(cluster, index), []).append(index)
        for group in groups.values():
            first, *rest = sorted(group)
            for item in rest:
                self.merge(first, item)

    @staticmethod
    def _root(cluster: dict[int, int], index: int) -> int:
        while cluster.setdefault(index, index) != index:
            index = cluster[index]
        return index

    def _join(self, cluster: dict[int, int], a: int, b: int) -> None:
        roots = sorted((self._root(cluster, a), self._root(cluster, b)))
        cluster[roots[1]] = roots[0]

    def merge_chains(self) -> None:
        """Rules 2 and 3, from the inputs to the outputs, until nothing changes."""
        for index in sorted(self.members):
            current = index
            while current in self.members:
                producer = self._mergeable(current)
                if producer is None:
                    break
                self.merge(producer, current)
                current = producer

    def _mergeable(self, index: int) -> int | None:
        if not self._pointwise[index] or index in self._fixed:
            return None
        for producer in sorted(self.before[index], key=lambda item: (-self._finish[item], item)):
            if producer in self._fixed or self.after[producer] != {index}:
                continue
            others = [item for item in self.before[index] if item != producer]
            if self._small[producer] and self._small[index]:
                return producer
            if all(self._finish[item] <= self._start[producer] for item in others):
                return producer
        return None

    def merge(self, keep: int, gone: int) -> None:
        super().merge(keep, gone)
        self._pointwise[keep] = self._pointwise[keep] and self._pointwise[gone]
        self._small[keep] = self._small[keep] and self._small[gone]
        self._finish[keep] = max(self._finish[keep], self._finish[gone])
