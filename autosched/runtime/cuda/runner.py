"""A captured plan that can be launched: static inputs, graph, the outputs it writes, and the gate that graphs of one capturer share."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from autosched.core.errors import DeviceError, InTheMidst
from autosched.core.from_outside import let_through
from autosched.runtime.cuda.captured import CapturedGraph
from autosched.runtime.cuda.lanes import Launchable
from autosched.runtime.cuda.streams import Event, Graph, Pool, Stream, StreamBackend, Tensor

_IN_THE_MIDST = (
    "its thread is in the midst of a call of another schedule on this GPU, with which it takes turns: it was called by a signal's handler, "
    "or by a finalizer"
)


class ReplayGate:
    """Serialises the graphs of one capturer, on the host by a lock and on the device by waiting for the end of the call before.

    Per capturer, not per graph: GEMMs captured on one stream share that stream's cuBLAS workspace, so two graphs captured on the
    same lanes may not run at the same time.

    The end of a call is noted on its stream at once: by the next call that stream may be gone, or be capturing a graph of its owner's, and
    who then waits for it joins that capture.

    Args:
        backend: of the device.

    ``lock`` is held while a graph is launched; its thread may free other graphs meanwhile, as a signal's handler may. ``freed`` turns true
    when one of the graphs was freed.
    """

    def __init__(self, backend: StreamBackend) -> None:
        self.lock: Any = threading.RLock()
        self.freed = False
        self._backend = backend
        self._stream: Stream | None = None  # of the last call
        self._handle = 0
        self._ended: Event | None = None  # made once: a wait is for what was recorded when it was asked for
        self._kept: list[object] = []

    def require_free(self) -> None:
        """A call is to begin, on whatever stream.

        Raises:
            InTheMidst: if this thread is in another one, which may have launched part of what it launches.
        """
        if self.lock._is_owned():
            raise InTheMidst(_IN_THE_MIDST)

    def pass_on(self) -> None:
        """Make the current stream wait for the call before. Call with the lock held."""
        # Nearly every call comes on the stream of the call before.
        handle = self._backend.current_handle()
        if self._stream is not None and handle == self._handle:
            return
        current = self._backend.current_stream()
        if self._ended is not None:
            self._backend.wait(current, self._ended)
        # Another library's stream may be gone by the next call, and its handle another stream's.
        self._stream = current if self._backend.lasting(current) else None
        self._handle = handle

    def passed(self) -> None:
        """Everything of a call has been launched: note where it ends. Call with the lock held."""
        if self._ended is None:
            self._ended = self._backend.new_event()
        self._backend.record(self._ended, self._stream if self._stream is not None else self._backend.current_stream())

    def finish(self) -> None:
        """Wait until the graph launched last has ended, and let go of what was kept until then."""
        kept, self._kept = self._kept, []
        if self._ended is not None:
            try:
                self._backend.await_event(self._ended)
            except RuntimeError as error:
                # A device that is lost does not keep memory from being given back.
                let_through(error)
        kept.clear()

    def keep(self, *things: object) -> None:
        """Hold what a replay may still use until the next :meth:`finish`."""
        self._kept.append(things)


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

        Raises:
            InTheMidst: as :meth:`ReplayGate.require_free`; nothing was launched.
        """
        self._gate.require_free()
        with self._gate.lock:
            self._gate.pass_on()
            try:
                self._backend.copy(self.inputs, [inputs[place] for place in self._fed] if self._callers else inputs)
                self._backend.replay(self._alive())
                return self._answer(inputs) if self._overwritten else self._backend.clone(self.outputs)
            finally:
                # The graph runs, though there may be no memory for the clones, or a signal's handler may raise when it was launched.
                self._gate.passed()

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
            try:
                self._backend.copy(self.inputs, inputs)
                self._backend.replay(self._alive())
            finally:
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
            self._free()

    def __del__(self) -> None:
        # Without the lock: a collection may come upon a call that holds it, in this thread. Nobody calls this runner any more.
        if sys.is_finalizing():
            return
        with contextlib.suppress(Exception):
            if self._graph is None:
                return
            if self._backend.capturing(self._backend.current_stream()):
                # To wait, or to free a graph, would end that capture.
                self._gate.keep(self._graph, self.inputs, self.outputs, self._program, self._stamps)
            else:
                self._free()

    def _free(self) -> None:
        if self._graph is None:
            return
        with self._backend.beside_captures():
            self._gate.finish()
            graph, self._graph = self._graph, None
            self.outputs = []
            self._backend.reset(graph)
            self._gate.freed = True
            # Nodes of the graph record them, so they go after it.
            self._stamps = {}

    def _alive(self) -> Graph:
        if self._graph is None:
            raise DeviceError("this graph was closed; capture it again")
        return self._graph
