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


@pytest.mark.parametrize(
    ("dtype", "relative", "of_scale"),
    [
        (torch.float64, 1e-7, 1e-8),
        (torch.complex128, 1e-7, 1e-8),
        (torch.float32, 1e-3, 1e-4),
        (torch.complex64, 1e-3, 1e-4),
        (torch.float16, 1e-2, 5e-3),
        (torch.complex32, 1e-2, 5e-3),
        (torch.bfloat16, 8e-2, 4e-2),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("at", [0.0, 2.0, -4.0])
def test_how_far_a_number_may_be_off(dtype: torch.dtype, relative: float, of_scale: float, at: float) -> None:
    reference = torch.tensor([4.0, at], dtype=torch.float64)
    limit = relative * abs(at) + of_scale * 4.0
    for share, within in ((0.85, True), (1.2, False)):
        off = reference + torch.tensor([0.0, share * limit], dtype=torch.float64)
        assert compare([off.to(dtype)], [reference.to(dtype)]).within_tolerance is within


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz])
def test_eight_bits_may_be_one_step_apart(dtype: torch.dtype) -> None:
    one = torch.tensor([1.0, 1.0, -1.0]).to(dtype)
    bits = one.view(torch.uint8)
    for steps, within in ((0, True), (1, True), (2, False)):
        off = torch.tensor([bits[0], bits[1] + steps, bits[2]], dtype=torch.uint8).view(dtype)
        assert compare([off], [one]).within_tolerance is within


def test_powers_of_two_must_be_equal() -> None:
    one = torch.tensor([127, 127], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    other = torch.tensor([127, 128], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert compare([one], [one.clone()]).bitwise
    assert not compare([other], [one]).within_tolerance


_LONG = (1 << 20) + 5  # more than is compared at a time


def test_of_a_large_output_every_part_is_compared() -> None:
    reference = torch.ones(_LONG)
    assert compare([reference.clone()], [reference]).bitwise
    for place in (0, (1 << 20) - 1, 1 << 20, _LONG - 1):
        off = reference.clone()
        off[place] += 0.5
        found = compare([off], [reference])
        assert not found.within_tolerance
        assert not found.bitwise
        assert found.max_abs_error == 0.5
        assert "1.5 where the reference has 1 (torch.float32)" in found.reason


def test_the_scale_of_a_large_output_is_that_of_all_its_parts() -> None:
    for large, small in ((0, _LONG - 1), (_LONG - 1, 0)):
        reference = torch.zeros(_LONG)
        reference[large] = 1000.0
        off = reference.clone()
        off[small] = 0.05
        assert compare([off], [reference]).within_tolerance
        off[small] = 0.2
        assert not compare([off], [reference]).within_tolerance


def test_the_reason_names_what_is_farthest_beyond_its_limit() -> None:
    reference = torch.ones(_LONG)
    for farthest, near in ((0, _LONG - 1), (_LONG - 1, 0)):
        off = reference.clone()
        off[farthest], off[near] = 3.0, 2.0
        found = compare([off], [reference])
        assert found.max_abs_error == 2.0
        assert found.reason == "output 0: 3 where the reference has 1 (torch.float32)"


def test_what_is_not_finite_is_looked_for_in_every_part() -> None:
    reference = torch.ones(_LONG)
    for place in (0, _LONG - 1):
        off, wanted = reference.clone(), reference.clone()
        off[place] = NAN
        assert not compare([off], [reference]).within_tolerance
        wanted[place] = NAN
        assert compare([off + 1e-6], [wanted]).within_tolerance


def test_integers_far_apart_say_how_far() -> None:
    reference = torch.ones(_LONG, dtype=torch.int64)
    for place in (0, _LONG - 1):
        off = reference.clone()
        off[place] = 8
        found = compare([off], [reference])
        assert (found.within_tolerance, found.bitwise, found.max_abs_error) == (False, False, 7.0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_integers_that_floats_cannot_tell_apart_must_be_equal_too(dtype: torch.dtype) -> None:
    one, other = (torch.tensor([number], dtype=dtype) for number in (2**60, 2**60 + 1))
    assert compare([one], [one.clone()]).bitwise
    assert not compare([other], [one]).within_tolerance


def test_an_output_of_nothing_but_other_bits_of_no_number_agrees() -> None:
    one = torch.tensor([NAN, NAN])
    other = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)
    found = compare([other], [one])
    assert (found.within_tolerance, found.bitwise, found.max_abs_error) == (True, False, 0.0)


def test_outputs_are_compared_place_by_place_however_they_lie_in_memory() -> None:
    reference = torch.arange(24.0).reshape(4, 6)
    turned = reference.t().contiguous().t()
    assert turned.stride() != reference.stride()
    for output, wanted in ((turned, reference), (reference, turned), (reference.expand(2, 4, 6), turned.expand(2, 4, 6))):
        assert compare([output], [wanted]).bitwise
    assert not compare([reference.t().contiguous().view(4, 6)], [reference]).within_tolerance


def test_a_conjugate_is_compared_as_what_it_is() -> None:
    given = torch.tensor([1 + 2j, 3 - 4j])
    assert compare([given.conj()], [torch.tensor([1 - 2j, 3 + 4j])]).bitwise
    assert compare([torch.tensor([1 - 2j, 3 + 4j])], [given.conj()]).bitwise
    assert not compare([given.conj()], [given]).within_tolerance


def test_of_several_outputs_all_must_agree_and_the_first_that_does_not_is_named() -> None:
    right, wrong, near = torch.ones(3), torch.ones(3) * 2, torch.ones(3) + 1e-5
    found = compare([right, wrong, wrong * 2, near], [right] * 4)
    assert (found.within_tolerance, found.bitwise, found.max_abs_error) == (False, False, 3.0)
    assert found.reason == "output 1: 2 where the reference has 1 (torch.float32)"
    almost = compare([near, right], [right, right])
    assert (almost.within_tolerance, almost.bitwise, almost.reason) == (True, False, "")
    assert 0.0 < almost.max_abs_error < 2e-5


def test_an_output_that_cannot_be_compared_is_infinitely_far() -> None:
    whole = torch.ones(3)
    for outputs in ([], [whole, whole], [whole[:2]], [whole.double()]):
        found = compare(outputs, [whole])
        assert (found.within_tolerance, found.bitwise, found.max_abs_error) == (False, False, INF)
        assert found.reason


def test_where_factors_were_rounded_float32_is_judged_as_what_they_were_rounded_to() -> None:
    reference = torch.tensor([1.0, 4.0])
    off = torch.tensor([1.02, 4.0])
    assert not compare([off], [reference]).within_tolerance
    assert compare([off], [reference], rounded=torch.float16).within_tolerance
    assert compare([off * 1.05], [reference], rounded=torch.bfloat16).within_tolerance
    # Of other dtypes nothing was rounded.
    assert not compare([off.double()], [reference.double()], rounded=torch.float16).within_tolerance
    assert not compare([torch.tensor([3])], [torch.tensor([4])], rounded=torch.float16).within_tolerance


def test_ways_of_another_number_of_outputs_are_no_ways_of_these() -> None:
    reference, off = torch.tensor([1.0, 4.0]), torch.tensor([1.05, 4.0])
    assert compare([off], [reference], coarsest=[torch.bfloat16]).within_tolerance
    assert not compare([off], [reference], coarsest=[torch.bfloat16, torch.bfloat16]).within_tolerance
