"""One capture: begun, its streams forked and joined, and ended whatever comes of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from autosched.core.errors import DeviceError
from autosched.core.from_outside import let_through
from autosched.core.graph import OpGraph
from autosched.core.records import Failure
from autosched.runtime.cuda.failures import failure_of, released
from autosched.runtime.cuda.lanes import NO_OPERATOR, LaneExecutor, Slots
from autosched.runtime.cuda.streams import EmptyCapture, Graph, Pool, Stream, StreamBackend, StreamSet, no_garbage_collection
from autosched.runtime.thread_state import inference_mode

log = logging.getLogger(__name__)


class Recorder:
    """Captures what functions launch.

    ``tainted`` turns true when a capture failed in a way this process cannot undo.
    """

    def __init__(self, backend: StreamBackend, streams: StreamSet) -> None:
        self._backend = backend
        self._streams = streams
        self.tainted = False

    def record(
        self,
        side: Sequence[Stream],
        body: Callable[[], Any],
        pool: Pool,
        *,
        slots: Slots | None = None,
        executor: LaneExecutor | None = None,
        names: OpGraph | None = None,
    ) -> tuple[Graph, Any] | Failure:
        """Capture what ``body`` launches on ``side``. Whatever comes out of it, the capture is ended, or its streams would stay in it."""
        backend = self._backend
        origin = self._streams.named("origin")
        backend.synchronize()
        with no_garbage_collection(), inference_mode(True), backend.on(origin):
            graph, ended = None, False
            try:
                graph = backend.begin_capture(pool)
                self._fork(origin, side)
                made = body()
                self._join(origin, side)
                ended = True
                backend.end_capture(graph)
            except BaseException as error:
                doing = "capture"
                if executor is not None and executor.current != NO_OPERATOR and names is not None:
                    doing = f"capture, at operator {names.operators[executor.current].name}"
                failure = failure_of(error, doing)
                clean = isinstance(error, EmptyCapture)
                outside = released(error)
            else:
                return graph, made
            if slots is not None:
                slots.clear()
            if graph is not None:
                # An interrupt may come before the end was even asked for.
                if not ended or (outside is not None and backend.capturing(origin)):
                    # It may also come when another stream has just been made the current one, and this one alone can end the capture.
                    with backend.on(origin):
                        clean = self._end(graph, origin, side)
                self._unwind(graph, pool, clean=clean)
        log.debug("capture failed: %s", failure.detail)
        if outside is not None:
            try:
                raise outside
            finally:
                del outside  # its traceback holds this frame
        return failure

    def _fork(self, origin: Stream, side: Sequence[Stream]) -> None:
        start = self._backend.new_event()
        self._backend.record(start, origin)
        for stream in side:
            self._backend.wait(stream, start)
            if not self._backend.capturing(stream):
                raise DeviceError("a stream did not join the capture; what it launches would be missing from the graph")

    def _join(self, origin: Stream, side: Sequence[Stream]) -> None:
        for stream in side:
            end = self._backend.new_event()
            self._backend.record(end, stream)
            self._backend.wait(origin, end)

    def _end(self, graph: Graph, origin: Stream, side: Sequence[Stream]) -> bool:
        """End a capture that its body gave up. Ending it in order is worth trying: only that leaves the allocator clean."""
        try:
            self._join(origin, side)
        except Exception as error:
            log.debug("streams could not be joined: %s", error)
        # Even an invalid capture has to be ended, or its streams stay in it.
        try:
            self._backend.end_capture(graph)
        except EmptyCapture:
            return True
        except Exception as error:
            log.debug("capture could not be ended in order: %s", error)
            return False
        return True

    def _unwind(self, graph: Graph, pool: Pool, *, clean: bool) -> None:
        try:
            if clean:
                self._backend.reset(graph)
            elif not self._backend.abandon_capture(graph, pool):
                self.tainted = True
            self._backend.synchronize()
        except Exception as error:
            self.tainted = True
            let_through(error)
            log.warning("the device does not answer after a failed capture: %s", error)
