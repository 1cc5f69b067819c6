"""Random schedules, the best kept (:mod:`autosched.search.random_search`)."""

from __future__ import annotations

import numpy as np

from autosched.search.compiled.cache import ARRAYS, F1, I1, SPACE, compiled
from autosched.search.compiled.copy_rows import copy_rows
from autosched.search.compiled.fluid import evaluate
from autosched.search.compiled.lanes import is_wide
from autosched.search.compiled.splitmix import next_uniform


@compiled(f"void({ARRAYS},i8,i4[:,::1],i4[:,::1],{F1},{I1},i8,u8[::1],{SPACE})")
def random_schedules(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency,
    lanes, current, best, value, widths, trials, random_state, lane_times, lane_numbers, times, links,
):  # fmt: skip
    """Draw ``trials`` schedules and keep the best: each next operator from all that are ready, lanes and widths uniformly.

    Args:
        pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency: ``Problem.arrays``.
        lanes: lane slots.
        current, best: int32 ``[5, n]``: launch order, scratch, lane, width index, extra wait (-1). ``best`` is updated.
        value: float64 ``[1]``: makespan of ``best``, microseconds. Updated.
        widths: allowed width indices.
        trials: how many.
        random_state: uint64 ``[1]``.
        lane_times, lane_numbers, times, links: as in ``evaluate``.
    """
    count = kernel.shape[0]
    no_bound = np.zeros(count, dtype=np.float64)
    pending = np.empty(count, dtype=np.int32)
    ready = np.empty(count, dtype=np.int32)
    for _ in range(trials):
        waiting = 0
        for index in range(count):
            pending[index] = pred_ptr[index + 1] - pred_ptr[index]
            current[2, index] = int(next_uniform(random_state) * lanes)
            current[3, index] = widths[int(next_uniform(random_state) * widths.shape[0])]
            if is_wide(current[3, index], latency):
                current[2, index] = 0  # as it is exported (``Problem.schedule``)
            current[4, index] = -1
            if pending[index] == 0:
                ready[waiting] = index
                waiting += 1
        for place in range(count):
            chosen = int(next_uniform(random_state) * waiting)
            index = ready[chosen]
            waiting -= 1
            ready[chosen] = ready[waiting]
            current[0, place] = index
            for edge in range(succ_ptr[index], succ_ptr[index + 1]):
                after = succ_idx[edge]
                pending[after] -= 1
                if pending[after] == 0:
                    ready[waiting] = after
                    waiting += 1
        makespan = evaluate(
            pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency,
            current[0], current[2], current[3], current[4], no_bound, value[0], -1, lane_times, lane_numbers, times, links,
        )  # fmt: skip
        if makespan < value[0]:
            value[0] = makespan
            copy_rows(best, current)
