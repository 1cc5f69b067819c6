"""How products and convolutions in float32 may be rounded. PyTorch has two interfaces for it, and this is all that knows both.

Beside ``torch.set_float32_matmul_precision`` and ``allow_tf32`` there is, since PyTorch 2.9, a precision for each backend and kind of
operator, such as ``torch.backends.cuda.matmul.fp32_precision``. PyTorch's notes on CUDA recommend the newer ones; once a program has used
them, reading the older ones raises where they cannot tell the whole truth. So the older ones are read where they answer, and the newer
ones elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_backends: Any = torch.backends  # its Python side is not typed

# What ``torch.set_float32_matmul_precision`` calls the precisions of the newer interface.
_OLDER = {"tf32": "high", "bf16": "medium"}


def matmul_precision(kind: str) -> str:
    """``highest``, ``high`` or ``medium``, as ``torch.get_float32_matmul_precision`` says it.

    Args:
        kind: of the device, ``cpu`` or ``cuda``.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        backend = _backends.cuda if kind == "cuda" else _backends.mkldnn
        return _OLDER.get(str(backend.matmul.fp32_precision), "highest")


def convolutions_rounded() -> bool:
    """Whether cuDNN may round float32 to TF32 in convolutions."""
    try:
        return bool(_backends.cudnn.allow_tf32)
    except RuntimeError:
        return str(_backends.cudnn.conv.fp32_precision) == "tf32"


@contextlib.contextmanager
def full_convolutions() -> Iterator[None]:
    """cuDNN computes in full float32 meanwhile. The setting belongs to the whole process, and is put back."""
    cudnn = _backends.cudnn
    kinds = [getattr(cudnn, name) for name in ("conv", "rnn") if hasattr(getattr(cudnn, name, None), "fp32_precision")]
    separate: list[str] = []
    try:
        before = bool(cudnn.allow_tf32)
    except RuntimeError:
        before, separate = True, [str(item.fp32_precision) for item in kinds]
    cudnn.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32 = before
        for item, precision in zip(kinds, separate, strict=False):
            item.fp32_precision = precision


def rounds_float32() -> bool:
    """Whether products or convolutions on a GPU may round float32."""
    return convolutions_rounded() or matmul_precision("cuda") != "highest"


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """As :func:`full_convolutions`, and products too."""
    with full_convolutions(), _full_products():
        yield


@contextlib.contextmanager
def _full_products() -> Iterator[None]:
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        products = _backends.cuda.matmul
        separate, products.fp32_precision = str(products.fp32_precision), "ieee"
        try:
            yield
        finally:
            products.fp32_precision = separate
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
