"""The caching allocator of the double: memory belongs to the pool and the stream that it was allocated for, and holds numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autosched.runtime.cuda.captured import Span
from tests.conformance.fake_cuda_values import (
    PAGE,
    POISON,
    Block,
    CaptureError,
    FakeCapture,
    FakeMemory,
    FakeStorage,
    FakeStream,
    FakeTensor,
    OutOfMemory,
)


class FakeAllocator:
    """Allocates on the current stream, from the pool of the capture it is in.

    Args:
        memory_limit: bytes it can hand out.
    """

    def __init__(self, memory_limit: int) -> None:
        self.memory = FakeMemory()
        self.default_stream = FakeStream(0, 0)
        self._current = self.default_stream
        self._capture: FakeCapture | None = None  # the one under way
        self.released = 0
        self._segments: dict[int, list[Span]] = {}
        self._free: dict[tuple[int, int], list[Block]] = {}
        self._deferred: list[Block] = []
        self._next_address = PAGE * 16
        self._limit = memory_limit
        self._allocated = 0
        self._peak = 0

    def allocate(self, size: int) -> FakeTensor:
        """On the current stream: first fit from its own free list in its own pool, else new memory."""
        stream = self._current
        pool = stream.capture.pool if stream.capture is not None else 0
        rounded = max(PAGE, -(-size // PAGE) * PAGE)
        free = self._free.setdefault((pool, stream.handle), [])
        for block in sorted(free, key=lambda item: (item.span.bytes, item.span.start)):
            if block.span.bytes >= rounded:
                free.remove(block)
                if block.span.bytes > rounded:
                    free.append(Block(pool, stream, Span(block.span.start + rounded, block.span.bytes - rounded)))
                chosen = Block(pool, stream, Span(block.span.start, rounded))
                break
        else:
            if self._next_address + rounded > self._limit:
                raise OutOfMemory
            chosen = Block(pool, stream, Span(self._next_address, rounded))
            self._segments.setdefault(pool, []).append(chosen.span)
            self._next_address += rounded
        self._allocated += rounded
        self._peak = max(self._peak, self._allocated)
        return FakeTensor(FakeStorage(self, chosen, size), size)

    def free(self, block: Block) -> None:
        self._allocated -= block.span.bytes
        if block.recorded and self._capture is not None:
            self._deferred.append(block)
        else:
            self._release(block)

    def release_deferred(self) -> None:
        """Give back what ``record_stream`` has kept until a capture was over."""
        for block in self._deferred:
            self._release(block)
        self._deferred = []

    def _release(self, block: Block) -> None:
        block.recorded = False
        self._free.setdefault((block.pool, block.stream.handle), []).append(block)

    def span(self, tensor: FakeTensor) -> Span:
        return tensor.storage.span

    def static_like(self, tensor: FakeTensor) -> FakeTensor:
        return self.allocate(tensor.size)

    def copy(self, targets: Sequence[FakeTensor], sources: Sequence[FakeTensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            self.memory.write(target.storage.span, self.memory.read(source.storage.span))

    def clone(self, tensors: Sequence[FakeTensor]) -> list[FakeTensor]:
        made = [self.allocate(tensor.size) for tensor in tensors]
        self.copy(made, tensors)
        return made

    def pool_spans(self, pool: int, *, unused: bool) -> tuple[Span, ...]:
        if not unused:
            return tuple(self._segments.get(pool, ()))
        return tuple(block.span for (owner, _), blocks in self._free.items() if owner == pool for block in blocks)

    def poison(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self.memory.write(span, POISON)

    def release_cached(self) -> bool:
        """Of the default pool; whether another one is needed any more is not known here."""
        if self._capture is not None:
            raise CaptureError("the cache was emptied in a capture")
        self.released += 1
        cached = [block for (pool, _), blocks in self._free.items() if pool == 0 for block in blocks]
        self._free = {key: blocks for key, blocks in self._free.items() if key[0] != 0}
        # Never handed out again: whoever still reads there shows.
        self._limit += sum(block.span.bytes for block in cached)
        return bool(cached)

    def allocated_bytes(self) -> int:
        return self._allocated

    def reset_peak(self) -> None:
        self._peak = self._allocated

    def peak_bytes(self) -> int:
        return self._peak

    def tensor(self, number: int, size: int = PAGE) -> FakeTensor:
        made = self.allocate(size)
        self.memory.write(made.storage.span, number)
        return made

    def number(self, tensor: FakeTensor) -> int:
        return self.memory.read(tensor.storage.span)
