"""Kernels are timed by one process at a time: a lock between processes, and Inductor's timer waiting for it."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any


@functools.cache
def turns(path: bytes) -> Callable[[], AbstractContextManager[None]]:
    """A lock between processes, one for each file; the thread that has it may take it again, and the kernel releases it when that dies."""
    depth = 0

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        nonlocal depth
        if depth == 0:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        depth += 1
        try:
            yield
        finally:
            depth -= 1
            if depth == 0:
                os.close(descriptor)

    return turn


def wait_for_turns(turn: Callable[[], AbstractContextManager[None]]) -> bool:
    """Let Inductor time kernels only in a turn; whether this PyTorch times them where it is known to."""
    try:
        from torch._inductor.runtime.benchmarking import benchmarker
    except ImportError:
        return False
    kind: Any = type(benchmarker)
    time_gpu = getattr(kind, "benchmark_gpu", None)
    if not callable(time_gpu):
        return False

    def benchmark_gpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        with turn():
            return time_gpu(self, *args, **kwargs)

    kind.benchmark_gpu = benchmark_gpu
    return True
