"""The labels of a pair run: arithmetic on starts and ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosched.core.records import MAX_SLOWDOWN
from autosched.device.cpu_loops import balanced_repeats
from autosched.device.pair_labels import Overlap, directional_slowdowns

lengths = st.floats(1.0, 1e5)
quick = settings(deadline=None, derandomize=True, max_examples=200)


@quick
@given(lengths, lengths, st.floats(0.0, 1.0))
def test_two_that_do_not_disturb_each_other(first_us: float, last_us: float, share: float) -> None:
    begin = share * min(first_us, last_us) * 0.5
    found = directional_slowdowns(Overlap(0.0, first_us, begin, begin + last_us), first_us, last_us)
    assert found == pytest.approx((1.0, 1.0))


@quick
@given(lengths, lengths, st.floats(1.0, 8.0), st.floats(1.0, 8.0))
def test_rates_come_back(first_us: float, last_us: float, slow_first: float, slow_last: float) -> None:
    """Simulate two loops started together at constant rates, the longer alone after the shorter has ended; read the rates back."""
    end_first, end_last = first_us * slow_first, last_us * slow_last
    if end_first <= end_last:
        end_last = end_first + (last_us - end_first / slow_last)
    else:
        end_first = end_last + (first_us - end_last / slow_first)
    found = directional_slowdowns(Overlap(0.0, end_first, 0.0, end_last), first_us, last_us)
    assert found == pytest.approx((slow_first, slow_last), rel=1e-6)


def test_by_the_definition_when_the_first_ends_first() -> None:
    # t'_a = 20, t_a = 10; t'_b = 30, t_b = 20: b did 20 - (30 - 20) = 10 while a ran.
    assert directional_slowdowns(Overlap(0.0, 20.0, 0.0, 30.0), 10.0, 20.0) == (2.0, 2.0)


def test_one_after_the_other_is_the_cap_for_the_last() -> None:
    assert directional_slowdowns(Overlap(0.0, 10.0, 10.0, 30.0), 10.0, 20.0) == (1.0, MAX_SLOWDOWN)


@quick
@given(lengths, lengths, st.floats(1.0, 10.0), lengths, lengths)
def test_any_run_gives_usable_figures(first_us: float, last_us: float, begin_us: float, solo_first_us: float, solo_last_us: float) -> None:
    found = directional_slowdowns(Overlap(0.0, first_us, begin_us, begin_us + last_us), solo_first_us, solo_last_us)
    assert all(figure > 0 for figure in found)
    assert found[1] <= MAX_SLOWDOWN


@quick
@given(st.floats(0.01, 1e6), st.floats(0.01, 1e6))
def test_repeats_balance_within_reason(first_us: float, last_us: float) -> None:
    first, last = balanced_repeats(first_us, last_us)
    assert 1 <= first <= 256
    assert 1 <= last <= 256
    if first < 256 and last < 256:
        longer, shorter = sorted((first * first_us, last * last_us), reverse=True)
        assert shorter >= longer / 2
