"""From pairs to three and more at once: slowdowns add their excess over 1, by who started first.

*Source:* exact for processor sharing: ``k`` equal kernels that each fill a resource then take ``k`` times as long, where a product of
pair slowdowns would say ``2 ** (k - 1)`` and a maximum 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autosched.costmodel.model import Floats


def finish_times(solo_us: Sequence[float], first: Floats, last: Floats) -> Floats:
    """When each of ``k`` operators is done that all start at once, in the order given: float64 ``[k]``, microseconds.

    Args:
        solo_us: times alone.
        first: float64 ``[k, k]``; ``[i, j]`` is i's slowdown beside j when i started first (used for ``i < j``).
        last: float64 ``[k, k]``; ``[i, j]`` is i's slowdown beside j when i started last (used for ``i > j``).
    """
    count = len(solo_us)
    left = np.asarray(solo_us, dtype=np.float64).copy()
    excess = np.where(np.arange(count)[:, None] < np.arange(count)[None, :], first, last) - 1.0
    np.fill_diagonal(excess, 0.0)
    finish = np.zeros(count)
    active = np.ones(count, dtype=np.bool_)
    now = 0.0
    while active.any():
        rate = 1.0 / (1.0 + excess @ active)
        waits = np.where(active, left / rate, np.inf)
        step = float(waits.min())
        now += step
        left = np.where(active, left - step * rate, 0.0)
        ended = active & (waits <= step * (1.0 + 1e-12))
        finish[ended] = now
        active &= ~ended
    return finish
