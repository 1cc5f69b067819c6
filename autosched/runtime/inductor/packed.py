"""How weights come to be in the layout of a C++ template that was chosen for them (a CPU's max-autotune).

Templates block the weights of a product once it is chosen, after everything else has been folded; ``inductor.kept`` must know how, to do it
again from the weights at hand. Private interface, the same in PyTorch 2.11 to 2.15; where it is absent the code is not kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autosched.runtime.inductor.kept import Folds, window


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator and what it makes.

    A weight may lie anywhere in its storage: one half of a table, or one of those that were read from a file at once. Templates take what
    the storage begins with (PyTorch 2.11 to 2.13), and so would block another weight.
    """

    def __init__(self, folds: Folds) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._folds = folds

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.as_strided.default:
            func = window
        out = func(*args, **(kwargs or {}))
        if type(out) is torch.Tensor:
            self._folds.results[id(out)] = (out, func, args, kwargs or {})
        return out


@contextlib.contextmanager
def packing_into(folds: Folds) -> Iterator[None]:
    """Note in ``folds`` what is computed on weights when a template is taken within the block."""
    try:
        from torch._inductor.select_algorithm import DataProcessorChoiceCallerWrapper
    except ImportError:
        yield
        return
    wrapper: Any = DataProcessorChoiceCallerWrapper
    original = vars(wrapper).get("output_node")
    if original is None:
        yield
        return

    def output_node(self: Any) -> Any:
        with _Noting(folds):
            return original(self)

    wrapper.output_node = output_node
    try:
        yield
    finally:
        wrapper.output_node = original
