"""Which calls are products of one row with a matrix."""

from __future__ import annotations

import pytest

from autosched.core.graph import TensorSpec
from autosched.core.row_products import LINEAR, is_row_product


def spec(*shape: int, dtype: str = "float32", strides: tuple[int, ...] | None = None) -> TensorSpec:
    dense = tuple(int(size) for size in _dense(shape))
    return TensorSpec(shape, dtype, strides if strides is not None else dense)


def _dense(shape: tuple[int, ...]) -> list[int]:
    made, step = list[int](), 1
    for size in reversed(shape):
        made.insert(0, step)
        step *= size
    return made


@pytest.mark.parametrize(
    ("source", "weight", "bias", "expected"),
    [
        (spec(1, 8), spec(4, 8), None, True),
        (spec(8), spec(4, 8), spec(4), True),
        (spec(1, 1, 8), spec(4, 8), spec(4), True),
        (spec(1, 8, dtype="bfloat16"), spec(4, 8, dtype="bfloat16"), None, True),
        (spec(2, 8), spec(4, 8), None, False),
        (spec(1, 3, 8), spec(4, 8), None, False),
        (spec(1, 8), spec(4, 8, strides=(1, 4)), None, False),  # stored by inputs
        (spec(1, 8), spec(4, 8, strides=()), None, False),  # packed
        (spec(1, 8), spec(8), None, False),
        (spec(1, 8), spec(4, 8), spec(1), False),
        (spec(1, 8), spec(4, 8), spec(4, dtype="float64"), False),
        (spec(1, 8, dtype="bfloat16"), spec(4, 8), None, False),
        (spec(1, 8, dtype="int8"), spec(4, 8, dtype="int8"), None, False),
        (spec(0, 8), spec(4, 8), None, False),
        (spec(1, 0), spec(4, 0), None, False),
    ],
)
def test_one_row_and_a_matrix_of_its_dtype(source: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, expected: bool) -> None:
    assert is_row_product(LINEAR, source, weight, bias) is expected
    assert not is_row_product("aten::mm.default", source, weight, bias)
