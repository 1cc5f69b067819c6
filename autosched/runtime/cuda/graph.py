"""Any plan on CUDA streams: run eagerly on several streams, or captured into one CUDA Graph and replayed.

Both run the one :func:`walk`. The rules a capture must keep, and where each is kept:

* the origin stream launches nothing, and every stream is forked from it before the first allocation - a stream that has not
  joined yet allocates from the default pool, and what it launches is silently missing from the graph (``cuda.recording``);
* every stream is joined at the end, even one left idle, or the whole capture is lost;
* events are made anew for each capture, and none is shared with the eager run: they may not mix;
* ``record_stream`` is never called: in a capture it keeps a block from being used again until the end. Dropping the last reference
  when the plan says so is enough, because by then the block's own stream has waited for every reader;
* warm-up runs on other streams in the same thread, so that lazy loading is over and yet cuBLAS makes its workspaces, which belong to
  a stream (up to PyTorch 2.13; in 2.15 to a call), inside the capture, in the private pool; for graphs that serve, in a pool of their own
  (``cuda.workspaces``);
* no garbage collection, and no ``torch.cuda.graph`` (it empties the allocator's cache each time).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from autosched.core.errors import DeviceError
from autosched.core.from_outside import let_through
from autosched.core.graph import OpGraph
from autosched.core.in_place import outputs_overwritten
from autosched.core.records import Failure, FailureKind
from autosched.runtime.cuda.bindings import NOT_INSTALLED
from autosched.runtime.cuda.captured import CapturedGraph, GraphNode, StorageSpan
from autosched.runtime.cuda.failures import failure_of
from autosched.runtime.cuda.lanes import NO_OPERATOR, CaptureNotes, CaptureOptions, GraphReader, LaneExecutor, Launchable
from autosched.runtime.cuda.reader_trial import flaw_of
from autosched.runtime.cuda.recording import Recorder
from autosched.runtime.cuda.runner import GraphRunner, ReplayGate
from autosched.runtime.cuda.streams import Graph, Pool, Stream, StreamBackend, StreamSet, Tensor
from autosched.runtime.cuda.workspaces import Workspaces
from autosched.runtime.plan import Plan
from autosched.runtime.thread_state import inference_mode
from autosched.runtime.walk import walk

_OTHER_ALLOCATOR = (
    "remove backend: from PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, PYTORCH_NO_CUDA_MEMORY_CACHING (whatever its value), and any "
    "allocator set with torch.cuda.memory"
)


class GraphCapturer:
    """Makes graphs on one device: owns the streams, the shared scratch pool, and what must be done when a capture fails.

    ``tainted`` turns true when a capture failed in a way this process cannot undo; its owner should then start a new process.

    Args:
        reader: needed to observe captures. It is tried on a graph of known shape at the first warm-up, and given up if it fails.
        unread: why there is no reader, if there is none.
        streams: taken before; they are never freed, so a process that makes several capturers hands its streams on.

    Raises:
        DeviceError: if the allocator is not PyTorch's own; the frees rely on its rules.
    """

    def __init__(
        self,
        backend: StreamBackend,
        *,
        reader: GraphReader | None = None,
        unread: str = NOT_INSTALLED,
        streams: StreamSet | None = None,
    ) -> None:
        if not backend.native_allocator():
            raise DeviceError(f"the CUDA allocator is not PyTorch's native one, or caches nothing; {_OTHER_ALLOCATOR}")
        self.backend = backend
        self.streams = streams if streams is not None else StreamSet(backend)
        self.recorder = Recorder(backend, self.streams)
        self._gate = ReplayGate(backend)
        self._reader = reader
        self._tried = False
        self.unread = unread if reader is None else ""
        self._scratch: Pool | None = None
        self._keepers: list[Graph] = []
        self._workspaces = Workspaces(backend, self.streams, self._recorded)
        self._captured_on: set[int] = set()

    @property
    def tainted(self) -> bool:
        """Whether a capture failed in a way that this process cannot undo."""
        return self.recorder.tainted

    @property
    def can_observe(self) -> bool:
        """Whether captures can be described, and so audited."""
        return self._reader is not None

    def scratch_pool(self) -> Pool:
        """The pool that candidates share, so that trying hundreds of them does not grow memory. Their replays must not overlap.

        A pool lives as long as a graph in it does; a tiny one of its own keeps it.
        """
        if self._scratch is None:
            self._load_own_kernels()
            pool = self.backend.new_pool()
            keeper = self.recorder.record([self.streams.named("keeper")], lambda: self._touch("keeper"), pool)
            if isinstance(keeper, Failure):
                raise DeviceError(f"this device captures no graph at all: {keeper.detail}")
            self._keepers.append(keeper[0])
            self._scratch = pool
        return self._scratch

    def give_back(self) -> None:
        """Give the device the memory of graphs that are gone: PyTorch caches it for pools that nobody has any more, until no other is left.

        As ``torch.cuda.graph`` does at every entry; but here only where there may be some.
        """
        if self._gate.freed:
            self._gate.freed = False
            self.backend.release_cached()

    def hold_workspaces(self, plan: Plan) -> Failure | None:
        """Make the libraries' workspaces of the plan's lanes where they outlive every graph; see :class:`Workspaces`."""
        return self._workspaces.hold(lambda: self._lanes(plan))

    def warm_up(self, program: Launchable, inputs: Sequence[Tensor], beat: Callable[[], None] | None = None) -> Failure | None:
        """Run every operator eagerly, twice, on a stream that is never captured: modules load, libraries choose their algorithms."""
        stream = self.streams.named("warm-up")
        try:
            self._load_own_kernels()
            self._try_reader()
            with inference_mode(True), self.backend.on(stream):
                for _ in range(2):
                    program.run(inputs, beat)
            self.backend.synchronize()
        except Exception as error:
            let_through(error)
            return failure_of(error, "warm-up")
        return None

    def run_eager(self, program: Launchable, plan: Plan, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run a plan on several streams without a graph, ordered after and before the current stream.

        The outputs live in blocks of the lanes' streams; those streams are private and wait for the caller's stream at every call, so a
        caller may drop them while its own stream still reads.
        """
        backend = self.backend
        home = backend.current_stream()
        slots = program.new_slots(inputs)
        executor = LaneExecutor(backend, self.streams, program, slots, CaptureOptions(), None)
        lanes = self._lanes(plan)
        start = backend.new_event()
        backend.record(start, home)
        for stream in lanes:
            backend.wait(stream, start)
        with inference_mode(True):
            walk(plan.steps, executor)
        for stream in lanes:
            end = backend.new_event()
            backend.record(end, stream)
            backend.wait(home, end)
        return program.outputs(slots)

    def capture(
        self,
        program: Launchable,
        plan: Plan,
        inputs: Sequence[Tensor],
        *,
        graph: OpGraph | None = None,
        pool: Pool | None = None,
        options: CaptureOptions | None = None,
        callers: Collection[int] = (),
    ) -> GraphRunner | Failure:
        """Capture ``plan`` into one instantiated graph that reads ``inputs`` where they are.

        Args:
            inputs: static buffers; held by the runner for its life.
            graph: needed to observe, and for programs that overwrite inputs.
            pool: default a private pool of its own; the runner's may be another one where memory was short. Graphs in one pool share
                memory: never replay two at the same time, and read one's outputs before replaying another.
            callers: inputs, by place, that are a caller's memory, to be overwritten where it lies; as for ``GraphRunner``.

        Returns:
            A runner, or a ``Failure`` (OOM, CAPTURE) after which memory is returned and the next capture may go ahead.
        """
        options = options or CaptureOptions()
        if options.observe and (self._reader is None or graph is None):
            return Failure(FailureKind.UNAVAILABLE, f"the captured graph cannot be read: {self.unread or 'its operators are not given'}")
        chosen = self.backend.new_pool() if pool is None else pool
        lanes = {self.backend.handle(stream) for stream in self._lanes(plan)}
        tainted = self.tainted
        made = self._captured(program, plan, inputs, graph, chosen, options, callers)
        if (roomier := self._room(made, chosen, tainted)) is not None:
            chosen, made = roomier, self._captured(program, plan, inputs, graph, roomier, options, callers)
        if isinstance(made, Failure):
            return made
        runner, left_behind = made
        if left_behind and not lanes <= self._captured_on:
            # Workspaces made on the way hide how much the values held before them; the next graph finds them there. The first one
            # goes after it: a pool that is in no graph any more is not to be captured into.
            again = self._captured(program, plan, inputs, graph, chosen, options, callers)
            if not isinstance(again, Failure):
                runner.close()
                runner = again[0]
        self._captured_on |= lanes
        return runner

    def _captured(
        self,
        program: Launchable,
        plan: Plan,
        inputs: Sequence[Tensor],
        graph: OpGraph | None,
        pool: Pool,
        options: CaptureOptions,
        callers: Collection[int],
    ) -> tuple[GraphRunner, int] | Failure:
        """A runner, and the bytes that its capture holds beside the outputs."""
        backend = self.backend
        notes: CaptureNotes | None = None
        if options.observe and self._reader is not None and graph is not None:
            notes = CaptureNotes(backend, self._reader, graph, program.in_place)
        slots = program.new_slots(inputs)
        executor = LaneExecutor(backend, self.streams, program, slots, options, notes)
        before = backend.allocated_bytes()
        backend.reset_peak()

        def body() -> list[Tensor]:
            walk(plan.steps, executor)
            return program.outputs(slots)

        result = self.recorder.record(self._lanes(plan), body, pool, slots=slots, executor=executor, names=graph)
        slots.clear()
        if isinstance(result, Failure):
            return result
        made, outputs = result
        overwritten = outputs_overwritten(graph, program.in_place) if graph is not None else {}
        left_behind = self._left_behind(before, inputs, outputs)
        peak = backend.peak_bytes() - before - left_behind
        try:
            captured = self._describe(made, notes, pool) if notes is not None else None
            backend.instantiate(made)
        except Exception as error:
            outputs.clear()
            backend.reset(made)
            let_through(error)
            return failure_of(error, "instantiating the graph")
        runner = GraphRunner(
            backend, made, pool, inputs, outputs, executor.stamps, captured, peak, program, self._gate, overwritten, callers
        )
        return runner, left_behind

    def _left_behind(self, before: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
        """Bytes that a finished capture holds beside its outputs: workspaces of cuBLAS, made by whichever graph has a lane's first product.

        They stay for every later graph, so a graph's own peak must not depend on whether it came first.
        """
        span = self.backend.span
        given = {span(tensor).start for tensor in inputs}
        made = {(found := span(tensor)).start: found.bytes for tensor in outputs}
        block = 512  # what the allocator rounds up to
        own = sum(-(-size // block) * block for start, size in made.items() if start not in given)
        return max(0, self.backend.allocated_bytes() - before - own)

    def capture_script(
        self, streams: Sequence[Stream], body: Callable[[], Any], *, pool: Pool | None = None
    ) -> tuple[Graph, Any] | Failure:
        """Capture whatever ``body`` launches on ``streams`` (forked before it, joined after it) into one graph; may call it twice."""
        result = self._recorded(streams, body, pool if pool is not None else self.scratch_pool())
        if isinstance(result, Failure):
            return result
        try:
            self.backend.instantiate(result[0])
        except Exception as error:
            self.backend.reset(result[0])
            let_through(error)
            return failure_of(error, "instantiating the graph")
        return result[:2]

    def close(self) -> None:
        """Free what keeps pools alive. Runners are their owners' to close."""
        for keeper in self._keepers:
            self.backend.reset(keeper)
        self._workspaces.close()
        self._keepers, self._scratch = [], None

    def _lanes(self, plan: Plan) -> list[Stream]:
        return [self.streams.lane(lane, priority) for lane, priority in dict.fromkeys((step.lane, step.priority) for step in plan.steps)]

    def _load_own_kernels(self) -> None:
        """Launch once, outside of every capture, what captures hold besides operators: a kernel is loaded at its first launch."""
        with inference_mode(True), self.backend.on(self.streams.named("warm-up")):
            self.backend.touch()
            self.backend.sleep(1.0)

    def _try_reader(self) -> None:
        """Once: what answers wrongly about a graph that is known would condemn every schedule, or none."""
        if self._reader is not None and not self._tried:
            self.unread = flaw_of(self._reader, self.backend, (self.streams.lane(0), self.streams.lane(1)), self.recorder.record)
            self._tried = True
            self._reader = None if self.unread else self._reader

    def _touch(self, name: str) -> None:
        with self.backend.on(self.streams.named(name)):
            self.backend.touch()

    def _recorded(self, streams: Sequence[Stream], body: Callable[[], Any], pool: Pool) -> tuple[Graph, Any, Pool] | Failure:
        """As :meth:`Recorder.record`, and in which pool: another one, once more, if memory was only cached."""
        tainted = self.tainted
        made = self.recorder.record(streams, body, pool)
        if (roomier := self._room(made, pool, tainted)) is not None:
            pool, made = roomier, self.recorder.record(streams, body, roomier)
        return made if isinstance(made, Failure) else (*made, pool)

    def _room(self, made: object, pool: Pool, tainted: bool) -> Pool | None:
        """Where to capture again what failed for want of memory that was cached, and is not now; ``None`` if it did not.

        PyTorch gives no cache back while it captures, and refuses a pool that is in no graph any more: ours alone are known to be in one.

        Args:
            tainted: before it was captured; a server goes on all the same.
        """
        short = isinstance(made, Failure) and made.kind is FailureKind.OOM and self.tainted == tainted
        if not short or not self.backend.release_cached():
            return None
        return pool if pool in (self._scratch, self._workspaces.pool) else self.backend.new_pool()

    def _describe(self, graph: Graph, notes: CaptureNotes, pool: Pool) -> CapturedGraph:
        reader = self._reader
        assert reader is not None
        nodes, edges = reader.read(graph)
        place = {node: index for index, (node, _) in enumerate(nodes)}
        return CapturedGraph(
            tuple(GraphNode(kind, notes.operator_of.get(node, NO_OPERATOR)) for node, kind in nodes),
            tuple((place[before], place[after]) for before, after in edges),
            tuple(StorageSpan(storage, span) for storage, span in notes.spans.items()),
            self.backend.pool_spans(pool, unused=False),
            int(getattr(reader, "stray_launches", -1)),
            reader.early_edges(graph),
            tuple(link for chain in notes.in_place for link in chain.links),
        )
