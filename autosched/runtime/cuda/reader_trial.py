"""Whether what a driver says of captured graphs can be relied on: it is asked about one whose shape is known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from autosched.core.from_outside import let_through
from autosched.core.records import Failure
from autosched.runtime.cuda.captured import NodeKind
from autosched.runtime.cuda.lanes import GraphReader
from autosched.runtime.cuda.streams import Graph, Pool, Stream, StreamBackend

_log = logging.getLogger(__name__)
Record = Callable[[Sequence[Stream], Callable[[], Any], Pool], tuple[Graph, Any] | Failure]


def flaw_of(reader: GraphReader, backend: StreamBackend, streams: tuple[Stream, Stream], record: Record) -> str:
    """What is wrong with the answers of ``reader``; empty if nothing is, or if no graph can be captured to ask about.

    Args:
        streams: two distinct ones.
        record: captures what a function launches on some streams, with memory of a pool.
    """
    trial = _Trial(reader, backend, *streams)
    made = record(streams, trial.body, backend.new_pool())
    if isinstance(made, Failure):
        _log.debug("reading graphs could not be tried: %s", made.detail)
        return ""
    flaw = trial.flaw(made[0])
    backend.reset(made[0])
    if flaw:
        _log.info("captured graphs are not read here: %s", flaw)
    return flaw


class _Trial:
    """A fork and its join: one launch on ``left``, then one on each stream, then one on ``left`` that waits for both.

    Every answer the audit is built on is asked for, and compared with the graph that was launched and with the other answers. A
    launch may be several nodes.

    Args:
        left, right: distinct streams, both in the capture.
    """

    def __init__(self, reader: GraphReader, backend: StreamBackend, left: Stream, right: Stream) -> None:
        self._reader = reader
        self._backend = backend
        self._left, self._right = left, right
        self._last: list[int] = []  # the last node of each launch
        self._before: dict[int, tuple[int, ...]] = {}
        self._flaw = ""

    def body(self) -> None:
        """Launch, and ask on the way; to be called once, in a capture. A reader that raises does not end it."""
        backend = self._backend
        self._launch(self._left)
        fork = backend.new_event()
        backend.record(fork, self._left)
        backend.wait(self._right, fork)
        self._launch(self._right)
        self._launch(self._left)
        join = backend.new_event()
        backend.record(join, self._right)
        backend.wait(self._left, join)
        self._launch(self._left)

    def flaw(self, graph: Graph) -> str:
        """What is wrong with the answers about ``graph``, which :meth:`body` was captured into; empty if nothing is."""
        if self._flaw:
            return self._flaw
        try:
            nodes, edges = self._reader.read(graph)
            self._reader.early_edges(graph)
        except Exception as error:
            let_through(error)
            return f"the driver does not tell a graph's nodes and edges ({error})"
        if not {node for node, kind in nodes if kind is NodeKind.KERNEL} >= set(self._last):
            return "kernels that were captured are not among the nodes that the driver tells"
        if any(set(before) != _predecessors(edges, node) for node, before in self._before.items()):
            return "the driver tells other edges of a graph than while it was captured"
        first, right, left, last = (_ancestors(edges, node) for node in self._last)
        fork, aside, along, _ = self._last
        if first & {*self._last[1:]} or not (fork in right and fork in left and {aside, along} <= last) or aside in left or along in right:
            return "the driver tells another order of a graph than the one that was captured"
        return ""

    def _launch(self, stream: Stream) -> None:
        with self._backend.on(stream):
            self._backend.touch()
        if self._flaw:
            return
        try:
            ends = self._reader.frontier(stream)
            if len(ends) != 1 or ends[0] in self._last:
                self._flaw = f"the driver tells {len(ends)} nodes, or an earlier one, as what a capturing stream launched last"
                return
            self._last.append(ends[0])
            self._before[ends[0]] = self._reader.dependencies(ends[0])
        except Exception as error:
            let_through(error)
            self._flaw = f"the driver does not tell what a capturing stream waits for ({error})"


def _predecessors(edges: Collection[tuple[int, int]], node: int) -> set[int]:
    return {before for before, after in edges if after == node}


def _ancestors(edges: Collection[tuple[int, int]], node: int) -> set[int]:
    found: set[int] = set()
    pending = [node]
    while pending:
        fresh = _predecessors(edges, pending.pop()) - found
        found |= fresh
        pending += fresh
    return found
