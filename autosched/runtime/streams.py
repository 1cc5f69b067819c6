"""The narrow seam over torch.cuda: what an executor needs of streams, events, graphs and the caching allocator.

Executors see :class:`StreamBackend` alone, so a test double that behaves like streams, events and the allocator can stand in
where there is no GPU. :class:`TorchStreams` is the one real implementation, and the only file of autosched that uses private
interfaces of ``torch.cuda`` - each behind a fallback. Nothing here touches CUDA on import: in a CPU build the names exist
and raise when constructed.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from autosched.core.errors import DeviceError, UsageError
from autosched.runtime.captured import Span
from autosched.runtime.numerics import compare

_cuda: Any = torch.cuda  # its Python side is not typed

# Opaque outside their backend: torch.cuda objects, or the double's.
Stream = Any
Event = Any
Graph = Any
Pool = Any
Tensor = Any

STREAMS_PER_PRIORITY = 32
"""torch hands streams out round robin from this many for each priority: the next one is the first again."""

# No device of compute capability 9.0 runs faster; a slower clock only makes a delay longer than asked.
_FASTEST_CLOCK_MHZ = 2000

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

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make ``stream`` current."""

    def new_event(self, *, timing: bool = False, in_graph: bool = False) -> Event:
        """An event. ``timing`` lets :meth:`elapsed_us` read it; ``in_graph`` makes it a node that records at each replay."""

    def record(self, event: Event, stream: Stream) -> None:
        """Mark everything launched on ``stream`` so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Whatever is launched on ``stream`` from now on runs after ``event``."""

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

    def multiply(self) -> None:
        """Launch small products on the current stream, whose workspaces the libraries then make if it has none."""

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

    def release_cached(self) -> None:
        """Give memory that no tensor holds back to the device; never in a capture."""

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


