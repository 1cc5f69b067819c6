"""Comparing outputs: numbers that are not finite are looked for once over the memory, and looked at only where there are some."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autosched.runtime.numerics import compare

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2, torch.complex64])
@pytest.mark.parametrize(
    ("output", "reference", "reason"),
    [
        ([1.0, 2.0], [1.0, 2.0], ""),
        ([1.0, NAN, -INF], [1.0, NAN, -INF], ""),
        ([1.0, NAN], [1.0, 2.0], "NaN in other places"),
        ([1.0, 2.0], [1.0, NAN], "NaN in other places"),
        ([1.0, INF], [1.0, 2.0], "infinities in other places"),
        ([1.0, 2.0], [1.0, INF], "infinities in other places"),
        ([1.0, INF], [1.0, -INF], "infinities in other places"),
        ([4.0, NAN, INF], [1.0, NAN, INF], "4 where the reference has 1"),
        ([INF, NAN, 1.0], [INF, NAN, 3.0], "1 where the reference has 3"),
    ],
)
def test_what_is_not_finite_must_be_in_the_same_places(
    output: list[float], reference: list[float], reason: str, dtype: torch.dtype
) -> None:
    given, wanted = (torch.tensor(items, dtype=torch.float64).to(dtype) for items in (output, reference))
    found = compare([given], [wanted])
    assert found.within_tolerance is not bool(reason)
    assert reason in found.reason


class _Asked(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_finite_outputs_are_not_searched_for_what_is_not() -> None:
    """Where a model has many outputs, a cache say, half of what comparing them took went to that."""
    wanted = torch.randn(2, 3000)
    given = wanted + 1e-7 * torch.randn(2, 3000)
    with _Asked() as asked:
        assert compare([given], [wanted]).within_tolerance
    assert "aten::aminmax" in asked.names
    assert not {"aten::isinf", "aten::isnan", "aten::isfinite"} & set(asked.names)
    assert asked.names.count("aten::ne") == 0  # what isnan is made of
