"""The lowering ``fused``: a partition of the draft into regions, each one operator that a compiler can make one callable of.

Two sorts of regions grow: *anchors* (a convolution, matrix product or attention, with its single-consumer epilogue) and *clusters*
(connected pointwise calls, reductions and copies). Everything else stays as it is. Every merge keeps the graph of regions free of cycles,
and is made only where what it delays is worth less than what it saves: a launch, and a tensor that is neither written nor read
again. So two branches that could run at the same time stay apart unless they are so small that launching them costs more.

0. *product*: on a CPU, a product in eight bits absorbs what a kernel computes with it (``core.byte_products``), and nothing else.
1. *cone*: a cluster absorbs what it reads if nobody else reads it (the closed diamonds of a normalisation, an activation).
2. *epilogue*: an anchor absorbs the cluster that alone reads it, with residual inputs that are ready before.
3. *matrix*: a product of one row absorbs the cluster that makes its matrix, if nobody else reads that (numbers of few bits and their
   scales, the chosen experts of a mixture).
4. *fan*: a cluster absorbs a reader although others read it too, if they can wait for it (the two results of an LSTM cell), or do so
   anyway (the scales of rows, and the rows rounded by them).
5. *siblings*: small clusters that wait for the same become one (the lookups of a recommender).
"""

from __future__ import annotations

from collections.abc import Sequence

from autosched.capture.draft import Draft, Node
from autosched.capture.merging import Merging
from autosched.capture.passes.timing import products_us
from autosched.capture.region_kinds import RegionKind, is_slow_alone, kind_of, makes_each_by_itself, matrix_read, rounds_to_whole
from autosched.capture.traffic import bytes_read, bytes_written, footprint, is_view
from autosched.core.byte_products import INT_MM, byte_product, whole_views

# Orders of magnitude, like those of ``passes.timing``: what a launch costs, and how many bytes move in a microsecond.
_LAUNCH_US = 4.0
_BYTES_EACH_US = 10_000
# Compile time grows faster than the number of calls, and more than this in one kernel spills registers.
_MOST_CALLS = 96


def fuse_regions(draft: Draft) -> int:
    """Partition an observed draft, whose views are sunk, into regions; returns how many operators disappeared."""
    partition = _Partition(draft)
    partition.products()
    partition.cones()
    partition.epilogues()
    partition.matrices()
    partition.fans()
    partition.siblings()
    return partition.settle()