class TorchStreams:
    """:class:`StreamBackend` on a CUDA device through PyTorch.

    Raises:
        DeviceError: on construction, if this PyTorch cannot reach a CUDA device.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise DeviceError(f"torch {torch.__version__} reaches no CUDA device; install a CUDA build and a driver, or use device 'cpu'")
        chosen = torch.device(device)
        index = chosen.index if chosen.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(index)

    def new_stream(self, priority: int) -> Stream:
        """A stream from PyTorch's pool; torch counts priorities downwards and knows four."""
        return _cuda.Stream(device=self.device, priority=-priority)

    def handle(self, stream: Stream) -> int:
        """The ``cudaStream_t``."""
        return int(stream.cuda_stream)

    def current_stream(self) -> Stream:
        """PyTorch's current stream of this thread."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """``torch.cuda.stream``."""
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def new_event(self, *, timing: bool = False, in_graph: bool = False) -> Event:
        """A fresh event; never reused across captures, since an event belongs to the capture it was recorded in."""
        return _cuda.Event(enable_timing=timing, external=in_graph)

    def record(self, event: Event, stream: Stream) -> None:
        """``Event.record``. For an event that is a node, the *current* stream must be capturing: PyTorch looks at that one."""
        event.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        """``Stream.wait_event``."""
        stream.wait_event(event)

    def elapsed_us(self, start: Event, end: Event) -> float:
        """From milliseconds."""
        return float(start.elapsed_time(end)) * 1e3

    def synchronize(self) -> None:
        """Of the whole device."""
        torch.cuda.synchronize(self.device)

    def capturing(self, stream: Stream) -> bool:
        """Asked of the current stream, as PyTorch offers no other way."""
        with torch.cuda.stream(stream):
            return bool(torch.cuda.is_current_stream_capturing())

    def native_allocator(self) -> bool:
        """``cudaMallocAsync`` and pluggable allocators follow other rules."""
        return torch.cuda.get_allocator_backend() == "native"

    def new_pool(self) -> Pool:
        """``torch.cuda.graph_pool_handle``."""
        return torch.cuda.graph_pool_handle()

    def begin_capture(self, pool: Pool) -> Graph:
        """With ``thread_local`` checks: other threads (pinned memory, a server) may allocate meanwhile.

        Not ``torch.cuda.graph``, which empties the caching allocator at every entry: too slow for a search.
        """
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        return graph

    def end_capture(self, graph: Graph) -> None:
        """``capture_end``, with its warning about an empty graph made an error: an empty graph replays fast and computes nothing."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graph.capture_end()
        if any("graph is empty" in str(item.message).lower() for item in caught):
            raise EmptyCapture(EMPTY_CAPTURE)

    def abandon_capture(self, graph: Graph, pool: Pool) -> bool:
        """Some versions leave the allocator recording into the pool when ending a capture fails, and keep the pool for ever."""
        index = self.device.index
        clean = True
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        release = getattr(torch._C, "_cuda_releasePool", None)
        try:
            graph.reset()
            if end is not None and release is not None:
                end(index, pool)  # raises where capture_end has done it
                release(index, pool)
                clean = False  # the pinned-memory allocator has the same fault and no way to mend it
        except RuntimeError:
            pass
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            clean = False
        return clean

    def instantiate(self, graph: Graph) -> None:
        """And so keep that cost out of the first replay."""
        graph.instantiate()

    def replay(self, graph: Graph) -> None:
        """``cudaGraphLaunch``."""
        graph.replay()

    def reset(self, graph: Graph) -> None:
        """``CUDAGraph.reset``."""
        graph.reset()

    def sleep(self, time_us: float) -> None:
        """A spinning kernel of one thread; private in PyTorch, and used by its own tests throughout."""
        _cuda._sleep(max(1, int(time_us * _FASTEST_CLOCK_MHZ)))

    def touch(self) -> None:
        """One fill kernel."""
        torch.ones(8, device=self.device)

    def multiply(self) -> None:
        """One product by cuBLAS and one by cuBLASLt: each may have workspaces of its own."""
        square = torch.ones((16, 16), device=self.device)
        torch.mm(square, square)
        torch.addmm(square[0], square, square)

    def span(self, tensor: Tensor) -> Span:
        """Of the untyped storage."""
        storage = tensor.untyped_storage()
        return Span(int(storage.data_ptr()), int(storage.nbytes()))

    def static_like(self, tensor: Tensor) -> Tensor:
        """From the default pool. An expanded input becomes dense: nothing can be copied into elements that share memory."""
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """One fused call where the tensors allow it."""
        if not targets:
            return
        if len(targets) == 1:
            targets[0].copy_(sources[0], non_blocking=True)
            return
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)

    def clone(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """With the strides they have."""
        return [tensor.clone() for tensor in tensors]

    def pool_spans(self, pool: Pool, *, unused: bool) -> tuple[Span, ...]:
        """From the allocator's snapshot."""
        found: list[Span] = []
        for segment in self._segments(pool):
            if not unused:
                found.append(Span(int(segment["address"]), int(segment["total_size"])))
                continue
            address = int(segment["address"])
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    found.append(Span(int(block.get("address", address)), int(block["size"])))
                address += int(block["size"])
        return tuple(found)

    def _segments(self, pool: Pool) -> list[dict[str, Any]]:
        # PyTorch 2.11 gives back references to the pool's two numbers and the flag that it was only lent: above 256 a number is
        # then freed under us. Where a version keeps to the rules, this costs one small integer that is never freed.
        for lent in (*pool, True):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(lent))
        try:
            segments: list[dict[str, Any]] = list(_cuda.memory_snapshot(pool))
        except (TypeError, RuntimeError):
            segments = list(_cuda.memory_snapshot())
        # Older snapshots ignore the pool asked for.
        return [segment for segment in segments if tuple(segment.get("segment_pool_id") or pool) == tuple(pool)]

    def poison(self, spans: Iterable[Span]) -> None:
        """Through the CUDA array interface, since nothing else in PyTorch makes a tensor of a bare address."""
        for span in spans:
            words = span.bytes // 4
            if words:
                torch.as_tensor(_RawMemory(span.start, words), device=self.device).fill_(NAN_PATTERN)

    def same(self, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        """By the one rule for outputs."""
        return compare(tensors, others).bitwise

    def release_cached(self) -> None:
        """``empty_cache``."""
        torch.cuda.empty_cache()

    def allocated_bytes(self) -> int:
        """``memory_allocated``: captured allocations count."""
        return int(torch.cuda.memory_allocated(self.device))

    def reset_peak(self) -> None:
        """``reset_peak_memory_stats``."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """``max_memory_allocated``."""
        return int(torch.cuda.max_memory_allocated(self.device))


class _RawMemory:
    """``words`` 32-bit integers at ``address``, as the CUDA array interface (version 2) describes memory."""

    def __init__(self, address: int, words: int) -> None:
        self.__cuda_array_interface__ = {"shape": (words,), "typestr": "<i4", "data": (address, False), "version": 2}


@contextlib.contextmanager
def no_garbage_collection() -> Any:
    """Keep the cyclic collector still: a kernel's module finalised in the middle of a capture is unloaded, and that ends the capture."""
    import gc

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
