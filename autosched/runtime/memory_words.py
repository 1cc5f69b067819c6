"""A word or two of each weight's memory, to notice what is written there past PyTorch's counts.

``parameter.data.copy_(...)``, NumPy and ``torch.distributed`` write to weights, and no count tells. A schedule that reads a weight where it
is reads the new values; what was computed from it ahead, folded or packed, stays as it was. Whoever writes new weights writes all of
them, and so changes the words that are looked at; a change of a few numbers between these is not seen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch

_BYTES = 8
# More find no more of what happens: weights are written as a whole. Each is a place in memory that nothing else reads.
_WORDS = 2
_CANDIDATES = 16
# Of a tensor that has no whole word to itself, a scale or a slope say, numbers are looked at.
_NUMBERS: dict[int, Any] = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32}


class MemoryWords:
    """Compares some words of memory with what they were when this was made.

    Args:
        tensors: whose memory; those alone that are on a CPU and strided. They are held, and who asks knows that they have the memory that
            they had.

    ``places`` are addresses of whole words, for who compares nothing less: in that of a small tensor there may be a neighbour as well.
    """

    __slots__ = ("_was", "_whose", "_words", "places")

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        kept = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.layout is torch.strided]
        # The memory, not only the tensor, which may be given other.
        held = [(tensor, tensor.detach()) for tensor in kept]
        found = [(tensor, memory, *told) for tensor, memory in held for told in _telling_places(memory)]
        self._whose = [(tensor, memory, memory.data_ptr()) for tensor, memory, _, _ in found]
        self.places: Sequence[int] = list(dict.fromkeys(place & -_BYTES for _, _, _, place in found))
        self._words = [word.from_address(place) for _, _, word, place in found]
        self._was = [word.value for word in self._words]

    def changed(self) -> bool:
        """Whether a word differs."""
        return [word.value for word in self._words] != self._was

    def different(self) -> list[torch.Tensor]:
        """Those of which a word differs, or whose memory was given back (``untyped_storage().resize_``), so that none may be read."""
        words = zip(self._whose, self._words, self._was, strict=True)
        return [tensor for (tensor, memory, start), word, was in words if memory.data_ptr() != start or word.value != was]


def _telling_places(tensor: torch.Tensor) -> list[tuple[Any, int]]:
    """Words of its memory, and where, of numbers that are not zero if there are such: whatever these are multiplied by, they stay."""
    first, size = tensor.data_ptr(), _bytes_in_one_piece(tensor)
    word, step, begin = ctypes.c_uint64, _BYTES, -(-first // _BYTES) * _BYTES
    if begin + step > first + size and (number := _NUMBERS.get(tensor.element_size())) is not None:
        word, step, begin = number, tensor.element_size(), first
    count = max(0, first + size - begin) // step
    found = list(dict.fromkeys(begin + step * (count * part // _CANDIDATES) for part in range(_CANDIDATES if count else 0)))
    telling = [place for place in found if word.from_address(place).value] or found
    return [(word, place) for place in telling[:: max(1, len(telling) // _WORDS)][:_WORDS]]


def _bytes_in_one_piece(tensor: torch.Tensor) -> int:
    """How many bytes from its first number on are its own; of a view with gaps, those of that number."""
    if tensor.numel() == 0 or tensor.data_ptr() == 0:
        return 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.element_size()) * (tensor.numel() if span == tensor.numel() else 1)
