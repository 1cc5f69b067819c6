"""Exceptions that are kept while work goes on: by their tracebacks they hold whatever was being made when they came."""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from types import FrameType

_PACKAGE = __name__.partition(".")[0]
_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def empty_frames(error: BaseException) -> None:
    """Let go of what the functions held that ``error``, and what it came of, has ended; the lines of its traceback stay.

    Packed weights and a device's buffers are a model's size. Whoever runs the model in the place of what failed needs that memory now, and
    not when the cyclic collector comes by: a frame that keeps an exception of its own is a cycle. What a caller is handling already stays
    as it is.
    """
    callers = _callers()
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        found = pending.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        caught = found.__traceback__
        if found is not error and caught is not None and caught.tb_frame in callers:
            continue
        for frame, _ in traceback.walk_tb(found.__traceback__):
            # To clear one that may go on would end it.
            if not frame.f_code.co_flags & _SUSPENDABLE:
                with contextlib.suppress(RuntimeError):  # it is running
                    frame.clear()
        pending += [found.__cause__, found.__context__]


def _callers() -> set[FrameType]:
    """Frames of this thread that are running and not of this package."""
    found: set[FrameType] = set()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] != _PACKAGE:
            found.add(frame)
        frame = frame.f_back
    return found
