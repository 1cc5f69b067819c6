"""How products and convolutions in float32 may be rounded. PyTorch has two interfaces for it, and this is all that knows both.

Beside ``torch.set_float32_matmul_precision`` and ``allow_tf32`` there is, since PyTorch 2.9, a precision for each backend and kind of
operator, such as ``torch.backends.cuda.matmul.fp32_precision``. PyTorch's notes on CUDA recommend the newer ones; once a program has used
them, reading the older ones raises where they cannot tell the whole truth. So on a GPU the older ones are read where they answer, and the
newer ones elsewhere; on a CPU, where oneDNN may round to bfloat16, the newer ones, which the older set too.

All of them belong to the whole process. Of two threads that each change them for a while and put them back, the one that ends last would
put back what the other one had set, for good; and who reads them meanwhile would take them for what the process is set to. So threads
take turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from autosched.core.forks import RenewedLock

_backends: Any = torch.backends  # its Python side is not typed

# What ``torch.set_float32_matmul_precision`` calls the precisions of the newer interface.
_OLDER = {"tf32": "high", "bf16": "medium"}
# TF32 has the mantissa of float16.
_AS = {"tf32": torch.float16, "bf16": torch.bfloat16}
# Beside products, what oneDNN has a precision for: the name of the setting in keys, and PyTorch's.
_OTHERS = {"float32_convolutions": "conv", "float32_recurrence": "rnn"}
_KINDS = ("matmul", *_OTHERS.values())
_FULL = "ieee"

_turn = RenewedLock()
# Several times what a comparison takes. Not for ever: whoever has the turn may wait for what this thread holds, its model, say.
_PATIENCE_S = 10.0


@contextlib.contextmanager
def as_it_is_set() -> Iterator[None]:
    """No other thread changes how float32 is rounded meanwhile, by what is in this file; this one may."""
    lock: Any = _turn.lock
    try:
        lock.acquire(timeout=_PATIENCE_S)
        yield
    finally:
        # Asked of the lock: an exception of a signal's handler may come before anything is noted.
        if lock._is_owned():
            lock.release()


def has_turn() -> bool:
    """Whether this thread is within :func:`as_it_is_set`."""
    lock: Any = _turn.lock
    return bool(lock._is_owned())


def give_turn_back() -> None:
    """This thread is no longer within it, however often an exception of a signal's handler has kept it from leaving."""
    if has_turn():
        lock: Any = _turn.lock
        lock._release_save()


@as_it_is_set()
def matmul_precision(kind: str) -> str:
    """``highest``, ``high`` or ``medium``, as ``torch.get_float32_matmul_precision`` says it.

    Args:
        kind: of the device, ``cpu`` or ``cuda``.
    """
    if kind == "cpu":
        return _OLDER.get(_on_cpu("matmul"), "highest")
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return _OLDER.get(str(_backends.cuda.matmul.fp32_precision), "highest")


@as_it_is_set()
def cpu_roundings() -> dict[str, str]:
    """What beside products is rounded on a CPU, and to what (``bf16``, ``tf32``); empty as long as nobody asked for it."""
    return {name: precision for name, kind in _OTHERS.items() if (precision := _on_cpu(kind)) in _AS}


def set_cpu_roundings(wanted: Mapping[str, str]) -> None:
    """Make this process round as another does.

    Args:
        wanted: what :func:`cpu_roundings` says there; other names are passed over.
    """
    for name, kind in _OTHERS.items():
        precision = wanted.get(name, _FULL)
        if precision != (_on_cpu(kind) if _on_cpu(kind) in _AS else _FULL):
            getattr(_backends.mkldnn, kind).fp32_precision = precision


@as_it_is_set()
def convolutions_rounded() -> bool:
    """Whether cuDNN may round float32 to TF32 in convolutions."""
    try:
        return bool(_backends.cudnn.allow_tf32)
    except RuntimeError:
        return str(_backends.cudnn.conv.fp32_precision) == "tf32"


@as_it_is_set()
def rounded_as(kind: str) -> torch.dtype | None:
    """The dtype to whose precision operators may round factors in float32; ``None`` where they must not.

    Args:
        kind: of the device, ``cpu`` or ``cuda``. Where a processor has no instructions for it, what may be rounded is not.
    """
    if kind == "cuda":
        return torch.float16 if convolutions_rounded() or matmul_precision(kind) != "highest" else None
    found = {_on_cpu(name) for name in _KINDS} if kind == "cpu" else set()
    return next((_AS[precision] for precision in ("bf16", "tf32") if precision in found), None)


def round_convolutions(*, allowed: bool) -> None:
    """Let cuDNN round float32 to TF32, in convolutions and recurrent layers, or not."""
    _backends.cudnn.allow_tf32 = allowed
    for item in _cudnn_kinds():
        # The older interface only takes their own precision from them, and then they have the one that is set for all backends.
        if not allowed and str(item.fp32_precision) in _AS:
            item.fp32_precision = _FULL


@contextlib.contextmanager
def full_convolutions() -> Iterator[None]:
    """cuDNN computes in full float32 meanwhile. The setting belongs to the whole process, and is put back."""
    cudnn, kinds = _backends.cudnn, _cudnn_kinds()
    with as_it_is_set():
        separate = [str(item.fp32_precision) for item in kinds]
        try:
            before = bool(cudnn.allow_tf32)
        except RuntimeError:
            before = True
        try:
            round_convolutions(allowed=False)
            yield
        finally:
            cudnn.allow_tf32 = before
            for item, precision in zip(kinds, separate, strict=True):
                if str(item.fp32_precision) != precision:
                    item.fp32_precision = precision


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Nothing rounds float32 meanwhile, neither on a GPU nor on a CPU. The settings belong to the whole process, and are put back."""
    with as_it_is_set():
        before = {kind: _on_cpu(kind) for kind in _KINDS}
        try:
            with full_convolutions(), _full_products():
                for kind, precision in before.items():
                    if precision in _AS:
                        getattr(_backends.mkldnn, kind).fp32_precision = _FULL
                yield
        finally:
            # The older interface, put back, has set products anew.
            for kind, precision in before.items():
                if _on_cpu(kind) != precision:
                    getattr(_backends.mkldnn, kind).fp32_precision = precision


@contextlib.contextmanager
def _full_products() -> Iterator[None]:
    products = _backends.cuda.matmul
    separate = str(getattr(products, "fp32_precision", _FULL))
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        try:
            products.fp32_precision = _FULL
            yield
        finally:
            products.fp32_precision = separate
        return
    try:
        torch.set_float32_matmul_precision("highest")
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        # Without a precision of their own, products follow what is set for all backends later on.
        if str(getattr(products, "fp32_precision", _FULL)) != separate:
            products.fp32_precision = separate


def _cudnn_kinds() -> list[Any]:
    """What cuDNN has a precision for, each with a setting of its own; none in an older PyTorch."""
    found = (getattr(_backends.cudnn, name, None) for name in ("conv", "rnn"))
    return [item for item in found if hasattr(item, "fp32_precision")]


def _on_cpu(kind: str) -> str:
    return str(getattr(getattr(_backends.mkldnn, kind, None), "fp32_precision", _FULL))
