"""C++ compilers that Inductor starts from this process and that never end. Private interface, the same in PyTorch 2.11 to 2.15:
``cpp_builder.run_compile_cmd``.

PyTorch waits for a compiler as long as it takes. One that hangs (on the server of its licence, in a wrapper that asks other machines) would
hang whoever loads a schedule, and with it the start of a server, without a word. Processes that only compile have limits of their own; here
it is the compiler that is ended, and the process goes on without the code. On Linux only: elsewhere, and where PyTorch compiles in
another way, there is no limit.

Nor would a compiler ever begin in a process that was forked after its parent had compiled: PyTorch has threads start them, and waits for
those of the parent. Private interface, the same in PyTorch 2.11 to 2.15: ``AsyncCompile.pool``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from autosched.config import region_limit_s
from autosched.core.forks import RenewedLock, outlive_forks

COMMAND_LIMIT_S = 240.0
"""Seconds for one compiler, of which a kernel takes one or a few, unless ``AUTOSCHED_REGION_LIMIT_S`` says otherwise."""
ASKING_LIMIT_S = 60.0
"""Seconds for compilers that are only asked what they are and can do; less than a measuring process may go without a sign of life."""
_AGAIN_S = 1.0

_patching = RenewedLock()


class _CompilingThreads:
    """PyTorch's own, which start compilers."""

    def after_fork(self) -> None:
        """Whoever compiles in this process has others; they are the parent's."""
        compiling = sys.modules.get("torch._inductor.async_compile")
        forget = getattr(getattr(getattr(compiling, "AsyncCompile", None), "pool", None), "cache_clear", None)
        if callable(forget):
            forget()


_compiling_threads = _CompilingThreads()
outlive_forks(_compiling_threads)


class CompilerHung(BaseException):
    """A compiler was ended at its limit.

    No ``Exception``: PyTorch would take it for an answer, that the processor has no vector instructions for one, and remember that.
    """

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the C++ compiler had not ended after {limit_s:g} s, so it was ended")


@contextlib.contextmanager
def compilers_limited(limit_s: float | None = None) -> Iterator[None]:
    """Within the block, a compiler that Inductor starts from this process is ended after ``limit_s`` seconds; one block at a time.

    Args:
        limit_s: by default that of one region.

    Raises:
        CompilerHung: where one was.
    """
    most_s = region_limit_s(COMMAND_LIMIT_S) if limit_s is None else limit_s
    with _compiling_within(lambda: _ended_after(most_s)):
        yield


@contextlib.contextmanager
def asking_compilers(limit_s: float = ASKING_LIMIT_S) -> Iterator[None]:
    """Within the block, all that this thread starts is ended ``limit_s`` seconds after the block began: PyTorch asks a compiler for its
    version, and tries what it can do.

    Raises:
        CompilerHung: where something was.
    """
    with _ended_after(limit_s) as ended, _compiling_within(lambda: _telling(ended, limit_s)):
        yield


@contextlib.contextmanager
def _compiling_within(around: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Each compiler that Inductor starts within the block is run within ``around()``."""
    builder = _builder()
    if builder is None:
        yield
        return
    with _patching.lock:
        run = builder.run_compile_cmd

        def limited(*args: Any, **kwargs: Any) -> Any:
            with around():
                return run(*args, **kwargs)

        builder.run_compile_cmd = limited
        try:
            yield
        finally:
            builder.run_compile_cmd = run


def _builder() -> Any:
    """The module that runs compilers, or ``None`` if it is not the one known here."""
    try:
        from torch._inductor import cpp_builder
    except Exception:  # whoever compiles next finds out, and says why
        return None
    return cpp_builder if callable(getattr(cpp_builder, "run_compile_cmd", None)) else None


@contextlib.contextmanager
def _ended_after(limit_s: float) -> Iterator[threading.Event]:
    """When the block has lasted ``limit_s`` seconds, what this thread has started within it is ended, and what fails of that hung."""
    done, ended = threading.Event(), threading.Event()
    if not sys.platform.startswith("linux"):
        yield ended
        return
    thread = threading.get_native_id()
    others = frozenset(_started_by(os.getpid(), str(thread)))

    def watch() -> None:
        wait_s = limit_s
        while not done.wait(wait_s):
            _end(thread, others, ended)
            wait_s = _AGAIN_S

    with contextlib.suppress(RuntimeError):  # no more threads: then without a limit
        threading.Thread(target=watch, name="autosched-compilers", daemon=True).start()
    try:
        with _telling(ended, limit_s):
            yield ended
    finally:
        done.set()


@contextlib.contextmanager
def _telling(ended: threading.Event, limit_s: float) -> Iterator[None]:
    try:
        yield
    except Exception:
        if ended.is_set():
            raise CompilerHung(limit_s) from None
        raise


def _end(by: int, but: Collection[int], ended: threading.Event) -> None:
    """End what thread ``by`` of this process has started, ``but`` not these, with all that that has started: a compiler is several."""
    found = [pid for pid in _started_by(os.getpid(), str(by)) if pid not in but]
    if found:
        ended.set()
    while found:
        # Once their parent is gone nobody knows whose they are.
        following = [child for pid in found for child in _started_by(pid)]
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        found = following


def _started_by(pid: int, thread: str = "*") -> list[int]:
    """The children of a process, or those that one of its threads has started."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob(f"{thread}/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found
