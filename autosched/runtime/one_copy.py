"""One copy in memory of what several schedules have folded or packed alike.

Schedules of one model for several shapes, for a prompt and a step, or of an older and a newer file fold the same batch norms and pack the
same weights, mostly in the same layout: oneDNN asks for another one for a single row, and for few other reasons. Together these weights
are as large as the model. Nothing writes to them, so that equal ones may be the same memory; equal is what has the same bytes in the same
layout, whatever it was made of and whenever.

On a GPU the bytes are compared there, and only words come to the host. Each such word waits for the stream that the tensor was made on:
whatever is held here is finished, whichever stream reads it next. Captured graphs hold bare addresses, and their programs the tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container, Hashable
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from autosched.core.extents import storage_of

# Smaller ones are not worth a look.
_LEAST_BYTES = 4096
# Words of the memory by which the one that may be equal is found.
_WORDS = 16
# Compared at a time on a GPU, which takes an eighth of that.
_PIECE_BYTES = 64 << 20

# Without a lock: at worst two threads keep a copy each.
_held: WeakValueDictionary[Hashable, torch.Tensor] = WeakValueDictionary()


class _Memory(NamedTuple):
    """Where the memory begins that is all a tensor's own, its size in bytes, and how the tensor lies in it.

    ``words`` is the memory as numbers, on a GPU.
    """

    address: int
    size: int
    layout: Hashable
    words: torch.Tensor | None = None

    def sample(self) -> tuple[int, ...]:
        if self.words is not None:
            return tuple(self.words[:: max(1, self.words.numel() // _WORDS)].contiguous().tolist())
        step = self.size // _WORDS
        return tuple(ctypes.c_uint64.from_address(self.address + number * step).value for number in range(_WORDS))

    def same(self, other: _Memory) -> bool:
        if (self.size, self.layout) != (other.size, other.layout):
            return False
        if self.words is None or other.words is None:
            return _compare()(self.address, other.address, self.size) == 0
        step = _PIECE_BYTES // self.words.element_size()
        starts = range(0, self.words.numel(), step)
        return all(torch.equal(self.words[start : start + step], other.words[start : start + step]) for start in starts)


def one_copy(made: torch.Tensor, given: Container[Hashable]) -> torch.Tensor:
    """An equal tensor that another schedule holds, or ``made`` itself, which others are then given.

    Args:
        made: never written to again, and on a GPU made on the current stream. Tensors of other devices come back as they are.
        given: ``extents.storage_of`` what it was made of. A view of that has new values when that has, and a copy has not, so that neither
            may stand for the other.
    """
    memory = _memory_of(made)
    if memory is None or storage_of(made) in given:
        return made
    key = (made.device, made.dtype, tuple(made.shape), made.is_inference(), memory.layout, memory.size, memory.sample())
    known = _held.get(key)
    if known is not None:
        there = _memory_of(known)
        if there is not None and memory.same(there):
            return known
    _held[key] = made
    return made


def _memory_of(tensor: torch.Tensor) -> _Memory | None:
    if tensor.device.type not in ("cpu", "cuda") or type(tensor) is not torch.Tensor:
        return None
    if tensor.layout is not torch.strided:
        found = _packed(tensor) if _on_host(tensor) else None
    elif tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.is_conj() or tensor.is_neg():
        return None
    else:
        words = None if _on_host(tensor) else _as_numbers(tensor)
        found = _Memory(tensor.data_ptr(), tensor.nbytes, tensor.stride(), words)
    return found if found is not None and found.address and found.size >= _LEAST_BYTES else None


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's memory, in the order in which it lies there; as bits, since -0 equals 0 and NaN nothing."""
    dtype = torch.int64 if tensor.nbytes % 8 == 0 else torch.uint8
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())


def _packed(tensor: torch.Tensor) -> _Memory | None:
    operators: Any = torch.ops.mkldnn
    try:
        layout = bytes(operators._get_mkldnn_serialized_md(tensor).tolist())
        return _Memory(int(operators.data_ptr(tensor)), int(operators._nbytes(tensor)), layout)
    except (AttributeError, RuntimeError, ValueError):
        # A PyTorch that does not say, or what another library has packed.
        return None


@cache
def _compare() -> Callable[[int, int, int], int]:
    # torch.equal takes -0 for 0 and NaN for unlike itself, and ten times as long.
    try:
        compare = ctypes.CDLL(None).memcmp
    except (TypeError, OSError, AttributeError):
        return lambda first, second, size: 1
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    compare.restype = ctypes.c_int
    found: Callable[[int, int, int], int] = compare
    return found
