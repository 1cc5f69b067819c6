"""The GPU that this thread's calls go to where they name none: generated code, and the libraries under it, name none."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch


def made_current(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, ``device`` is the current one; afterwards that of before: which it is belongs to the caller."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    cuda: Any = torch.cuda  # its Python side is not typed
    context: AbstractContextManager[Any] = cuda.device(device)
    return context
