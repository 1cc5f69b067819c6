"""Which tensors share bytes: by the addresses they reach from, to, as two storages may begin in one array of NumPy's; and by storage."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate

import torch

Extent = tuple[int, int]
"""Address of the first byte of a tensor, and of the one behind its last; of two columns of one table these overlap, too."""


def extent_of(tensor: torch.Tensor) -> Extent:
    """Where a strided tensor lies; ``(0, 0)`` for an empty one, or one that is not strided."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return 0, 0
    start = tensor.data_ptr()
    return start, start + reach_of(tensor.shape, tensor.stride(), tensor.element_size())


def reach_of(shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> int:
    """Bytes from the first of a strided tensor to the one behind its last; 0 for an empty one.

    >>> reach_of((2, 3), (4, 1), 4), reach_of((), (), 8), reach_of((0, 3), (3, 1), 4)
    (28, 8, 0)
    """
    if 0 in shape:
        return 0
    return element_bytes * (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)))


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements share memory as those of an expanded tensor do: nothing can be copied into it element by element.

    >>> overlaps_itself((4, 3), (0, 1)), overlaps_itself((1, 3), (0, 1)), overlaps_itself((4, 0), (0, 1))
    (True, False, False)
    """
    return 0 not in shape and any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True))


def storage_of(tensor: torch.Tensor) -> Hashable:
    """What is equal for two tensors of one storage while both live, and for no others."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        # Opaque layouts have no storage to name.
        return "opaque", id(tensor)


def storage_address(tensor: torch.Tensor) -> int:
    """Where a tensor's storage begins; 0 for none, or what PyTorch does not tell."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def lie_alike(shape: Sequence[int], first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether strides put the elements of ``shape`` in the same places; those of dimensions with one element do not count.

    >>> lie_alike((4, 1), (1, 1), (1, 4)), lie_alike((4, 2), (2, 1), (1, 4))
    (True, False)
    """
    return all(size == 1 or one == other for size, one, other in zip(shape, first, second, strict=True))


def overlap(first: Extent, second: Extent) -> bool:
    """Whether two extents share an address.

    >>> overlap((0, 8), (4, 12)), overlap((0, 8), (8, 12)), overlap((4, 4), (0, 8))
    (True, False, False)
    """
    return first[0] < second[1] and second[0] < first[1] and first[0] < first[1] and second[0] < second[1]


class Extents:
    """Many extents, asked one question at a time.

    >>> Extents([(0, 100), (10, 20), (200, 300)]).meets((50, 60))
    True
    """

    __slots__ = ("_farthest", "_starts")

    def __init__(self, extents: Iterable[Extent]) -> None:
        ordered = sorted(item for item in extents if item[0] < item[1])
        self._starts = [start for start, _ in ordered]
        # How far any that starts no later reaches.
        self._farthest = list(accumulate((end for _, end in ordered), max))

    def meets(self, extent: Extent) -> bool:
        """Whether one of them shares an address with ``extent``."""
        before = bisect_left(self._starts, extent[1])
        return extent[0] < extent[1] and before > 0 and self._farthest[before - 1] > extent[0]