class _Partition(Merging):
    """Regions, each with what it takes and when it could start."""

    def __init__(self, draft: Draft) -> None:
        super().__init__(draft)
        self.kind = {index: kind_of(region, draft, self._written) for index, region in self.members.items()}
        last_touch: dict[int, int] = {}
        for index, region in self.members.items():
            for value in (value for node in region for value in (*node.reads(), *node.outputs)):
                storage = draft.storage.get(value, -1)
                if storage in self._written:
                    # In-place changes order whoever touches the memory, not only who reads a value of it.
                    self._edge(last_touch.get(storage, index), index)
                    last_touch[storage] = index
        self.work = {index: _LAUNCH_US + self._bare_work(index) for index in self.members}
        self.start: dict[int, float] = {}
        # Anchors that absorb no more.
        self.closed: set[int] = set()
        self._time()

    def _time(self) -> None:
        """Earliest starts of all regions with unlimited lanes."""
        for index in self._topological():
            self.start[index] = max((self.start[item] + self.work[item] for item in self.before[index]), default=0.0)

    def _forget(self, index: int) -> None:
        """The start of a region, and of what comes after it, is another one: ``_start`` finds it when it is asked for.

        To find all of them after each merge takes time in the square of their number.
        """
        stack = [index]
        while stack:
            # Where one is not known, none after it is.
            if self.start.pop(item := stack.pop(), None) is not None:
                stack.extend(self.after[item])

    def _start(self, index: int) -> float:
        stack = [index]
        while stack:
            if (item := stack[-1]) in self.start:
                stack.pop()
            elif missing := [earlier for earlier in self.before[item] if earlier not in self.start]:
                stack.extend(missing)
            else:
                self.start[item] = max((self.start[earlier] + self.work[earlier] for earlier in self.before[item]), default=0.0)
        return self.start[index]

    def _finish(self, index: int) -> float:
        return self._start(index) + self.work[index]

    def products(self) -> None:
        """Rule 0. Nobody else reads what is made from the product, so nothing that the others read waits for it."""
        draft = self._draft
        if (draft.target or draft.device.type) != "cpu":
            return
        region_of = {node: index for index, region in self.members.items() for node in region}
        views, readers, kept = whole_views(draft.nodes, draft.specs), draft.users(), set(draft.output_values())
        for index in sorted(self.members):
            anchor = next((node for node in self.members.get(index, ()) if node.target == INT_MM), None)
            found = byte_product(anchor, draft.specs, views, readers, kept) if anchor is not None else None
            if found is None or self.kind[index] is not RegionKind.ANCHOR:
                continue
            regions = list(dict.fromkeys(region_of[node] for node in found.path if isinstance(node, Node)))
            if all(self._count(item) == 1 for item in regions):
                for item in regions[1:]:
                    self.merge(index, item)
                self.closed.add(index)
        self._time()

    def cones(self) -> None:
        """Rule 1, from the outputs to the inputs."""
        for index in sorted(self.members, reverse=True):
            if index not in self.members or self.kind[index] is not RegionKind.CLUSTER:
                continue
            grown = True
            while grown:
                grown = False
                for item in sorted(self.before[index], reverse=True):
                    if self.kind[item] is RegionKind.CLUSTER and self.after[item] == {index} and self._worth(item, index):
                        self.merge(index, item)
                        grown = True
                        break
        self._time()

    def epilogues(self) -> None:
        """Rule 2, from the inputs to the outputs. Of several anchors that one cluster reads, the one that ends last gets it."""
        for index in sorted(self.members):
            if index not in self.members or self.kind[index] is not RegionKind.CLUSTER:
                continue
            open_anchors = (item for item in self.before[index] - self.closed if self.kind[item] is RegionKind.ANCHOR)
            anchors = [item for item in open_anchors if self.after[item] == {index}]
            for anchor in sorted(anchors, key=lambda item: (-self._finish(item), item)):
                if self._suits(anchor, index) and self._worth(anchor, index):
                    self.merge(anchor, index)
                    break
        self._time()

    def matrices(self) -> None:
        """Rule 3: each number of the matrix is needed once, so nothing is computed twice, and it is neither written nor read again."""
        for index in sorted(self.members):
            for item in sorted(self.before.get(index, ())):
                alone = self.kind[item] is RegionKind.CLUSTER and self.after[item] == {index}
                if alone and self._makes_matrix(item, index):
                    self.merge(index, item)
        self._time()

    def _makes_matrix(self, cluster: int, anchor: int) -> bool:
        """Whether the cluster makes each number by itself, and nothing of it is read but as the matrix of a product of one row."""
        draft = self._draft
        working = [node for node in self.members[cluster] if not is_view(node, draft.storage)]
        made = {draft.storage[value] for node in working for value in node.outputs if value >= 0}
        found = []
        for node in self.members[anchor]:
            read = [value for value in node.reads() if draft.storage[value] in made]
            if read and not is_view(node, draft.storage):
                found.append(read == [matrix_read(node, draft)])
        return bool(found) and all(found) and all(map(makes_each_by_itself, working))

    def fans(self) -> None:
        """Rule 4, from the inputs to the outputs: others that read the producer then wait for this reader, too."""
        for index in sorted(self.members):
            if index not in self.members or self.kind[index] is not RegionKind.CLUSTER:
                continue
            own = self._bare_work(index)
            for item in sorted(self.before[index], key=lambda item: (-self._finish(item), item)):
                if (
                    self.kind[item] is RegionKind.ALONE
                    or item in self.closed
                    or not self._convex(item, index)
                    or not self._suits(item, index)
                ):
                    continue
                if self.kind[item] is RegionKind.ANCHOR and self._count(item) + self._count(index) > _MOST_CALLS // 4:
                    continue
                delay = own + max(0.0, self._start(index) - self._finish(item)) if self._delays(item, index) else 0.0
                if delay <= self._saved(item, index) and self._worth(item, index):
                    self.merge(item, index)
                    self._forget(item)
                    break

    def _delays(self, item: int, index: int) -> bool:
        """Whether others than ``index`` read ``item`` that need not wait for ``index``."""
        others = self.after[item] - {index} - self.after[index]
        return any(self._convex(index, other) for other in others)

    def siblings(self) -> None:
        """Rule 5: clusters with the same predecessors, together no longer than a launch; first those that also have the same readers."""
        for same_readers in (True, False):
            groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
            for index in sorted(self.members):
                if self.kind[index] is RegionKind.CLUSTER and self._bare_work(index) <= _LAUNCH_US:
                    readers = tuple(sorted(self.after[index])) if same_readers else ()
                    groups.setdefault((tuple(sorted(self.before[index])), readers), []).append(index)
            self._join(list(groups.values()))

    def _join(self, groups: Sequence[list[int]]) -> None:
        for group in groups:
            while len(group) > 1:
                first, rest = group[0], group[1:]
                total = self._bare_work(first)
                for item in rest:
                    total += self._bare_work(item)
                    # Of two that wait for the same, neither waits for the other.
                    apart = self.before[first] != self.before[item]
                    if total > _LAUNCH_US or self._count(first) + self._count(item) > _MOST_CALLS or apart:
                        break
                    self.merge(first, item)
                group = [item for item in rest if item in self.members]

    def _bare_work(self, index: int) -> float:
        """Guess of the time of a region without its launch: what merging siblings would put one after the other."""
        region, draft = self.members[index], self._draft
        own = (value for node in region for value in node.outputs if value >= 0 and draft.storage[value] == value)
        moved = bytes_read(region, draft.specs, draft.storage) + bytes_written(own, draft.specs, draft.storage)
        return moved / _BYTES_EACH_US + products_us(region, draft)

    def _count(self, index: int) -> int:
        return sum(not is_view(node, self._draft.storage) for node in self.members[index])

    def _suits(self, anchor: int, cluster: int) -> bool:
        """Not if the cluster would be computed a number at a time, at the end of each sum of a product of one row.

        Nor if an anchor's numbers are rounded to whole ones by it, or by what reads both: two ways to compute the anchor differ in the last
        bits, so some would be rounded up by one and down by the other, and the two could not be compared.
        """
        if self.kind[anchor] is RegionKind.ANCHOR and any(map(self._rounds, (cluster, *(self.after[anchor] & self.after[cluster])))):
            return False
        rows = any(matrix_read(node, self._draft) is not None for node in self.members[anchor])
        return not rows or not any(is_slow_alone(node) for node in self.members[cluster])

    def _rounds(self, index: int) -> bool:
        return any(rounds_to_whole(node, self._draft) for node in self.members[index])

    def _worth(self, producer: int, reader: int) -> bool:
        """Whether the producer may be put off until everything else that the reader reads is there."""
        if self._count(producer) + self._count(reader) > _MOST_CALLS:
            return False
        others = max((self._finish(item) for item in self.before[reader] if item != producer), default=0.0)
        delay = min(self._bare_work(producer), max(0.0, others - self._start(producer)))
        return delay <= self._saved(producer, reader)

    def _saved(self, producer: int, reader: int) -> float:
        """A launch, and the memory traffic of what one makes and the other reads."""
        made = {value for node in self.members[producer] for value in node.outputs if value >= 0}
        shared = {value for node in self.members[reader] for value in node.reads()} & made
        return _LAUNCH_US + sum(footprint(self._draft.specs[value]) for value in shared) / _BYTES_EACH_US

    def _convex(self, first: int, last: int) -> bool:
        """Whether nothing lies between the two, so that one region of both makes no cycle."""
        ended, seen = self._finish(first), set[int]()
        stack = [item for item in self.before[last] if item != first]
        while stack:
            index = stack.pop()
            if index == first:
                return False
            # What starts before ``first`` has ended does not wait for it.
            if index not in seen and self._start(index) >= ended:
                seen.add(index)
                stack.extend(self.before[index])
        return True

    def merge(self, keep: int, gone: int) -> None:
        super().merge(keep, gone)
        if RegionKind.ANCHOR in (self.kind[keep], self.kind[gone]):
            self.kind[keep] = RegionKind.ANCHOR
        self.start[keep] = max((self._finish(item) for item in self.before[keep]), default=0.0)
        self.work[keep] = _LAUNCH_US + self._bare_work(keep)
