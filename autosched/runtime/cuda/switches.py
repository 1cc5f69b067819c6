"""What a process lets PyTorch use on a GPU for attention, for products and for depthwise convolutions.

Each may change both numbers and times.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

_cuda: Any = torch.backends.cuda  # its Python side is not typed
_ATTENTION = ("cudnn", "flash", "math", "mem_efficient")
_REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
_SPLIT = "_split_k"
_ACCUMULATION = "allow_fp16_accumulation"
_ANY_KERNEL = "auto"
_USUAL_LIBRARY = "cublas"

changing = threading.RLock()
"""Held by a thread that changes a switch for a while. Of two that do and put it back, the one that ends last would put back what the other
one had set, for good; and who reads it meanwhile would take it for what the process is set to."""


def attention_kernels() -> tuple[str, ...]:
    """Names of the implementations of attention that may be chosen, sorted."""
    return tuple(name for name in _ATTENTION if getattr(_cuda, f"{name}_sdp_enabled")())


def half_precision() -> tuple[str, ...]:
    """Names of the liberties that products in half precision may take, sorted; those that this PyTorch does not have are left out."""
    names = (_ACCUMULATION, *(f"{name}{end}" for name in _REDUCTIONS for end in ("", _SPLIT)))
    return tuple(sorted(name for name in names if _allowed(name)))


def depthwise_kernel() -> str:
    """Whose kernel depthwise convolutions are to take; empty where PyTorch chooses, as it always did before 2.15."""
    chosen = str(getattr(torch.backends.cudnn, "depthwise_kernel", _ANY_KERNEL))
    return "" if chosen == _ANY_KERNEL else chosen


def products_library() -> str:
    """Which library products go to wherever it has them; empty for cuBLAS, as it is unless somebody asks for another."""
    with changing:
        chosen = _cuda.preferred_blas_library().name.lower() if hasattr(_cuda, "preferred_blas_library") else _USUAL_LIBRARY
    return "" if chosen in (_USUAL_LIBRARY, "default") else str(chosen)


def set_switches(attention: tuple[str, ...], products: tuple[str, ...], depthwise: str, library: str) -> None:
    """Make this process as another is.

    Args:
        attention: what :func:`attention_kernels` says there.
        products: what :func:`half_precision` says there.
        depthwise: what :func:`depthwise_kernel` says there.
        library: what :func:`products_library` says there.
    """
    if library != products_library():
        _cuda.preferred_blas_library(library or _USUAL_LIBRARY)
    if depthwise != depthwise_kernel():
        torch.backends.cudnn.depthwise_kernel = depthwise or _ANY_KERNEL  # type: ignore[attr-defined,unused-ignore]
    for name in _ATTENTION:
        getattr(_cuda, f"enable_{name}_sdp")(name in attention)
    for name in _REDUCTIONS:
        wanted = name in products, f"{name}{_SPLIT}" in products
        if wanted != (_allowed(name), _allowed(name + _SPLIT)):
            # Before it knew of the second, PyTorch took the first alone.
            setattr(_cuda.matmul, name, wanted if hasattr(_cuda.matmul, name + _SPLIT) else wanted[0])
    if _allowed(_ACCUMULATION) != (_ACCUMULATION in products):
        setattr(_cuda.matmul, _ACCUMULATION, _ACCUMULATION in products)


def _allowed(name: str) -> bool:
    return bool(getattr(_cuda.matmul, name, False))
