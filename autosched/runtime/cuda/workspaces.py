"""Workspaces of cuBLAS for graphs that serve: made where no graph's end, and nobody who clears them all, takes them away under another.

PyTorch keeps a workspace for each stream (up to 2.13; in 2.15 each product takes its own). A captured product holds its bare address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autosched.core.from_outside import let_through
from autosched.core.records import Failure
from autosched.runtime.cuda.failures import failure_of
from autosched.runtime.cuda.streams import Graph, Pool, Stream, StreamBackend, StreamSet
from autosched.runtime.thread_state import inference_mode

Record = Callable[[Sequence[Stream], Callable[[], Any], Pool], "tuple[Graph, Any, Pool] | Failure"]
"""Captures what is launched on streams into one graph in a pool; says which pool it became."""


class Workspaces:
    """Those of one capturer's lanes, in a pool that lives as long as this.

    Otherwise the first graph with a product on a lane has them in its own pool, and all later graphs read them there. Whoever clears them
    then (PyTorch's graph trees do) gives that memory back to the driver as soon as the first graph is gone. The same goes for what others
    made on such a stream before, where it is one of PyTorch's, which everybody is given: on an H200, a graph on one broke its process.
    """

    def __init__(self, backend: StreamBackend, streams: StreamSet, record: Record) -> None:
        self._backend = backend
        self._streams = streams
        self._record = record
        self._held: tuple[Pool, Graph] | None = None
        self._left: list[Graph] = []  # what is in their pools is used, and nothing can be added to it
        self._made_on: set[int] = set()

    @property
    def pool(self) -> Pool | None:
        """Where they are; ``None`` while there are none."""
        return self._held[0] if self._held is not None else None

    def hold(self, lanes: Callable[[], list[Stream]]) -> Failure | None:
        """Make them for ``lanes``, and give a lane another stream whose own had some from elsewhere.

        Where each product takes its own from the pool of its graph, there is nothing to hold, and memory held for it would be wasted.
        """
        backend = self._backend
        try:
            with inference_mode(True), backend.on(self._streams.named("warm-up")):
                backend.multiply()
                if not backend.keeps_workspaces():
                    return None
        except Exception as error:
            let_through(error)
            return failure_of(error, "workspaces")
        replaced = True
        while replaced:
            strange = self._make(lanes())
            if isinstance(strange, Failure):
                return strange
            if strange and not self._made_on and not self._are_made():
                break
            # All of them, before the answer is known.
            replaced = any([self._streams.replace(stream) for stream in strange])
        return None

    def close(self) -> None:
        """Free them."""
        for graph in (*self._left, *([self._held[1]] if self._held is not None else [])):
            self._backend.reset(graph)
        self._held, self._left = None, []

    def _make(self, lanes: Sequence[Stream]) -> list[Stream] | Failure:
        """The streams that had some already, but not from here."""
        backend = self._backend
        had_none: list[Stream] = []

        def body() -> None:
            had_none.clear()
            for stream in lanes:
                with backend.on(stream):
                    had_none.extend([stream] if backend.multiply() else [])

        made: tuple[Graph, Any, Pool] | Failure | None = None
        try:
            made = self._record(lanes, body, self._held[0] if self._held is not None else backend.new_pool())
        finally:
            # A capture that could not be ended in order leaves its pool recording for good: the next one needs another.
            if not isinstance(made, tuple) and self._held is not None:
                self._left.append(self._held[1])
                self._held = None
        if isinstance(made, Failure):
            return made
        before, self._held = self._held, (made[2], made[0])
        if before is not None:
            backend.reset(before[1])
        self._made_on |= {backend.handle(stream) for stream in had_none}
        return [stream for stream in lanes if backend.handle(stream) not in self._made_on]

    def _are_made(self) -> bool:
        """Whether a captured product leaves any on a stream that nobody has used; if not, each further stream would look strange as well.

        Where they are of no bytes (``CUBLAS_WORKSPACE_CONFIG``), none does; nor where those that are kept are for products outside of
        captures (pull request 193832 of PyTorch).
        """
        found: list[bool] = []

        def body() -> None:
            found.clear()
            with self._backend.on(stream):
                found.append(self._backend.multiply())

        try:
            stream = self._streams.named("workspaces")
            made = self._record([stream], body, self._backend.new_pool())
        except Exception as error:  # no stream or no memory is left: none for a lane either
            let_through(error)
            return False
        if isinstance(made, Failure):
            return False
        self._backend.reset(made[0])
        return found[0]
