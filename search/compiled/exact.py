"""Every schedule of a small graph (:mod:`autosched.search.exact`)."""

from __future__ import annotations

import numpy as np

from autosched.search.compiled.cache import ARRAYS, F1, I1, SPACE, compiled
from autosched.search.compiled.fluid import evaluate
from autosched.search.compiled.layout import UNREACHED


@compiled(f"void({ARRAYS},i8,{I1},{I1},{I1},{I1},{SPACE},{I1},i8,{F1})")
def enumerate_schedules(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency,
    lanes, best_order, best_lane, width_index, wait, lane_times, lane_numbers, times, links, stack, most, result,
):  # fmt: skip
    """Simulate every launch order with every assignment to alike lanes, depth first.

    Args:
        pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency: ``Problem.arrays``.
        lanes: lane slots.
        best_order, best_lane: int32 ``[n]``, overwritten with the best schedule.
        width_index, wait, lane_times, lane_numbers, times, links: as in ``evaluate``.
        stack: int32 ``[6 n + 2]``, overwritten.
        most: most evaluations.
        result: float64 ``[3]``, overwritten: makespan, evaluations, 1 if all schedules were simulated.
    """
    count = kernel.shape[0]
    order = stack[:count]
    lane_of = stack[count : 2 * count]
    pending = stack[2 * count : 3 * count]
    choice = stack[3 * count : 4 * count]  # next option of each level: operator * lanes + lane
    opened = stack[4 * count : 5 * count + 1]  # lanes in use before each level
    placed = stack[5 * count + 1 : 6 * count + 1]
    for index in range(count):
        pending[index] = pred_ptr[index + 1] - pred_ptr[index]
        placed[index] = 0
    no_bound = np.zeros(count, dtype=np.float64)
    result[0] = UNREACHED
    result[1] = 0.0
    result[2] = 0.0
    level = 0
    choice[0] = 0
    opened[0] = 0
    while level >= 0:
        option = choice[level]
        while option < count * lanes:
            operator = option // lanes
            if placed[operator] == 0 and pending[operator] == 0 and option - operator * lanes <= opened[level]:
                break
            option += 1
        if option == count * lanes:
            level -= 1
            if level >= 0:
                operator = order[level]
                placed[operator] = 0
                for place in range(succ_ptr[operator], succ_ptr[operator + 1]):
                    pending[succ_idx[place]] += 1
            continue
        choice[level] = option + 1
        operator = option // lanes
        lane = option - operator * lanes
        order[level] = operator
        lane_of[operator] = lane
        if level == count - 1:
            value = evaluate(
                pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency,
                order, lane_of, width_index, wait, no_bound, result[0], -1, lane_times, lane_numbers, times, links,
            )  # fmt: skip
            result[1] += 1.0
            if value < result[0]:
                result[0] = value
                for index in range(count):
                    best_order[index] = order[index]
                    best_lane[index] = lane_of[index]
            if result[1] >= most:
                return
            continue
        placed[operator] = 1
        for place in range(succ_ptr[operator], succ_ptr[operator + 1]):
            pending[succ_idx[place]] -= 1
        level += 1
        choice[level] = 0
        opened[level] = max(opened[level - 1], lane + 1)
    result[2] = 1.0
