"""The narrow seam over torch.cuda: what an executor needs of streams, events, graphs and the caching allocator.

Executors see :class:`StreamBackend` alone, so a test double that behaves like streams, events and the allocator can stand in
where there is no GPU. ``cuda/torch_streams.py`` is the real one. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from autosched.core.errors import UsageError
from autosched.runtime.cuda.captured import Span

# Opaque outside their backend: torch.cuda objects, or the double's.
Stream = Any
Event = Any
Graph = Any
Pool = Any
Tensor = Any

STREAMS_PER_PRIORITY = 32
"""torch hands streams out round robin from this many for each priority: the next one is the first again."""

NAN_PATTERN = 0x7FC07FC0
"""One NaN as float32, two as float16 or bfloat16: whatever reads poisoned memory shows it."""


EMPTY_CAPTURE = "the captured graph is empty: nothing was launched on a captured stream"


class EmptyCapture(RuntimeError):
    """A capture that ended well and holds no node."""


class StreamBackend(Protocol):
    """What a CUDA-like device must be able to do. Called from one thread.

    Capture calls follow CUDA's rules: a stream joins a capture when it waits for an event recorded in it; every stream that
    joined must be waited for by the origin before the end; events of a capture and events outside it never mix.
    """

    def new_stream(self, priority: int) -> Stream:
        """A stream; ``priority`` 0 (lowest) to 3. May be one handed out before: compare :meth:`handle`."""

    def handle(self, stream: Stream) -> int:
        """The stream's identity."""

    def current_stream(self) -> Stream:
        """The stream that launches and allocations go to now."""

    def current_handle(self) -> int:
        """The identity of the current stream, at less cost than the stream."""

    def lasting(self, stream: Stream) -> bool:
        """Whether a stream lives as long as the process: another library's may be gone by the next call, its handle another stream's."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make ``stream`` current."""

    def new_event(self, *, timing: bool = False, in_graph: bool = False) -> Event:
        """An event. ``timing`` lets :meth:`elapsed_us` read it; ``in_graph`` makes it a node that records at each replay."""

    def record(self, event: Event, stream: Stream) -> None:
        """Mark everything launched on ``stream`` so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Whatever is launched on ``stream`` from now on runs after ``event``."""

    def await_event(self, event: Event) -> None:
        """Wait on the host until an event has happened."""

    def beside_captures(self) -> AbstractContextManager[None]:
        """Within, this thread may wait for what is in no capture, and free it, while another thread captures on other streams."""

    def elapsed_us(self, start: Event, end: Event) -> float:
        """Microseconds between two timing events that have happened."""

    def synchronize(self) -> None:
        """Wait until the device is idle; raises what it has been hiding."""

    def capturing(self, stream: Stream) -> bool:
        """Whether launches on ``stream`` are being captured."""

    def native_allocator(self) -> bool:
        """Whether the allocator's rules are those the frees rely on (blocks belong to a stream, private pools)."""

    def new_pool(self) -> Pool:
        """A handle for a private memory pool."""

    def begin_capture(self, pool: Pool) -> Graph:
        """Start capturing on the current stream, allocations of captured streams in ``pool``."""

    def end_capture(self, graph: Graph) -> None:
        """End the capture begun on the current stream.

        Raises:
            EmptyCapture: if it ended well and holds nothing; the graph is then to be reset.
            RuntimeError: whatever went wrong since it began.
        """

    def abandon_capture(self, graph: Graph, pool: Pool) -> bool:
        """After :meth:`end_capture` raised: put the allocator right. False if this process should capture no more."""

    def instantiate(self, graph: Graph) -> None:
        """Make it launchable."""

    def replay(self, graph: Graph) -> None:
        """Launch on the current stream."""

    def reset(self, graph: Graph) -> None:
        """Free the graph."""

    def sleep(self, time_us: float) -> None:
        """Keep the current stream busy for at least ``time_us``, on one thread of the device."""

    def touch(self) -> None:
        """Allocate a few bytes and launch one small kernel on the current stream."""

    def multiply(self) -> bool:
        """Launch small products on the current stream, whose workspaces the libraries then make; whether it had none before."""

    def keeps_workspaces(self) -> bool:
        """Whether a product finds what :meth:`multiply` made on the current stream; else each takes a workspace and gives it back."""

    def span(self, tensor: Tensor) -> Span:
        """The whole memory behind ``tensor``: its storage, not only the part it shows."""

    def static_like(self, tensor: Tensor) -> Tensor:
        """A buffer of the same size, strides and type outside every pool."""

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy each source into its target, on the current stream."""

    def clone(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies in fresh memory, on the current stream."""

    def pool_spans(self, pool: Pool, *, unused: bool) -> tuple[Span, ...]:
        """Memory of a pool: all its segments, or (``unused``) the blocks no tensor holds now. Empty if it cannot tell."""

    def poison(self, spans: Iterable[Span]) -> None:
        """Fill memory with NaN patterns, on the current stream."""

    def same(self, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        """Whether all are equal to the bit; waits for the device."""

    def release_cached(self) -> bool:
        """Give memory that no tensor holds back to the device, and say whether there was any; never in a capture."""

    def allocated_bytes(self) -> int:
        """Bytes that tensors hold now."""

    def reset_peak(self) -> None:
        """Start watching for :meth:`peak_bytes`."""

    def peak_bytes(self) -> int:
        """Most bytes held since :meth:`reset_peak`."""


class StreamSet:
    """Streams taken once and never shared: the lanes' (by priority), an origin that launches nothing, and spares for warm-up.

    An origin without kernels matters: some versions of PyTorch clear the cuBLAS workspaces of a graph's origin stream
    when the graph is destroyed, under every live graph that has a GEMM captured on it.
    """

    def __init__(self, backend: StreamBackend) -> None:
        self._backend = backend
        self._taken: dict[int, Stream] = {}
        self._lanes: dict[tuple[int, int], Stream] = {}
        self._named: dict[str, Stream] = {}

    def lane(self, lane: int, priority: int = 0) -> Stream:
        """The stream of a lane at a priority.

        Raises:
            UsageError: if the device has no distinct stream left.
        """
        key = (lane, priority)
        if key not in self._lanes:
            self._lanes[key] = self._distinct(priority, f"lane {lane} at priority {priority}")
        return self._lanes[key]

    def named(self, name: str) -> Stream:
        """A stream of its own for a purpose: ``origin``, ``warm-up``, ``replay``, ``keeper``."""
        if name not in self._named:
            self._named[name] = self._distinct(0, name)
        return self._named[name]

    def replace(self, stream: Stream) -> bool:
        """Give the lanes of ``stream`` another one, and never hand it out again; false, and nothing is changed, if none is left."""
        for (lane, priority), taken in self._lanes.items():
            if taken is stream:
                try:
                    self._lanes[lane, priority] = self._distinct(priority, f"lane {lane} at priority {priority}")
                except UsageError:
                    return False
                return True
        return False

    def _distinct(self, priority: int, purpose: str) -> Stream:
        # The pool is shared with everything else in the process, so walk it once round before giving up.
        for _ in range(STREAMS_PER_PRIORITY):
            stream = self._backend.new_stream(priority)
            handle = self._backend.handle(stream)
            if handle not in self._taken:
                self._taken[handle] = stream
                return stream
        raise UsageError(
            f"no distinct stream is left for {purpose}: {len(self._taken)} are taken and there are {STREAMS_PER_PRIORITY} "
            f"for each priority; use fewer lanes"
        )


@contextlib.contextmanager
def no_garbage_collection() -> Any:
    """Keep the cyclic collector still: a kernel's module finalised in the middle of a capture is unloaded, and that ends the capture."""
    import gc

    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
