"""Settings of float32 on a CPU for the length of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def rounding(**kinds: str) -> Iterator[None]:
    """oneDNN's kinds of operators (``matmul``, ``conv``, ``rnn``) rounded so; all of its settings are put back."""
    backend: Any = torch.backends.mkldnn
    before = {kind: getattr(backend, kind).fp32_precision for kind in ("matmul", "conv", "rnn")}
    older = torch.get_float32_matmul_precision()
    try:
        for kind, precision in kinds.items():
            getattr(backend, kind).fp32_precision = precision
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        for kind, precision in before.items():
            getattr(backend, kind).fp32_precision = precision
