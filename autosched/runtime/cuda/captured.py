"""A captured graph as plain values: nodes, edges, and which memory each operator's tensors were given.

The reader of a real CUDA graph and the test double both make these, so one audit serves both. Nothing here imports torch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from autosched.core.in_place import Link


class NodeKind(enum.StrEnum):
    """What a graph node does."""

    KERNEL = "kernel"
    MEMCPY = "memcpy"
    MEMSET = "memset"
    EVENT = "event"
    EMPTY = "empty"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node, in creation order where the reader can tell. ``operator`` is -1 for what no operator launched (a delay, a time stamp)."""

    kind: NodeKind
    operator: int


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of device memory, in bytes."""

    start: int
    bytes: int

    @property
    def end(self) -> int:
        """First address behind it."""
        return self.start + self.bytes

    def overlaps(self, other: Span) -> bool:
        """Whether the two share a byte."""
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True, slots=True)
class StorageSpan:
    """The memory that storage ``storage`` (index of the value that owns it) had during the capture."""

    storage: int
    span: Span


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """What a capture produced.

    Args:
        nodes: every node.
        edges: ``(before, after)`` node indices, as the graph holds them (not reduced, not closed).
        spans: memory of every storage an operator allocated, in launch order; a storage appears once.
        pool: memory of the graph's private pool; empty if unknown.
        stray_launches: kernels that ran on a stream outside the capture while it was open; -1 if the reader cannot tell.
        early_edges: how many edges let the later node start before the earlier one has ended (programmatic dependent launch). The later
            kernel waits by itself, at the place its author chose.
        overwritten: where an operator makes a value in the memory of another one.
    """

    nodes: tuple[GraphNode, ...]
    edges: tuple[tuple[int, int], ...]
    spans: tuple[StorageSpan, ...]
    pool: tuple[Span, ...] = ()
    stray_launches: int = -1
    early_edges: int = 0
    overwritten: tuple[Link, ...] = ()
