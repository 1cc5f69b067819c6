"""A process to which the GPU is lost: after an illegal access, say, whatever it asks of the device gives the same error."""

from __future__ import annotations

import os
import sys

from autosched.runtime.cuda.streams import StreamBackend


def require_device(backend: StreamBackend, error: Exception | None = None) -> None:
    """End this process if the device is lost to it; the parent starts a fresh one for what it asks next.

    Args:
        error: what was raised, for the parent; by default what the device says now.
    """
    try:
        backend.synchronize()
    except Exception as lost:
        end_process(f"the device is lost to this process: {error or lost}")


def end_process(words: str) -> None:
    """Leave ``words`` for the parent and end at once, without the clean-up that a lost device would not survive."""
    sys.stderr.write(words + "\n")
    sys.stderr.flush()
    os._exit(3)
