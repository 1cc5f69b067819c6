"""Walking a plan on CUDA streams: one stream for each lane and priority, eagerly or under capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autosched.core.graph import OpGraph, ValueRole
from autosched.core.in_place import Chain
from autosched.runtime.cuda.captured import NodeKind, Span
from autosched.runtime.cuda.streams import Event, Graph, Stream, StreamBackend, StreamSet, Tensor
from autosched.runtime.plan import Step

Slots = list[Any]
NO_OPERATOR = -1


class Launchable(Protocol):
    """What is run: a :class:`~autosched.runtime.kernels.BoundProgram`, or a test's."""

    @property
    def kernels(self) -> Sequence[Callable[[Slots], None]]:
        """One callable for each operator."""

    @property
    def in_place(self) -> Sequence[Chain]:
        """What it overwrites of its inputs."""

    @property
    def otherwise(self) -> Launchable | None:
        """The same overwriting nothing, if it does."""

    def new_slots(self, inputs: Sequence[Tensor]) -> Slots:
        """Slots with constants and ``inputs`` filled in."""

    def outputs(self, slots: Slots) -> list[Tensor]:
        """The program's outputs."""

    def run(self, inputs: Sequence[Tensor], before_each: Callable[[], None] | None = None) -> list[Tensor]:
        """The outputs of every operator run in the graph's own order; what nothing reads any more is dropped on the way.

        ``before_each`` is called before each operator.
        """


class GraphReader(Protocol):
    """Looks into CUDA graphs, also while they are being captured. Node ids are opaque integers, valid while the graph lives."""

    def frontier(self, stream: Stream) -> tuple[int, ...]:
        """The nodes that the next launch on a capturing ``stream`` would depend on."""

    def dependencies(self, node: int) -> tuple[int, ...]:
        """The nodes that ``node`` depends on directly."""

    def read(self, graph: Graph) -> tuple[tuple[tuple[int, NodeKind], ...], tuple[tuple[int, int], ...]]:
        """All nodes as ``(id, kind)`` and all edges as ``(before id, after id)`` of an ended capture."""

    def early_edges(self, graph: Graph) -> int:
        """How many of those edges let the later node start before the earlier one has ended."""


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What a capture does besides launching the operators.

    Args:
        delays: operator -> microseconds to stall its stream for, right before it (after its waits).
        stamps: put time stamps around every operator; costs two nodes each, so never for a graph whose time counts.
        observe: note which nodes and which memory each operator got, for the audit.
    """

    delays: Mapping[int, float] | None = None
    stamps: bool = False
    observe: bool = False


class LaneExecutor:
    """:class:`~autosched.runtime.walk.Executor` that launches on one stream for each lane and priority.

    A lane whose operators differ in priority is several streams that take turns: a graph node inherits the priority of the stream it
    was captured on. Taking over waits for the stream before, so the lane stays in order and knows what it knew.
    """

    def __init__(
        self,
        backend: StreamBackend,
        streams: StreamSet,
        program: Launchable,
        slots: Slots,
        options: CaptureOptions,
        notes: CaptureNotes | None,
    ) -> None:
        self._backend = backend
        self._streams = streams
        self._kernels = program.kernels
        self._slots = slots
        self._delays = options.delays or {}
        self._stamps: dict[int, tuple[Event, Event]] | None = {} if options.stamps else None
        self._notes = notes
        self._events: dict[int, Event] = {}
        self._last: dict[int, Stream] = {}
        self.current = NO_OPERATOR

    def wait(self, step: Step, producer: int) -> None:
        """An edge: the host goes on."""
        self._backend.wait(self._stream(step), self._events[producer])

    def launch(self, step: Step) -> None:
        """Everything the operator allocates and launches belongs to its stream."""
        self.current = step.operator
        backend = self._backend
        stream = self._stream(step)
        with backend.on(stream):
            if delay_us := self._delays.get(step.operator):
                backend.sleep(delay_us)
            if self._stamps is not None:
                start = self._stamp(stream)
            if self._notes is not None:
                self._notes.attribute(stream, NO_OPERATOR)
            self._kernels[step.operator](self._slots)
            if self._notes is not None:
                self._notes.attribute(stream, step.operator)
                self._notes.memory(step.operator, self._slots)
            if self._stamps is not None:
                self._stamps[step.operator] = (start, self._stamp(stream))

    def record(self, step: Step) -> None:
        """One event for each operator that another lane waits for."""
        event = self._backend.new_event()
        self._backend.record(event, self._stream(step))
        self._events[step.operator] = event

    def free(self, step: Step) -> None:
        """Drop the last references; the blocks go back to the streams they came from."""
        for value in step.frees:
            self._slots[value] = None

    @property
    def stamps(self) -> dict[int, tuple[Event, Event]]:
        """Start and end event of each operator; empty unless asked for."""
        return self._stamps or {}

    def _stamp(self, stream: Stream) -> Event:
        event = self._backend.new_event(timing=True, in_graph=True)
        self._backend.record(event, stream)
        return event

    def _stream(self, step: Step) -> Stream:
        stream = self._streams.lane(step.lane, step.priority)
        last = self._last.get(step.lane)
        if last is not None and last is not stream:
            handover = self._backend.new_event()
            self._backend.record(handover, last)
            self._backend.wait(stream, handover)
        self._last[step.lane] = stream
        return stream


class CaptureNotes:
    """Which nodes and which memory each operator got, taken while the capture runs."""

    def __init__(self, backend: StreamBackend, reader: GraphReader, graph: OpGraph, in_place: Sequence[Chain] = ()) -> None:
        self.in_place = in_place
        # These lie in memory of the inputs, which nobody allocates.
        self._elsewhere = {link.after for chain in in_place for link in chain.links}
        self._backend = backend
        self._reader = reader
        self._graph = graph
        self.operator_of: dict[int, int] = {}
        self.spans: dict[int, Span] = {}

    def attribute(self, stream: Stream, operator: int) -> None:
        """Every node behind the stream's frontier that nobody has claimed yet is ``operator``'s."""
        pending = list(self._reader.frontier(stream))
        while pending:
            node = pending.pop()
            if node not in self.operator_of:
                self.operator_of[node] = operator
                pending += self._reader.dependencies(node)

    def memory(self, operator: int, slots: Slots) -> None:
        """The storage behind each value the operator made."""
        values = self._graph.values
        for value in self._graph.operators[operator].writes:
            storage = values[value].storage
            owned = values[storage].role in (ValueRole.INTERMEDIATE, ValueRole.INTERNAL)
            if owned and storage not in self.spans and storage not in self._elsewhere and slots[value] is not None:
                self.spans[storage] = self._backend.span(slots[value])
