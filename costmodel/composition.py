"""From pairs to three and more at once: slowdowns add their excess over 1, by who started first.

*Source:* exact for processor sharing: ``k`` equal kernels that each fill a resource then take ``k`` times as long, where a product of
pair slowdowns would say ``2 ** (k - 1)`` and a maximum 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autosched.costmodel.model import Floats


def finish_times(
    solo_us: Sequence[float], first: Floats, last: Floats, *, widths: Sequence[int] | None = None, cores: float = math.inf
) -> Floats:
    """When each of ``k`` operators is done that all start at once, in the order given: float64 ``[k]``, microseconds.

    Args:
        solo_us: times alone.
        first: float64 ``[k, k]``; ``[i, j]`` is i's slowdown beside j when i started first (used for ``i < j``).
        last: float64 ``[k, k]``; ``[i, j]`` is i's slowdown beside j when i started last (used for ``i > j``).
        widths: threads of each; one by default.
        cores: CPU cores that the threads share; where three or more operators lack cores that any two of them have, all run slower
            by that (processor sharing). Infinite on a device that has no such limit.
    """
    count = len(solo_us)
    threads = np.asarray(widths if widths is not None else [1] * count, dtype=np.float64)
    left = np.asarray(solo_us, dtype=np.float64).copy()
    excess = np.where(np.arange(count)[:, None] < np.arange(count)[None, :], first, last) - 1.0
    np.fill_diagonal(excess, 0.0)
    finish = np.zeros(count)
    active = np.ones(count, dtype=np.bool_)
    now = 0.0
    while active.any():
        rate = 1.0 / ((1.0 + excess @ active) * _unseen_sharing(threads[active], cores))
        waits = np.where(active, left / rate, np.inf)
        step = float(waits.min())
        now += step
        left = np.where(active, left - step * rate, 0.0)
        ended = active & (waits <= step * (1.0 + 1e-12))
        finish[ended] = now
        active &= ~ended
    return finish


def _unseen_sharing(threads: Floats, cores: float) -> float:
    """Threads over cores, as far as no pair among them could show it; at least 1."""
    two_widest = float(np.sort(threads)[-2:].sum())
    return max(1.0, float(threads.sum()) / cores) / max(1.0, two_widest / cores)
