"""An end to other people's code that runs in this process and does not come back."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator


class Overrun(BaseException):
    """What runs had not ended when it should have. No ``Exception``: what does not come back may be a loop that goes on after any."""


@contextlib.contextmanager
def ended_at(end_s: float | None) -> Iterator[None]:
    """Within, this thread raises ``Overrun`` where it is when ``time.monotonic()`` comes to ``end_s``; never if that is ``None``.

    As with Ctrl-C, compiled code comes back first. Unlike Ctrl-C, this is for any thread, and no signal's handler is touched.
    """
    if end_s is None:
        yield
        return
    thread, lock, left = ctypes.c_ulong(threading.get_ident()), threading.Lock(), threading.Event()
    set_raised = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def watch() -> None:
        if not left.wait(max(0.0, end_s - time.monotonic())):
            with lock:
                if not left.is_set():
                    set_raised(thread, ctypes.py_object(Overrun))

    threading.Thread(target=watch, name="autosched-overrun", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            left.set()
        # One that is under way would be raised in what comes next.
        set_raised(thread, None)
