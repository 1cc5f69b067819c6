"""Which calls are products of a matrix with a single row: their time is that of reading the matrix once, on whatever reads it.

On a CPU no library does that well: PyTorch's own product reads it on one thread, oneDNN shares the outputs among threads in blocks that
are too few and pays about 10 us to be called. What Inductor writes of the same product as sums reads it on every thread, as fast as the
memory gives it, and as it is stored: nothing is packed. *Source:* our own measurements, ``experiments/packing.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autosched.core.graph import TensorSpec

LINEAR = "aten::linear.default"
BATCHED = "aten::bmm.default"
_DTYPES = frozenset({"float32", "float64", "bfloat16", "float16"})


def matrix_of(target: str, tensors: Sequence[TensorSpec | None]) -> int | None:
    """Which of a call's tensors is the matrix; ``None`` if the call is no product of one row.

    That is ``linear(row, matrix, bias)``, or ``bmm`` of one row with each matrix, on either side of it.

    Args:
        target: of the call, ``namespace::name.overload``.
        tensors: its tensor arguments in the order of its schema, all of one dtype; what one output is made of must lie together in the
            matrix.
    """
    given = [spec for spec in tensors if spec is not None]
    if len(given) < 2 or given[0].dtype not in _DTYPES or any(spec.dtype != given[0].dtype for spec in given):
        return None
    first, second = given[0], given[1]
    if target == LINEAR:
        return 1 if _is_linear(first, second, given[2] if len(given) > 2 else None) else None
    if target == BATCHED and len(first.shape) == len(second.shape) == 3 and first.elements and second.elements:
        inputs = first.shape[2]
        if second.shape[2] == 1 < first.shape[1] and first.strides[2:] == (1,) and inputs > 1:
            return 0
        if first.shape[1] == 1 < second.shape[2] and second.strides[1:2] == (1,) and inputs > 1:
            return 1
    return None


def _is_linear(source: TensorSpec, weight: TensorSpec, bias: TensorSpec | None) -> bool:
    if len(weight.shape) != 2 or not source.shape or weight.strides != (weight.shape[1], 1):
        return False
    return (bias is None or bias.shape == weight.shape[:1]) and weight.elements > 0 and math.prod(source.shape[:-1]) == 1
