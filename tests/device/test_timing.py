"""Statements from raw times: what must hold for any samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from autosched.core.errors import UsageError
from autosched.device.timing import Ratio, beyond_noise, is_unstable, noise_floor_pct, paired_ratio, summarize

times = st.lists(st.floats(1.0, 1e6, allow_nan=False), min_size=1, max_size=60)
quick = settings(deadline=None, derandomize=True, max_examples=60)


@quick
@given(times)
def test_figures_are_in_order_and_among_the_samples(values: list[float]) -> None:
    found = summarize(values)
    assert found.min_us == min(values)
    assert found.count == len(values)
    assert found.min_us <= found.ci_low_us <= found.median_us <= found.ci_high_us <= max(values)
    assert found.ci_low_us in values
    assert found.ci_high_us in values
    assert found.median_us == pytest.approx(float(np.median(values)))


@quick
@given(times, st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(values: list[float], shuffler: object) -> None:
    shuffled = list(values)
    shuffler.shuffle(shuffled)  # type: ignore[attr-defined]
    assert summarize(shuffled) == summarize(values)


@quick
@given(times, st.floats(0.01, 100.0))
def test_a_ratio_scales_and_an_equal_column_is_one(values: list[float], factor: float) -> None:
    scaled = paired_ratio([value * factor for value in values], values)
    for figure in (scaled.ratio, scaled.ci_low, scaled.ci_high):
        assert figure == pytest.approx(factor)
    assert noise_floor_pct(values, values) == 0.0


@quick
@given(times)
def test_the_other_way_round_a_ratio_is_the_reciprocal(values: list[float]) -> None:
    other = values[1:] + values[:1]
    found, back = paired_ratio(values, other), paired_ratio(other, values)
    assert found.ci_low <= found.ratio * (1 + 1e-12)
    assert found.ratio <= found.ci_high * (1 + 1e-12)
    assert (back.ratio, back.ci_low, back.ci_high) == pytest.approx((1 / found.ratio, 1 / found.ci_high, 1 / found.ci_low))


def paces(kind: str, turns: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """What the machine takes for one and the same work in so many turns, one after another."""
    slow = np.zeros(turns, dtype=bool)
    if kind != "quiet":
        # A neighbour that comes and goes, at work half of the time; it stays for some turns, or for one.
        stays = {"spells": 20.0, "turns": 1.0}.get(kind, 1.0)
        for turn in range(1, turns):
            slow[turn] = slow[turn - 1] if rng.random() > 0.5 / stays else not slow[turn - 1]
    drift = np.exp(np.cumsum(0.03 * rng.standard_normal(turns))) if kind == "drift" else 1.0
    return np.exp(0.02 * rng.standard_normal(turns)) * np.where(slow & (kind != "drift"), 1.6, 1.0) * drift


@pytest.mark.parametrize("rounds", [15, 40])
@pytest.mark.parametrize("kind", ["quiet", "drift", "spells", "turns"])
def test_equal_schedules_are_told_apart_one_time_in_twenty_at_the_most_whatever_the_machine_does(kind: str, rounds: int) -> None:
    rng = np.random.default_rng(rounds)
    repeats, told_apart, claimed = 400, 0, 0
    for _ in range(repeats):
        in_time = paces(kind, 4 * rounds, rng).reshape(rounds, 4)
        # Each round has its own order.
        first, again, other, _ = rng.permuted(in_time, axis=1).T.tolist()
        found = paired_ratio(other, first)
        told_apart += not found.ci_low <= 1.0 <= found.ci_high
        claimed += beyond_noise(found, noise_floor_pct(first, again))
    assert told_apart / repeats <= 0.07  # four standard errors above what the ranks promise
    assert claimed / repeats <= 0.02


def test_what_two_paces_of_the_machine_do_to_single_columns_cancels_in_pairs() -> None:
    rng = np.random.default_rng(8)
    in_time = 1000.0 * paces("spells", 160, rng).reshape(40, 4)
    in_time[:, 1] *= 0.95
    base, faster, again, _ = in_time.T.tolist()
    assert beyond_noise(paired_ratio(faster, base), noise_floor_pct(base, again))


@pytest.mark.parametrize("count", [6, 9, 15, 31, 200, 1500])
def test_the_interval_of_the_median_covers_at_least_its_promise(count: int) -> None:
    rng = np.random.default_rng(count)
    hits = 0
    for _ in range(400):
        found = summarize((100.0 + rng.exponential(10.0, size=count)).tolist())
        hits += found.ci_low_us <= 100.0 + 10.0 * math.log(2.0) <= found.ci_high_us
    assert hits / 400 >= 0.92


def test_drift_cancels_in_pairs() -> None:
    rng = np.random.default_rng(1)
    drift = np.linspace(1.0, 2.0, 40)
    base = 100.0 * drift * rng.normal(1.0, 0.003, 40)
    faster = 98.0 * drift * rng.normal(1.0, 0.003, 40)
    found = paired_ratio(faster.tolist(), base.tolist())
    assert found.ci_high < 1.0
    assert found.ratio == pytest.approx(0.98, abs=0.03)


def test_noise_says_nothing() -> None:
    rng = np.random.default_rng(3)
    found = paired_ratio(rng.normal(100, 5, 30).tolist(), rng.normal(100, 5, 30).tolist())
    assert found.ci_low < 1.0 < found.ci_high


def test_more_noise_raises_the_floor() -> None:
    rng = np.random.default_rng(5)
    floors = [noise_floor_pct(rng.normal(100, s, 40).tolist(), rng.normal(100, s, 40).tolist()) for s in (0.1, 1, 10)]
    assert floors == sorted(floors)
    assert floors[0] < 1 < floors[2]


def test_unstable_is_said_of_jitter_and_of_a_step_but_not_of_calm() -> None:
    rng = np.random.default_rng(7)
    calm = rng.normal(100, 1, 30)
    assert not is_unstable(calm.tolist())
    assert is_unstable(rng.uniform(50, 200, 12).tolist())
    assert is_unstable((calm * np.where(np.arange(30) < 15, 1.0, 2.0)).tolist())
    assert not is_unstable((calm * np.where(np.arange(30) < 15, 1.0, 1.1)).tolist())  # ratios of rounds stand a small one
    assert not is_unstable([*calm.tolist(), 500.0])  # one outlier is what medians are for


@pytest.mark.parametrize("bad", [[], [math.nan], [math.inf, 1.0], [0.0], [-1.0, 2.0]])
def test_impossible_times_are_refused(bad: list[float]) -> None:
    with pytest.raises(UsageError):
        summarize(bad)
    with pytest.raises(UsageError):
        is_unstable(bad)


def test_columns_of_different_length_are_no_pairs() -> None:
    with pytest.raises(UsageError, match="2 and 1"):
        paired_ratio([1.0, 2.0], [1.0])


@quick
@given(st.floats(0.2, 5.0), st.floats(0.0, 0.3), st.floats(0.0, 30.0))
def test_what_may_be_claimed_is_beyond_the_floor_and_the_interval_whichever_is_faster(ratio: float, spread: float, floor: float) -> None:
    found = Ratio(ratio, ratio * (1 - spread), ratio * (1 + spread), 40)
    mirrored = Ratio(1 / ratio, 1 / found.ci_high, 1 / found.ci_low, 40)
    claimed = beyond_noise(found, floor)
    if abs(100 * (1 - min(ratio, 1 / ratio)) - floor) > 1e-9:
        assert beyond_noise(mirrored, floor) == claimed
    if claimed:
        assert not found.ci_low <= 1.0 <= found.ci_high
        assert max(ratio, 1 / ratio) - 1 > floor / 100
    assert not beyond_noise(found, 100.0)
