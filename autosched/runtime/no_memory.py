"""Whether an error says that there was no memory, which may be so for a moment and says nothing of what was asked to run."""

from __future__ import annotations

import torch

from autosched.core.errors import AutoschedError, ShortOfMemory

# How PyTorch's allocator for CPUs says that there is none, the driver of a GPU, cuBLAS and cuDNN in the names of their status codes, and
# C++ itself, which is no MemoryError from PyTorch 2.15 on.
_WORDS = ("out of memory", "alloc_failed", "allocate memory", "not enough memory", "bad_alloc")

# What to do about it, at the end of a message.
ROOM = "There is not enough memory for it beside the model: free some and load again, or keep fewer shapes in memory (max_shapes)."

# Others of a server may hold the memory for a moment. Where there never is any, each call would cost an attempt.
MOST_SHORT = 16


def left_alone(attempts: int) -> int:
    """How many calls are left to the model after so many attempts in a row that had no memory, before there is another one.

    An attempt takes longer than a call, and nobody knows how long a moment is: after each one, twice as many.

    >>> [left_alone(attempts) for attempts in (1, 2, 3, 4)]
    [0, 1, 3, 7]
    """
    return int(2 ** (attempts - 1)) - 1


def lacks_memory(error: BaseException | None) -> bool:
    """Whether ``error``, or what it came of, is a lack of memory."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (torch.OutOfMemoryError, MemoryError, ShortOfMemory)) or _says_so(error):
            return True
        error = error.__cause__
    return False


def _says_so(error: BaseException) -> bool:
    # What autosched says of another's error quotes it, and what a file is named.
    if isinstance(error, AutoschedError):
        return False
    return tells_of_no_memory(str(error).partition("\n")[0])


def tells_of_no_memory(text: str) -> bool:
    """Whether what an error says is that there was none."""
    lowered = text.lower()
    return any(words in lowered for words in _WORDS)
