"""``tensor.data`` while a model is exported, which export does not follow: what it makes of one is a tensor that nothing has computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class DataAsDetached(TorchFunctionMode):
    """While it is entered, ``tensor.data`` is ``tensor.detach()``: the same memory without a gradient, by an operator that export follows.

    What differs is whether a write through it is counted, and what is exported is not asked that. Assigning to ``tensor.data`` is left to
    PyTorch, which refuses it.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """PyTorch's own protocol: called in the place of each function on tensors."""
        # A getter is another object each time that it is asked for.
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        return func(*args, **(kwargs or {}))
