"""Operations of calls that are counted by their parts: each is counted once, and none for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosched.capture import flops
from autosched.core.graph import TensorSpec


def of_linear(rows: int, inputs: int, outputs: int) -> int:
    x, weight = torch.empty(rows, inputs, device="meta"), torch.empty(outputs, inputs, device="meta")
    made = TensorSpec((rows, outputs), "float32", (outputs, 1))
    return flops.count_flops(torch.ops.aten.linear.default, [x, weight], {}, [made])


def test_equal_calls_are_counted_once_and_others_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve layers that are alike took a millisecond for each call, in every lowering."""
    counted: list[object] = []
    parts = flops._parts_flops

    def count(*call: Any) -> int:
        counted.append(call)
        return parts(*call)

    monkeypatch.setattr(flops, "_counted", {})
    monkeypatch.setattr(flops, "_parts_flops", count)
    assert [of_linear(3, 5, 7) for _ in range(4)] == [2 * 3 * 5 * 7] * 4
    assert of_linear(3, 7, 5) == 2 * 3 * 7 * 5
    assert of_linear(2, 5, 7) == 2 * 2 * 5 * 7
    assert len(counted) == 3


def test_what_is_known_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "_counted", {})
    monkeypatch.setattr(flops, "_MOST_COUNTED", 4)
    assert [of_linear(rows, 2, 2) for rows in range(1, 20)] == [8 * rows for rows in range(1, 20)]
    assert len(flops._counted) <= 4


def test_arguments_that_are_equal_but_for_their_type_are_told_apart() -> None:
    forms = {flops._form(item) for item in (1, 1.0, True, [1], [1.0], torch.float32, None)}
    assert len(forms) == 7
    wide, narrow = torch.empty(2, 3, device="meta"), torch.empty(2, 3, dtype=torch.float16, device="meta")
    assert len({flops._form(item) for item in (wide, narrow, wide.t(), [wide], [wide, wide])}) == 5
