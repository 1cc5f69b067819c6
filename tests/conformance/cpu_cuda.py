"""The double of CUDA streams with real CPU tensors in it: what runs in a capture is recorded call by call, and a replay runs it again.

It rehearses tests that are written for a GPU, so that the first hour on one is not spent on misspelt names. Ordering is as on the plain
double: a call reads when its node starts and writes when it ends, so a missing wait gives wrong numbers. Memory is not: recorded tensors
stay alive, so that reuse of a block is never seen, and no time means anything.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autosched.runtime.cuda.bindings import KernelNode
from autosched.runtime.cuda.captured import NodeKind, Span
from tests.conformance.fake_cuda import FakeCuda
from tests.conformance.fake_cuda_values import FakeCapture, FakeEvent, FakeNode


class _Recorder(TorchDispatchMode):
    """Hands every call of a capture to the double."""

    def __init__(self, owner: CpuCuda) -> None:
        super().__init__()
        self._owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._owner.note(func, args, kwargs or {}, made)
        return made


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class CpuCuda(FakeCuda):
    """As :class:`FakeCuda`, its tensors real ones on the CPU; also the reader of its own graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self._mode: contextlib.ExitStack | None = None
        self._pool_of: dict[int, list[Span]] = {}
        self._held = 0

    # -- capture --------------------------------------------------------------------------------------------------------
    def begin_capture(self, pool: int) -> FakeCapture:
        graph = super().begin_capture(pool)
        self._mode = contextlib.ExitStack()
        self._mode.enter_context(_Recorder(self))
        return graph

    def end_capture(self, graph: FakeCapture) -> None:
        if self._mode is not None:
            self._mode.close()
            self._mode = None
        super().end_capture(graph)

    def note(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Record one call as a node, unless it only shows memory in another way."""
        stream = self.current_stream()
        schema = func._schema
        given = {_place(tensor) for tensor in _tensors((args, kwargs))}
        fresh = [tensor for tensor in _tensors(made) if _place(tensor) not in given]
        if stream.capture is not None:
            self._pool_of.setdefault(stream.capture.pool, []).extend(self.span(tensor) for tensor in fresh)
            self._held += sum(tensor.untyped_storage().nbytes() for tensor in fresh)
            self._peak = max(self._peak, self.allocated_bytes())
        if schema.name.startswith("aten::empty") or not (schema.is_mutable or fresh):
            return
        if stream.capture is None:
            self.strays += 1
            self.eager_launches.append(stream)
            return
        self._require_valid(stream.capture)
        again = _mutating(func, args, kwargs) if schema.is_mutable else _making(func, args, kwargs, made)
        self._add(stream, FakeNode(NodeKind.KERNEL, stream, (), self.duration_us, again))

    def replay(self, graph: FakeCapture) -> None:
        with torch.inference_mode():
            super().replay(graph)

    def touch(self) -> None:
        torch.ones(1)

    def multiply(self) -> bool:
        self.touch()
        return True

    def keeps_workspaces(self) -> bool:
        return True

    def elapsed_us(self, start: FakeEvent, end: FakeEvent) -> float:
        # What runs outside a graph takes no time on the double. Were it short, whoever fills a block with runs would need thousands.
        return super().elapsed_us(start, end) or 1000.0

    def kernels(self, graph: FakeCapture) -> list[KernelNode]:
        """One for each node that is a kernel."""
        priority = [node.stream.priority for node in graph.nodes if node.kind is NodeKind.KERNEL]
        return [KernelNode((8, 1, 1), (128, 1, 1), 32, 0, 0, 0, 4, 1, item) for item in priority]

    def driver_version(self) -> str:
        return "13.0"

    # -- memory -----------------------------------------------------------------------------------------------------------
    def span(self, tensor: torch.Tensor) -> Span:  # type: ignore[override]
        storage = tensor.untyped_storage()
        return Span(storage.data_ptr(), storage.nbytes())

    def static_like(self, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:  # type: ignore[override]
        with torch.inference_mode():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

    def clone(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:  # type: ignore[override]
        return [tensor.clone() for tensor in tensors]

    def pool_spans(self, pool: int, *, unused: bool) -> tuple[Span, ...]:
        return () if unused else tuple(self._pool_of.get(pool, ()))

    def poison(self, spans: Iterable[Span]) -> None:
        for span in spans:
            ctypes.memset(span.start, 0xFF, span.bytes)

    def same(self, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:  # type: ignore[override]
        def bits(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.contiguous().view(-1).view(torch.uint8)

        return all(mine.shape == other.shape and torch.equal(bits(mine), bits(other)) for mine, other in zip(tensors, others, strict=True))

    def allocated_bytes(self) -> int:
        return super().allocated_bytes() + self._held


def _making(func: Any, args: Any, kwargs: Any, made: Any) -> Callable[[Any], Callable[[Any], None]]:
    """A call that makes tensors: its results are copied into those of the capture when its node ends."""

    def start(memory: object) -> Callable[[object], None]:
        # A read at the start sees what is there then.
        found = _tensors(func(*args, **kwargs))

        def end(target: object) -> None:
            for old, new in zip(_tensors(made), found, strict=True):
                old.copy_(new)

        return end

    return start


def _mutating(func: Any, args: Any, kwargs: Any) -> Callable[[Any], Callable[[Any], None]]:
    """A call that changes its arguments: done on copies when its node starts, written back when it ends."""
    arguments = enumerate(func._schema.arguments)
    changed = [(place, item) for place, item in arguments if item.alias_info is not None and item.alias_info.is_write]

    def start(memory: object) -> Callable[[object], None]:
        new_args, new_kwargs = list(args), dict(kwargs)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for place, argument in changed:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for old in _tensors(value):
                pairs.append((old, old.clone()))
            copies = iter([new for _, new in pairs[len(pairs) - len(_tensors(value)) :]])
            swapped = pytree.tree_map_only(torch.Tensor, lambda _, copies=copies: next(copies), value)
            if place < len(args):
                new_args[place] = swapped
            elif argument.name in kwargs:
                new_kwargs[argument.name] = swapped
        func(*new_args, **new_kwargs)

        def end(target: object) -> None:
            for old, new in pairs:
                old.copy_(new)

        return end

    return start


@contextlib.contextmanager
def on_the_double(module: Any, device: CpuCuda) -> Iterator[None]:
    """Put the double where ``module`` would reach for a GPU; it must have imported these names itself."""
    from autosched.runtime.host_key import cpu_device_key, software_key

    stand_ins: dict[str, Any] = {
        "TorchStreams": lambda name="cuda": device,
        "open_bindings": lambda: device,
        "cuda_device_key": lambda index=0: cpu_device_key(),
        "cuda_software_key": lambda index=0: software_key(),
        "observe_synchronising": lambda measurer: [],
    }
    before = {name: getattr(module, name) for name in stand_ins if hasattr(module, name)}
    for name in before:
        setattr(module, name, stand_ins[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
