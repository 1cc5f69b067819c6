"""Composing pair slowdowns to three and more: additive excess, who started first, and cores that no pair misses."""

from __future__ import annotations

import numpy as np
import pytest

from autosched.costmodel.composition import finish_times

NONE = np.ones((3, 3))


def test_equal_kernels_that_fill_a_resource_take_turns() -> None:
    twice = np.full((3, 3), 2.0)
    assert finish_times([10.0, 10.0, 10.0], twice, twice).tolist() == pytest.approx([30.0, 30.0, 30.0])


def test_without_interference_everyone_takes_its_own_time() -> None:
    assert finish_times([10.0, 20.0, 30.0], NONE, NONE).tolist() == [10.0, 20.0, 30.0]


def test_who_started_first_is_slowed_by_the_first_matrix() -> None:
    first, last = NONE.copy(), np.full((3, 3), 24.0)
    done = finish_times([10.0, 10.0, 10.0], first, last)
    assert done[0] == pytest.approx(10.0)
    assert done[1] > done[0]


def test_three_lanes_on_two_cores_share_what_two_need_not() -> None:
    done = finish_times([10.0, 10.0, 10.0], NONE, NONE, cores=2)
    assert done.tolist() == pytest.approx([15.0, 15.0, 15.0])
    assert finish_times([10.0, 10.0, 10.0], NONE, NONE, cores=3).tolist() == [10.0, 10.0, 10.0]


def test_sharing_that_pairs_have_measured_is_not_counted_again() -> None:
    # A wide one beside narrow ones: each pair already takes 1.5 times as long on two cores.
    pairs = np.full((3, 3), 1.5)
    done = finish_times([10.0, 10.0, 10.0], pairs, pairs, widths=(2, 1, 1), cores=2)
    assert done.max() == pytest.approx(10.0 * 2.0 * (4 / 2) / (3 / 2))
