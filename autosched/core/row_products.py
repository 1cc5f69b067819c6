"""Which calls are products of a single row with a matrix: their time is that of reading the matrix once, on whatever reads it.

On a CPU no library does that well: PyTorch's own product reads it on one thread, oneDNN shares the outputs among threads in blocks that
are too few and pays about 10 us to be called. What Inductor writes of the same product as sums reads it on every thread, as fast as the
memory gives it, and as it is stored: nothing is packed. *Source:* our own measurements, ``experiments/packing.py``.
"""

from __future__ import annotations

import math

from autosched.core.graph import TensorSpec

LINEAR = "aten::linear.default"
_DTYPES = frozenset({"float32", "float64", "bfloat16", "float16"})


def is_row_product(target: str, source: TensorSpec, weight: TensorSpec, bias: TensorSpec | None) -> bool:
    """Whether a call is ``source [.., inputs] @ weight [outputs, inputs].T (+ bias [outputs])`` with one row.

    Args:
        target: of the call, ``namespace::name.overload``; only ``aten::linear.default`` may be one.
        source, weight, bias: its tensors, of one dtype; the rows of ``weight`` must lie one after the other in memory.
    """
    if target != LINEAR or source.dtype not in _DTYPES or weight.dtype != source.dtype:
        return False
    if len(weight.shape) != 2 or not source.shape or weight.strides != (weight.shape[1], 1):
        return False
    if bias is not None and (bias.dtype != source.dtype or bias.shape != weight.shape[:1]):
        return False
    return weight.elements > 0 and math.prod(source.shape[:-1]) == 1
