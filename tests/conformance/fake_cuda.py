"""A test double of CUDA streams, events, graph capture and the caching allocator: the rules that matter, and time.

It follows what is known of the real ones:

* a stream joins a capture by waiting for an event of it, and leaves it at the end; a launch elsewhere runs at once and is missing from
  the graph, without an error;
* events of a capture and events outside it never mix; every stream that joined must be waited for by the origin;
* memory belongs to the stream that allocated it, is handed out again to that stream alone, and the private pool is chosen for
  each allocation by whether the *stream* is capturing;
* a pool lives as long as a graph in it, and nothing is captured into it afterwards;
* ``record_stream`` in a capture keeps a block until the capture is over;
* streams come round robin from 32 for each priority.

Memory holds numbers: a replay runs the captured graph as a discrete-event simulation in which a node reads when it starts and writes
when it ends, so a missing edge or memory reused too early makes a wrong number, just as on a device.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from autosched.runtime.cuda.captured import NodeKind
from autosched.runtime.cuda.streams import EMPTY_CAPTURE, STREAMS_PER_PRIORITY, EmptyCapture
from tests.conformance.fake_allocator import FakeAllocator
from tests.conformance.fake_cuda_values import PAGE, CaptureError, FakeCapture, FakeEvent, FakeMemory, FakeNode, FakeStream, FakeTensor


class FakeCuda(FakeAllocator):
    """:class:`~autosched.runtime.cuda.streams.StreamBackend` and :class:`~autosched.runtime.cuda.lanes.GraphReader` in one.

    Args:
        memory_limit: bytes it can hand out.
    """

    def __init__(self, *, memory_limit: int = 1 << 40) -> None:
        super().__init__(memory_limit)
        self._handles = itertools.count(1)
        self._rings: dict[int, list[FakeStream]] = {}
        self._turn: dict[int, int] = {}
        self._pools = itertools.count(1)
        self.eager_launches: list[FakeStream] = []
        self.workspaces: dict[FakeStream, FakeTensor] = {}
        self.workspaces_stay = True  # which depends on the version of PyTorch, too
        self.strays = 0
        self.live_graphs = 0
        self.beside = 0  # how often this thread has said that it ends nobody's capture
        self._graphs_in: dict[int, int] = {}  # by pool; absent: in none yet
        self.duration_us: float = 10.0
        self.native = True
        self.abandoned = 0
        self.recovers = True  # whether an abandoned capture leaves the allocator clean, which depends on the version of PyTorch
        self._spoiled: set[int] = set()  # pools that a capture was abandoned in where it does not
        self.lost = ""  # set by a kernel that breaks the context: every later wait reports it
        self.start_order: list[int] = []
        self._running: list[FakeCapture] = []

    # -- streams and events -------------------------------------------------------------------------------------------
    def new_stream(self, priority: int) -> FakeStream:
        ring = self._rings.setdefault(priority, [])
        turn = self._turn.get(priority, 0)
        self._turn[priority] = turn + 1
        if turn < STREAMS_PER_PRIORITY:
            ring.append(FakeStream(next(self._handles), priority))
        return ring[turn % STREAMS_PER_PRIORITY]

    def handle(self, stream: FakeStream) -> int:
        return stream.handle

    def current_handle(self) -> int:
        return self.handle(self.current_stream())

    def current_stream(self) -> FakeStream:
        return self._current

    def lasting(self, stream: FakeStream) -> bool:
        return not stream.foreign

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def new_event(self, *, timing: bool = False, in_graph: bool = False) -> FakeEvent:
        return FakeEvent(timing, in_graph)

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        self._require_there(stream)
        event.recorded = True
        event.source = stream
        event.capture = stream.capture
        if stream.capture is None:
            event.at_us = stream.clock_us
            event.behind = stream.behind | {graph for graph in self._running if graph.running_on is stream}
            return
        self._require_valid(stream.capture)
        if event.in_graph:
            self._add(stream, FakeNode(NodeKind.EVENT, stream, (), 0.0, event=event))
            event.capture = None  # it happens at every replay, so anybody may read it
        event.frontier = stream.frontier

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        if not event.recorded:
            return
        if event.capture is None:
            if stream.capture is not None:
                self._invalidate(stream.capture, "cudaErrorStreamCaptureIsolation: a captured stream waited for an event from outside")
            stream.clock_us = max(stream.clock_us, event.at_us)
            stream.behind |= event.behind
            return
        if not event.capture.open:
            raise CaptureError("cudaErrorCapturedEvent: the event was last recorded in a capture that is over")
        if stream.capture is not None and stream.capture is not event.capture:
            self._invalidate(event.capture, "cudaErrorStreamCaptureMerge: two captures would become one")
        self._require_valid(event.capture)
        if stream.capture is None:
            stream.capture = event.capture
            stream.frontier = frozenset()
            event.capture.members.append(stream)
        stream.frontier = stream.frontier | event.frontier
        stream.joined = stream is event.capture.origin
        if stream is event.capture.origin and event.source is not None and event.source.frontier == event.frontier:
            event.source.joined = True

    def elapsed_us(self, start: FakeEvent, end: FakeEvent) -> float:
        if not (start.timing and end.timing and start.recorded and end.recorded):
            raise RuntimeError("both events must be recorded and made with timing")
        return end.at_us - start.at_us

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError(self.lost)
        if self._capture is not None:
            self._invalidate(self._capture, "cudaErrorStreamCaptureUnsupported: the device was synchronised in a capture")
        self._ended(frozenset(self._running))

    def await_event(self, event: FakeEvent) -> None:
        if self.lost:
            raise RuntimeError(self.lost)
        if event.capture is not None:
            self._invalidate(event.capture, "cudaErrorCapturedEvent: an event of a capture was waited for")
        self._ended(event.behind)

    @contextlib.contextmanager
    def beside_captures(self) -> Iterator[None]:
        self.beside += 1
        try:
            yield
        finally:
            self.beside -= 1

    @staticmethod
    def _require_there(stream: FakeStream) -> None:
        if stream.gone:
            raise RuntimeError("cudaErrorInvalidResourceHandle: the stream was destroyed")

    def _ended(self, graphs: frozenset[FakeCapture]) -> None:
        for graph in graphs:
            graph.running_on = None
        self._running = [graph for graph in self._running if graph.running_on is not None]

    def capturing(self, stream: FakeStream) -> bool:
        return stream.capture is not None and not stream.capture.invalid

    # -- capture ------------------------------------------------------------------------------------------------------
    def native_allocator(self) -> bool:
        return self.native

    def new_pool(self) -> int:
        return next(self._pools)

    def begin_capture(self, pool: int) -> FakeCapture:
        stream = self._current
        if self._graphs_in.get(pool) == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED: the pool is in no graph any more")
        if stream is self.default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if self._capture is not None:
            raise RuntimeError("already recording")
        if pool in self._spoiled:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        capture = FakeCapture(pool, stream)
        stream.capture, stream.frontier, stream.joined = capture, frozenset(), True
        capture.members.append(stream)
        self._capture = capture
        self._segments.setdefault(pool, [])
        self.strays = 0
        self.live_graphs += 1
        self._graphs_in[pool] = self._graphs_in.get(pool, 0) + 1
        return capture

    def end_capture(self, graph: FakeCapture) -> None:
        if self._current is not graph.origin:
            raise RuntimeError("Capture must end on the same stream it began on.")
        if not graph.open:
            raise RuntimeError("capture_end() called before capture_begin().")
        unjoined = [stream.handle for stream in graph.members if stream is not graph.origin and not stream.joined]
        reached = self._behind(graph, graph.origin.frontier)
        graph.open = False
        for stream in graph.members:
            stream.capture, stream.frontier = None, frozenset()
        self._capture = None
        self.release_deferred()
        if graph.invalid:
            raise CaptureError(f"cudaErrorStreamCaptureInvalidated: {graph.invalid}")
        if unjoined or len(reached) != len(graph.nodes):
            raise CaptureError(f"cudaErrorStreamCaptureUnjoined: streams {unjoined}")
        if not graph.nodes:
            raise EmptyCapture(EMPTY_CAPTURE)

    def abandon_capture(self, graph: FakeCapture, pool: int) -> bool:
        self.abandoned += 1
        self._spoiled |= set() if self.recovers else {pool}
        self.reset(graph)
        return self.recovers

    def instantiate(self, graph: FakeCapture) -> None:
        if graph.open or graph.destroyed:
            raise RuntimeError("nothing to instantiate")
        graph.ready = True

    def reset(self, graph: FakeCapture) -> None:
        if graph.running_on is not None:
            # CUDA frees the graph when it has ended; its buffers go to the next who asks.
            raise RuntimeError("a graph is freed that nobody has waited for")
        if not graph.destroyed:
            self.live_graphs -= 1
            self._graphs_in[graph.pool] -= 1
        graph.destroyed = True

    def replay(self, graph: FakeCapture) -> None:
        """Run every node when its dependencies have ended; nodes that become ready together start in creation order."""
        if not graph.ready or graph.destroyed:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        graph.running_on = self._current
        self._running.append(graph)
        start_us = self._current.clock_us
        waiting = [len(node.dependencies) for node in graph.nodes]
        after: list[list[int]] = [[] for _ in graph.nodes]
        for index, node in enumerate(graph.nodes):
            for before in node.dependencies:
                after[before].append(index)
        running: list[tuple[float, int, int, Callable[[FakeMemory], None] | None]] = []
        order = itertools.count()
        end_us = start_us
        self.start_order = []

        def start(index: int, now: float) -> None:
            node = graph.nodes[index]
            self.start_order.append(index)
            commit = node.run(self.memory) if node.run is not None else None
            if node.event is not None:
                node.event.at_us = now
            heapq.heappush(running, (now + node.duration_us, next(order), index, commit))

        for index, count in enumerate(waiting):
            if count == 0:
                start(index, start_us)
        while running:
            now, _, index, commit = heapq.heappop(running)
            end_us = max(end_us, now)
            if commit is not None:
                commit(self.memory)
            for follower in after[index]:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    start(follower, now)
        self._current.clock_us = end_us

    def launch(self, run: Callable[[FakeMemory], Callable[[FakeMemory], None]] | None, duration_us: float | None = None) -> None:
        """One kernel on the current stream. ``run(memory)`` reads and returns what writes."""
        stream = self._current
        duration = self.duration_us if duration_us is None else duration_us
        if stream.capture is not None:
            self._require_valid(stream.capture)
            self._add(stream, FakeNode(NodeKind.KERNEL, stream, (), duration, run))
            return
        if self._capture is not None:
            self.strays += 1  # runs now, and the graph will never know
        self.eager_launches.append(stream)
        stream.clock_us += duration
        if run is not None:
            run(self.memory)(self.memory)

    def sleep(self, time_us: float) -> None:
        self.launch(None, duration_us=time_us)

    def same(self, tensors: Sequence[FakeTensor], others: Sequence[FakeTensor]) -> bool:
        return [self.number(item) for item in tensors] == [self.number(item) for item in others]

    def touch(self) -> None:
        tensor = self.allocate(PAGE)
        span = tensor.storage.span
        self.launch(lambda memory: lambda target: target.write(span, 1), 1.0)

    def multiply(self) -> bool:
        stream = self.current_stream()
        had_none = stream not in self.workspaces
        if had_none and self.workspaces_stay:
            self.workspaces[stream] = self.allocate(PAGE)
        self.touch()
        return had_none

    def keeps_workspaces(self) -> bool:
        return self.workspaces_stay

    def _add(self, stream: FakeStream, node: FakeNode) -> None:
        capture = stream.capture
        assert capture is not None
        node.dependencies = self._reduced(capture, stream.frontier)
        capture.nodes.append(node)
        stream.frontier = frozenset({len(capture.nodes) - 1})
        stream.joined = stream is capture.origin

    def _reduced(self, capture: FakeCapture, frontier: Iterable[int]) -> tuple[int, ...]:
        kept: list[int] = []
        behind: set[int] = set()
        for index in sorted(frontier, reverse=True):
            if index not in behind:
                kept.append(index)
                behind |= self._behind(capture, {index})
        return tuple(sorted(kept))

    @staticmethod
    def _behind(capture: FakeCapture, frontier: Iterable[int]) -> set[int]:
        seen: set[int] = set()
        pending = list(frontier)
        while pending:
            index = pending.pop()
            if index not in seen:
                seen.add(index)
                pending += capture.nodes[index].dependencies
        return seen

    def _invalidate(self, capture: FakeCapture, why: str) -> None:
        capture.invalid = capture.invalid or why
        raise CaptureError(why)

    @staticmethod
    def _require_valid(capture: FakeCapture) -> None:
        if capture.invalid:
            raise CaptureError(f"cudaErrorStreamCaptureInvalidated: {capture.invalid}")

    # -- reading a graph ----------------------------------------------------------------------------------------------
    @property
    def stray_launches(self) -> int:
        return self.strays

    def frontier(self, stream: FakeStream) -> tuple[int, ...]:
        return tuple(sorted(stream.frontier))

    def dependencies(self, node: int) -> tuple[int, ...]:
        assert self._capture is not None
        return self._capture.nodes[node].dependencies

    def read(self, graph: FakeCapture) -> tuple[tuple[tuple[int, NodeKind], ...], tuple[tuple[int, int], ...]]:
        nodes = tuple((index, node.kind) for index, node in enumerate(graph.nodes))
        return nodes, tuple((before, index) for index, node in enumerate(graph.nodes) for before in node.dependencies)

    def early_edges(self, graph: FakeCapture) -> int:
        return 0
