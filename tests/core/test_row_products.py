"""Which calls are products of one row with a matrix."""

from __future__ import annotations

import pytest

from autosched.core.graph import TensorSpec
from autosched.core.row_products import BATCHED, LINEAR, matrix_of


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
    assert matrix_of(LINEAR, (source, weight, bias)) == (1 if expected else None)
    assert matrix_of("aten::mm.default", (source, weight, bias)) is None


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (spec(3, 4, 8), spec(3, 8, 1), 0),
        (spec(3, 1, 8), spec(3, 8, 4, strides=(32, 1, 8)), 1),
        (spec(3, 4, 8, dtype="float16"), spec(3, 8, 1, dtype="float16"), 0),
        (spec(3, 1, 8), spec(3, 8, 4), None),  # what makes one output is spread
        (spec(3, 4, 8, strides=(32, 1, 4)), spec(3, 8, 1), None),
        (spec(3, 4, 8), spec(3, 8, 2), None),
        (spec(3, 1, 8), spec(3, 8, 1), None),  # no matrix
        (spec(3, 4, 1), spec(3, 1, 1), None),  # no sum
        (spec(0, 4, 8), spec(0, 8, 1), None),
        (spec(3, 4, 8), spec(3, 8, 1, dtype="float64"), None),
    ],
)
def test_a_batch_of_them_has_one_row_or_one_column(first: TensorSpec, second: TensorSpec, expected: int | None) -> None:
    assert matrix_of(BATCHED, (first, second)) == expected
