"""The one real :class:`~autosched.runtime.cuda.streams.StreamBackend`: streams, events, graphs and allocator through ``torch.cuda``.

The only file of autosched that uses private interfaces of ``torch.cuda``, each behind a fallback. Nothing here touches CUDA on import: in a
CPU build the names exist and raise when constructed.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from autosched.config import allocator_frees_as_it_allocates
from autosched.core.errors import DeviceError
from autosched.core.extents import overlaps_itself
from autosched.runtime.cuda.captured import Span
from autosched.runtime.cuda.key import driver_library, fastest_clock_mhz
from autosched.runtime.cuda.private_streams import private_stream
from autosched.runtime.cuda.streams import EMPTY_CAPTURE, NAN_PATTERN, EmptyCapture, Event, Graph, Pool, Stream, Tensor
from autosched.runtime.numerics import compare

_cuda: Any = torch.cuda  # its Python side is not typed

_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, of a thread: it is forbidden nothing for the sake of captures
# One copy costs less than the fused call, and two cost as much.
_CLONED_ONE_BY_ONE = 2
# What PyTorch's kernel of the fused call has; asked for others, it raises.
_FUSED = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.complex128, torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    }
)  # fmt: skip


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
        self._abandoned: list[Graph] = []
        self._own: set[int] = set()
        self._generator = torch.Generator(self.device)
        self._clock_mhz = fastest_clock_mhz(index)
        self._current_handle: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def new_stream(self, priority: int) -> Stream:
        """One that nobody else is given, else one from PyTorch's pool; torch counts priorities downwards and knows four."""
        if not (handle := private_stream(self.device.index, -priority)):
            return _cuda.Stream(device=self.device, priority=-priority)
        self._own.add(handle)
        return _cuda.ExternalStream(handle, device=self.device)

    def handle(self, stream: Stream) -> int:
        """The ``cudaStream_t``."""
        return int(stream.cuda_stream)

    def current_stream(self) -> Stream:
        """PyTorch's current stream of this thread."""
        return torch.cuda.current_stream(self.device)

    def current_handle(self) -> int:
        """What generated code of Inductor asks for before each kernel; a ``torch.cuda.Stream`` takes fifty times as long to make."""
        if self._current_handle is None:
            return self.handle(self.current_stream())
        return self._current_handle(self.device.index)

    def lasting(self, stream: Stream) -> bool:
        """PyTorch's and ours are never destroyed; one that it was handed is known by its handle, which PyTorch takes for its number."""
        handle = self.handle(stream)
        return not handle or handle in self._own or handle != int(stream.stream_id)

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

    def await_event(self, event: Event) -> None:
        """``Event.synchronize``."""
        event.synchronize()

    @contextlib.contextmanager
    def beside_captures(self) -> Iterator[None]:
        """By the mode of this thread: ``torch.cuda.graph`` forbids all others to wait, and a graph that is freed ends its capture."""
        exchange, mode = driver_library().cuThreadExchangeStreamCaptureMode, ctypes.c_int(_CAPTURE_MODE_RELAXED)
        there = ctypes.byref(mode)
        try:
            exchange(there)
            yield
        finally:
            exchange(there)

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
        """Others (``cudaMallocAsync``, pluggable ones) have other rules. One that caches nothing counts nothing, and allows no capture."""
        return torch.cuda.get_allocator_backend() == "native" and self._allocations_of(lambda: torch.empty(1, device=self.device)) > 0

    def new_pool(self) -> Pool:
        """``torch.cuda.graph_pool_handle``."""
        return torch.cuda.graph_pool_handle()

    def begin_capture(self, pool: Pool) -> Graph:
        """With ``thread_local`` checks: other threads (pinned memory, a server) may allocate meanwhile.

        Not ``torch.cuda.graph``, which empties the caching allocator at every entry: too slow for a search.

        Up to some version PyTorch's default generator is in the capture too: no other thread may draw a random number meanwhile, and where
        the end fails nobody in the process may any more. While the capture begins, one that nobody else has stands in for it; a schedule
        draws none.

        An allocator that collects garbage, or that frees blocks too large to be split where memory is short, does so in a capture, too, and
        no capture survives that: what is cached is given back before.
        """
        if allocator_frees_as_it_allocates():
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        generator = torch.cuda.default_generators[self.device.index]
        everyones = generator.graphsafe_get_state()
        try:
            generator.graphsafe_set_state(self._generator)
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        except BaseException:
            # A signal's handler may raise when it has begun, and then nobody else could end it.
            if torch.cuda.is_current_stream_capturing():
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
            raise
        finally:
            generator.graphsafe_set_state(everyones)
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
                # The pinned-memory allocator has the same fault and no way to mend it: it goes on asking the graph whether memory
                # is its own, so the graph, empty now, must stay where it is.
                self._abandoned.append(graph)
                clean = False
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
        # Of the fastest clock: a slower one only makes a delay longer than asked.
        _cuda._sleep(max(1, int(time_us * self._clock_mhz)))

    def touch(self) -> None:
        """One fill kernel."""
        torch.ones(8, device=self.device)

    def multiply(self) -> bool:
        """One product by cuBLAS and one by cuBLASLt: each may have workspaces of its own. Seen from what the first one leaves behind."""
        square = torch.ones((16, 16), device=self.device)
        before = self.allocated_bytes()
        torch.mm(square, square)
        had_none = self.allocated_bytes() > before
        torch.addmm(square[0], square, square)
        return had_none

    def keeps_workspaces(self) -> bool:
        """Seen from what a product allocates: PyTorch 2.15 keeps none, unless ``TORCH_CUBLAS_WORKSPACE_CACHE=1``."""
        square = torch.ones((16, 16), device=self.device)
        made = torch.empty_like(square)
        # Another thread may allocate meanwhile; hardly each time.
        return any(self._allocations_of(lambda: torch.mm(square, square, out=made)) == 0 for _ in range(4))

    def _allocations_of(self, call: Callable[[], object]) -> int:
        def counted() -> int:
            return int(torch.cuda.memory_stats(self.device).get("allocation.all.allocated", 0))

        before = counted()
        call()
        return counted() - before

    def span(self, tensor: Tensor) -> Span:
        """Of the untyped storage."""
        storage = tensor.untyped_storage()
        return Span(int(storage.data_ptr()), int(storage.nbytes()))

    def static_like(self, tensor: Tensor) -> Tensor:
        """From the default pool. An expanded input becomes dense: nothing can be copied into elements that share memory."""
        if overlaps_itself(tensor.shape, tensor.stride()):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """One fused call where the tensors allow it."""
        if not targets:
            return
        if len(targets) == 1 or targets[0].dtype not in _FUSED:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            return
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)

    def clone(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """With the strides they have; of several, by one fused call where the tensors allow it."""
        if len(tensors) <= _CLONED_ONE_BY_ONE:
            return [tensor.clone() for tensor in tensors]
        made = [torch.empty_like(tensor) for tensor in tensors]
        self.copy(made, tensors)
        return made

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

    def release_cached(self) -> bool:
        """``empty_cache``."""
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device) < before

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
