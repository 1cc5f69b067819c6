"""A captured plan that can be launched: static inputs, graph, the outputs it writes, and the gate that graphs of one capturer share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from autosched.core.errors import DeviceError
from autosched.runtime.cuda.captured import CapturedGraph
from autosched.runtime.cuda.lanes import Launchable
from autosched.runtime.cuda.streams import Event, Graph, Pool, Stream, StreamBackend, Tensor


class ReplayGate:
    """Serialises the graphs of one capturer, on the host by a lock and on the device by waiting for the stream of the call before.

    Per capturer, not per graph: GEMMs captured on one stream share that stream's cuBLAS workspace, so two graphs captured on the
    same lanes may not run at the same time.
    """

    def __init__(self, backend: StreamBackend) -> None:
        self.lock = threading.Lock()
        self._backend = backend
        self._last: Stream | None = None
        self._last_handle = 0
        self._lasting = True
        self._ended: Event | None = None  # of the last call; only where its stream may be gone

    def pass_on(self) -> None:
        """Make the current stream wait for whatever stream a graph was launched on last. Call with the lock held."""
        # Nearly every call comes on the stream of the call before.
        handle = self._backend.current_handle()
        last = self._last
        if last is not None and handle == self._last_handle and self._lasting:
            return
        current = self._backend.current_stream()
        if last is not None:
            event = self._ended
            if event is None:
                event = self._backend.new_event()
                self._backend.record(event, last)
            self._backend.wait(current, event)
        self._last, self._last_handle = current, handle
        self._lasting, self._ended = self._backend.lasting(current), None

    def passed(self) -> None:
        """Everything of a call has been launched: note its end on a stream that may be gone before the next. Call with the lock held."""
        if not self._lasting:
            self._ended = self._backend.new_event()
            self._backend.record(self._ended, self._last)

    def finish(self) -> None:
        """Wait until the graph launched last has ended. Call with the lock held."""
        if self._last is not None:
            # A device that is lost does not keep memory from being given back.
            with contextlib.suppress(RuntimeError):
                if self._ended is not None:
                    self._backend.await_event(self._ended)
                else:
                    self._backend.finish(self._last)


class GraphRunner:
    """A captured plan: static inputs, the graph, and the outputs it writes.

    One graph never overlaps itself, and its buffers are shared by all callers: see :class:`ReplayGate`.

    Args:
        peak_bytes: most memory that values of the plan held at once while it was captured, without workspaces that the libraries keep.
        overwritten: outputs, by place, that lie in the memory of an input, and that input.
        callers: inputs, by place, that are no buffers of ours: every call has its own there, at the address that was captured.
    """

    def __init__(
        self,
        backend: StreamBackend,
        graph: Graph,
        pool: Pool,
        inputs: Sequence[Tensor],
        outputs: list[Tensor],
        stamps: dict[int, tuple[Event, Event]],
        captured: CapturedGraph | None,
        peak_bytes: int,
        program: Launchable,
        gate: ReplayGate,
        overwritten: Mapping[int, int] = MappingProxyType({}),
        callers: Collection[int] = (),
    ) -> None:
        self._backend = backend
        self._graph: Graph | None = graph
        self._gate = gate
        self.pool = pool
        # Memory of a caller's is not kept alive: whatever lies at its address in a call is that call's.
        self._fed = [place for place in range(len(inputs)) if place not in callers]
        self.inputs = tuple(inputs[place] for place in self._fed)
        for place, source in overwritten.items():
            outputs[place] = None if source in callers else outputs[place]
        self.outputs = outputs
        self._overwritten = dict(overwritten)
        self._callers = frozenset(callers)
        self.captured = captured
        self.peak_bytes = peak_bytes
        self._program = program  # the graph holds the bare addresses of its constants
        self._stamps = stamps

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Copy ``inputs`` in, replay, and return clones of the outputs: the caller may keep them.

        What lies in the memory of an input is that memory: the caller's own, or a buffer that the next call overwrites.
        """
        with self._gate.lock:
            self._gate.pass_on()
            self._backend.copy(self.inputs, [inputs[place] for place in self._fed] if self._callers else inputs)
            self._backend.replay(self._alive())
            made = self._answer(inputs) if self._overwritten else self._backend.clone(self.outputs)
            self._gate.passed()
            return made

    def _answer(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        made = list(self.outputs)
        apart = [place for place in range(len(made)) if place not in self._overwritten]
        for place, tensor in zip(apart, self._backend.clone([made[place] for place in apart]), strict=True):
            made[place] = tensor
        for place, source in self._overwritten.items():
            if source in self._callers:
                made[place] = inputs[source]
        return made

    def run_static(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """As a call, without the clones: views of buffers that the next call overwrites."""
        with self._gate.lock:
            self._gate.pass_on()
            self._backend.copy(self.inputs, inputs)
            self._backend.replay(self._alive())
            self._gate.passed()
            return self.outputs

    def replay(self) -> None:
        """Launch with whatever is in ``inputs`` now. For measuring; takes no lock."""
        self._backend.replay(self._alive())

    def operator_times(self, start: Event) -> dict[int, tuple[float, float]]:
        """Start and end of each operator, microseconds after ``start``, of the last replay; the device must be idle."""
        elapsed = self._backend.elapsed_us
        return {operator: (elapsed(start, first), elapsed(start, last)) for operator, (first, last) in self._stamps.items()}

    def close(self) -> None:
        """Free graph and outputs, when the last call has ended. May be called twice.

        Without waiting, memory that a replay still uses would go back to the stream it came from, which need not be the caller's.
        """
        with self._gate.lock:
            graph, self._graph = self._graph, None
            if graph is not None:
                self._gate.finish()
                self.outputs = []
                self._backend.reset(graph)
                # Nodes of the graph record them, so they go after it.
                self._stamps = {}

    def _alive(self) -> Graph:
        if self._graph is None:
            raise DeviceError("this graph was closed; capture it again")
        return self._graph
