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
    thread, lock, left, raised = ctypes.c_ulong(threading.get_ident()), threading.Lock(), threading.Event(), threading.Event()

    def watch() -> None:
        if not left.wait(max(0.0, end_s - time.monotonic())):
            with lock:
                if not left.is_set():
                    raised.set()
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Overrun))

    threading.Thread(target=watch, name="autosched-overrun", daemon=True).start()
    try:
        yield
    except Overrun:
        left.set()
        raise
    except BaseException:
        _settle(lock, left, raised)
        raise
    _settle(lock, left, raised)


def _settle(lock: threading.Lock, left: threading.Event, raised: threading.Event) -> None:
    """Of what has ended by itself, nothing is raised any more; what was raised by then comes now, and not in the midst of what is next.

    It cannot be taken back: Python 3.11 would look for it before each instruction ever after, and a function that a debugger or a profiler
    follows would not come past its first.
    """
    with contextlib.suppress(Overrun):
        with lock:
            left.set()
        # Where it came before, somebody has passed over it.
        for _ in range(10 if raised.is_set() else 0):
            time.sleep(0.001)
