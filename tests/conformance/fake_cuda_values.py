"""What the double of CUDA is made of: streams, events, nodes, captures, blocks of memory, and the numbers they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from autosched.runtime.cuda.captured import NodeKind, Span

PAGE = 512
POISON = -7777777
_MASK = (1 << 61) - 1


class CaptureError(RuntimeError):
    """What CUDA reports as cudaErrorStreamCapture..."""


class OutOfMemory(RuntimeError):
    def __init__(self) -> None:
        super().__init__("CUDA out of memory (double)")


def mix(*parts: int) -> int:
    """A number that depends on every part and on their order."""
    state = 1469598103934665603
    for part in parts:
        state = ((state ^ (part & _MASK)) * 1099511628211 + 12345) & _MASK
    return state


@dataclass(eq=False)
class FakeStream:
    handle: int
    priority: int
    capture: FakeCapture | None = None
    frontier: frozenset[int] = frozenset()
    joined: bool = True  # whether the origin has waited for everything on it
    clock_us: float = 0.0
    behind: frozenset[FakeCapture] = frozenset()  # graphs launched elsewhere that it has waited for
    foreign: bool = False  # another library's
    gone: bool = False  # destroyed by it


@dataclass(eq=False)
class FakeEvent:
    timing: bool
    in_graph: bool
    capture: FakeCapture | None = None
    frontier: frozenset[int] = frozenset()
    source: FakeStream | None = None
    recorded: bool = False
    behind: frozenset[FakeCapture] = frozenset()  # graphs that have ended when it has happened
    at_us: float = 0.0


@dataclass
class FakeNode:
    kind: NodeKind
    stream: FakeStream
    dependencies: tuple[int, ...]
    duration_us: float
    run: Callable[[FakeMemory], Callable[[FakeMemory], None]] | None = None
    event: FakeEvent | None = None


@dataclass(eq=False)
class FakeCapture:
    pool: int
    origin: FakeStream
    nodes: list[FakeNode] = field(default_factory=list)
    members: list[FakeStream] = field(default_factory=list)
    open: bool = True
    invalid: str = ""
    destroyed: bool = False
    ready: bool = False
    running_on: FakeStream | None = None  # the stream it was launched on, until the host has waited for it


@dataclass(eq=False)
class Block:
    pool: int
    stream: FakeStream
    span: Span
    recorded: bool = False  # record_stream was called


class Owner(Protocol):
    """What gave a block of memory, and takes it back."""

    def free(self, block: Block) -> None: ...

    def number(self, tensor: FakeTensor) -> int: ...


class FakeStorage:
    """Memory that gives itself back when its last reference goes, as a tensor's does."""

    def __init__(self, owner: Owner, block: Block, size: int) -> None:
        self.owner = owner
        self.block = block
        self.span = Span(block.span.start, size)

    def __del__(self) -> None:
        self.owner.free(self.block)


@dataclass
class FakeTensor:
    storage: FakeStorage
    size: int

    def record_stream(self, stream: FakeStream) -> None:
        self.storage.block.recorded = True

    def cpu(self) -> torch.Tensor:
        """Its number, small enough for a float to hold exactly."""
        return torch.tensor([float(self.storage.owner.number(self) % 1_000_003)], dtype=torch.float64)


class FakeMemory:
    """Numbers by page. Reading an interval gives one number only if one write filled it."""

    def __init__(self) -> None:
        self.pages: dict[int, int] = {}

    def write(self, span: Span, number: int) -> None:
        for page in range(span.start // PAGE, -(-span.end // PAGE)):
            self.pages[page] = number

    def read(self, span: Span) -> int:
        found = {self.pages.get(page, 0) for page in range(span.start // PAGE, -(-span.end // PAGE))}
        return found.pop() if len(found) == 1 else mix(*sorted(found))
