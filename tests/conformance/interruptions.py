"""Something that is called in the middle of other code of the same thread, as signals' handlers and finalizers are."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def ends_whatever_interrupts(body: Callable[[], object], codes: set[CodeType], interrupt: Callable[[], object]) -> bool:
    """Whether ``body`` ends, on a thread of its own, with ``interrupt`` called before each instruction of ``codes``.

    Asserts:
        that there were such instructions.
    """
    calls = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal calls
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            calls += 1
            interrupt()
        return trace

    def traced() -> None:
        # Python 3.12 asks when tracing begins whether any frame is to be traced so.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(trace)
        try:
            body()
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=traced, daemon=True)
    thread.start()
    thread.join(60)
    assert calls > 0
    return not thread.is_alive()
