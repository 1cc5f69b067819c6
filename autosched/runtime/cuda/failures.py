"""What an exception of a capture, or of anything else on a GPU, says of the candidate that was worked on."""

from __future__ import annotations

import torch

from autosched.core.records import Failure, FailureKind

# How the driver, and cuBLAS and cuDNN in the names of their status codes, say that there is none.
_NO_MEMORY = ("out of memory", "alloc_failed")


def failure_of(error: BaseException, doing: str) -> Failure:
    """The failure a candidate's exception means."""
    text = f"{doing}: {type(error).__name__}: {error}".splitlines()[0][:500]
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in text.lower() for words in _NO_MEMORY):
        return Failure(FailureKind.OOM, text)
    return Failure(FailureKind.CAPTURE, text)
