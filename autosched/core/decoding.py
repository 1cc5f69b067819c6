"""Values from JSON, on any thread.

msgspec looks at a class when it first decodes one, and keeps on the class what it found. As of 0.22 nothing guards that: two threads
that begin at once with the same class, as a server does that loads two schedules, crash the process. So decoders are made one at a time
here, and kept. A finished decoder may be used by all threads.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from autosched.core.forks import RenewedLock

T = TypeVar("T")

_lock = RenewedLock()
_made: dict[Any, msgspec.json.Decoder[Any]] = {}


def decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of a type, a union of types among them."""
    # Looked up without the lock first: once made, it stays.
    found = _made.get(kind)
    if found is None:
        with _lock.lock:
            found = _made.get(kind)
            if found is None:
                found = _made[kind] = msgspec.json.Decoder(kind)
    return found


def decode_json(data: bytes | str, kind: type[T]) -> T:
    """What ``data`` says, as a ``kind``.

    Raises:
        msgspec.MsgspecError: if it says nothing of the kind, whatever is wrong with it.
    """
    try:
        value: T = decoder_of(kind).decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # bytes that are no text; nested deeper than the stack is
        raise msgspec.DecodeError(str(error)) from error
    return value
