"""Exceptions that have nothing to do with what was going on when they came: the handler of a signal raised them.

Such a handler limits the time of a request, or ends a server. What it raises is for whoever installed it, and says nothing of the model or
the compiler that happened to be at work; to take it for their failure would swallow it, and give up a schedule that is good.
"""

from __future__ import annotations

import signal
import threading
from types import CodeType


def let_through(error: BaseException) -> None:
    """Raise what a signal's handler has raised, where ``error`` is that, or came of it.

    Args:
        error: caught just now, by the thread that it came to.
    """
    # Only that one runs handlers.
    if threading.current_thread() is not threading.main_thread():
        return
    codes: frozenset[CodeType] | None = None
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        codes = _handlers() if codes is None else codes
        place = found.__traceback__
        while place is not None:
            if place.tb_frame.f_code in codes:
                raise found
            place = place.tb_next
        found = found.__cause__ or found.__context__


def _handlers() -> frozenset[CodeType]:
    """The code of every handler that is installed and written in Python."""
    found = set()
    for number in signal.valid_signals():
        handler: object = signal.getsignal(number)
        # A partial, a method, and an object that can be called.
        handler = getattr(handler, "func", handler)
        handler = getattr(handler, "__func__", handler)
        code = getattr(handler, "__code__", None) or getattr(vars(type(handler)).get("__call__"), "__code__", None)
        if isinstance(code, CodeType):
            found.add(code)
    return frozenset(found)
