"""From raw times to statements: medians with intervals, paired ratios, the noise floor, and whether to believe any of it.

Pure functions of their arguments; nothing in them is random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autosched.core.errors import UsageError
from autosched.core.records import Samples

RESTLESS_PCT = 25.0
"""A median whose interval is wider than this to either side supports no statement."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as long one thing takes as another (1.0 = equal), with its 95 % interval, from ``count`` paired rounds."""

    ratio: float
    ci_low: float
    ci_high: float
    count: int


def summarize(times_us: Sequence[float]) -> Samples:
    """Median, its 95 % interval by order statistics, 95th percentile and minimum.

    Args:
        times_us: at least one finite, positive time in microseconds, each an independent round.

    Raises:
        UsageError: if there is no time, or one is not finite and positive.

    *Source:* the interval is the classic distribution-free one: the number of samples below the median is
    binomial(n, 1/2). With fewer than 6 samples it cannot reach 95 % and is the whole range.

    >>> summarize([3.0, 1.0, 2.0]).median_us
    2.0
    """
    times = np.sort(_checked(times_us))
    low, high = _median_ranks(len(times))
    return Samples(
        median_us=float(np.median(times)),
        ci_low_us=float(times[low]),
        ci_high_us=float(times[high]),
        p95_us=float(np.percentile(times, 95)),
        min_us=float(times[0]),
        count=len(times),
    )


def paired_ratio(times_us: Sequence[float], baseline_us: Sequence[float]) -> Ratio:
    """The median over rounds of ``times_us`` over ``baseline_us``, where entry j of both was taken in round j.

    Within a round the machine goes at one pace, or nearly: what slows it down for some rounds cancels. The ratio of two medians does not
    have that: where a machine goes at two paces, one median may be of the faster and the other of the slower.

    *Source:* the interval is that of :func:`summarize`: it holds for independent rounds however they are distributed.

    Raises:
        UsageError: if the lengths differ or a time is not finite and positive.

    >>> paired_ratio([20.0, 60.0, 22.0], [10.0, 30.0, 11.0]).ratio
    2.0
    """
    above, below = _checked(times_us), _checked(baseline_us)
    if len(above) != len(below):
        raise UsageError(f"paired times have {len(above)} and {len(below)} rounds; expected the same number")
    ratios = np.sort(above / below)
    low, high = _median_ranks(len(ratios))
    # The geometric mean of the two in the middle, so that the other way round everything is the reciprocal.
    middle = math.sqrt(ratios[(len(ratios) - 1) // 2] * ratios[len(ratios) // 2])
    return Ratio(middle, float(ratios[low]), float(ratios[high]), len(ratios))


def noise_floor_pct(first_us: Sequence[float], again_us: Sequence[float]) -> float:
    """What two measurements of one and the same thing may differ by, in percent: an A/A test.

    The larger distance from 1 of the 95 % interval of their paired ratio: a difference below it says nothing.

    Raises:
        UsageError: as :func:`paired_ratio`.
    """
    ratio = paired_ratio(first_us, again_us)
    return 100.0 * max(ratio.ci_high - 1.0, 1.0 - ratio.ci_low, 0.0)


def beyond_noise(ratio: Ratio, noise_pct: float) -> bool:
    """Whether a difference may be claimed: the interval of ``ratio`` excludes 1, and the faster one takes less time by more than the floor.

    >>> beyond_noise(Ratio(1.122, 1.034, 1.171, 40), 13.6), beyond_noise(Ratio(0.85, 0.80, 0.90, 40), 13.6)
    (False, True)
    """
    excludes_one = ratio.ci_high < 1.0 or ratio.ci_low > 1.0
    return excludes_one and 100.0 * (1.0 - min(ratio.ratio, 1.0 / ratio.ratio)) > noise_pct


def is_unstable(times_us: Sequence[float]) -> bool:
    """Whether a measurement is too restless for any statement.

    True if the median's 95 % interval is wider than ``RESTLESS_PCT`` percent of the median to either side, or the medians of
    its first and second half differ by more than twice that (a clock step, a neighbour that came or went).

    Raises:
        UsageError: if a time is not finite and positive.
    """
    times = _checked(times_us)
    samples = summarize(times_us)
    allowed_us = samples.median_us * RESTLESS_PCT / 100.0
    if samples.ci_high_us - samples.median_us > allowed_us or samples.median_us - samples.ci_low_us > allowed_us:
        return True
    half = len(times) // 2
    return half >= 3 and abs(float(np.median(times[:half]) - np.median(times[half:]))) > 2 * allowed_us


def _checked(times_us: Sequence[float]) -> NDArray[np.float64]:
    times = np.asarray(times_us, dtype=np.float64)
    if times.ndim != 1 or times.size == 0 or not np.isfinite(times).all() or (times <= 0).any():
        raise UsageError(f"times in microseconds are {list(times_us)[:8]}; expected a list of finite, positive numbers, at least one")
    return times


@lru_cache(maxsize=1024)
def _median_ranks(count: int) -> tuple[int, int]:
    """0-based ranks whose order statistics bound the median with at least 95 % where that is possible."""
    if count > 1000:
        spread = 0.98 * count**0.5  # normal approximation of binomial(n, 1/2): 1.96 * sqrt(n) / 2
        return max(0, int(count / 2 - spread)), min(count - 1, int(count / 2 + spread) + 1)
    allowed = 2**count * 25 // 1000  # a tail of 2.5 % on either side
    below = 0
    rank = 0
    while rank <= (count - 1) // 2 and below + math.comb(count, rank) <= allowed:
        below += math.comb(count, rank)
        rank += 1
    rank = max(0, rank - 1)
    return rank, count - 1 - rank
