"""The GPU that this thread's calls go to where they name none (generated code, and the libraries under it, name none); where a model is."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from autosched.runtime.trees import output_tensors


def current_index() -> int:
    """Which GPU that is. The first one where PyTorch has not begun to use any: to ask would make it begin."""
    cuda: Any = torch.cuda  # its Python side is not typed
    return int(cuda.current_device()) if cuda.is_initialized() else 0


def home_of(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> torch.device:
    """Where ``model`` is: by its first parameter or buffer, else by the first tensor it is called with."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return next((tensor.device for tensor in output_tensors((tuple(args), dict(kwargs or {})))), torch.device("cpu"))


def made_current(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, ``device`` is the current one; afterwards that of before: which it is belongs to the caller."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    cuda: Any = torch.cuda  # its Python side is not typed
    context: AbstractContextManager[Any] = cuda.device(device)
    return context
