"""Exceptions that are kept while work goes on: by their tracebacks they hold whatever was being made when they came."""

from __future__ import annotations

import traceback


def empty_frames(error: BaseException) -> None:
    """Let go of what the functions held that ``error``, and what it came of, has ended; the lines of its traceback stay.

    Packed weights and a device's buffers are a model's size. Whoever runs the model in the place of what failed needs that memory now, and
    not when the cyclic collector comes by: a frame that keeps an exception of its own is a cycle.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        found = pending.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        traceback.clear_frames(found.__traceback__)
        pending += [found.__cause__, found.__context__]
