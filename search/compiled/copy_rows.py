"""Copying the int32 rows of a schedule: launch order, place in it, lane, width index, extra wait."""

from __future__ import annotations

from autosched.search.compiled.cache import compiled


@compiled("void(i4[:,::1],i4[:,::1])")
def copy_rows(target, source):  # type: ignore[no-untyped-def]
    """Copy ``source`` into ``target``; an array assignment would compile the text of its error message, which takes seconds."""
    for row in range(source.shape[0]):
        for place in range(source.shape[1]):
            target[row, place] = source[row, place]
