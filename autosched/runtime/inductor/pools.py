"""End the processes that Inductor compiles in. Private interface, the same in PyTorch 2.11 to 2.15: ``async_compile._pool_set``.

Left to itself, a process that has compiled waits at its end until those have ended, for up to five minutes, and now and then a worker
of theirs never does: its executor is gone before it was told. There is nothing left to do for them by then.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any


def end_pools() -> None:
    """End them at once; nothing where none was started, or where this PyTorch keeps them otherwise."""
    module: Any = sys.modules.get("torch._inductor.async_compile")
    for pool in tuple(getattr(module, "_pool_set", ())):
        process = getattr(pool, "process", None)
        if process is None or not hasattr(pool, "running"):
            continue
        # Otherwise it would tell the process to end, and find nobody there.
        pool.running = False
        with contextlib.suppress(OSError):
            process.kill()
            process.wait()
    # Whoever compiles after this in the same process gets a new one.
    forget = getattr(module, "after_fork", None)
    if forget is not None:
        forget()
    compiler = getattr(module, "AsyncCompile", None)
    if compiler is not None and hasattr(compiler, "_ready_future"):
        compiler._ready_future = None
