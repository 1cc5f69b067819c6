"""The compiled twin of :func:`autosched.search.leftover.simulate`."""

from __future__ import annotations

import numpy as np

from autosched.search.compiled.cache import F1, I1, compiled
from autosched.search.compiled.lanes import queue_operators, release
from autosched.search.compiled.layout import ROOM_DUST, UNREACHED


def int_row(count: int, lanes: int, cohorts: int) -> int:
    """Length of the int row that ``evaluate_blocks`` overwrites."""
    return lanes * cohorts + 9 * lanes + 1 + 5 * count


@compiled(f"f8({I1},{I1},{I1},{I1},i4[:,::1],{F1},{I1},{I1},{F1},{F1},{F1},{F1},{F1},i8,i8,{I1},{I1},{I1},{I1},{F1},{F1},{I1})")
def evaluate_blocks(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, latency,
    blocks, capacity, block_us, compute, bandwidth, stall_compute, stall_bandwidth,
    lanes, cohorts, order, lane_of, width_index, wait, floats, start_us, ints,
):  # fmt: skip
    """Makespan of one schedule in microseconds; ``floats`` ends with the end of each operator.

    Args:
        pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, latency: of ``Problem``.
        blocks, capacity, block_us, compute, bandwidth, stall_compute, stall_bandwidth: ``BlockKernels.arrays``.
        lanes: lane slots.
        cohorts: ``leftover.COHORTS``.
        order, lane_of, width_index, wait: int32 ``[n]``, as in ``fluid.evaluate``.
        floats: float64 ``[2 K + K cohorts + n]``, overwritten.
        start_us: float64 ``[n]``, overwritten.
        ints: int32 ``[int_row(...)]``, overwritten.
    """
    count = order.shape[0]
    begin = floats[:lanes]
    free = floats[lanes : 2 * lanes]
    remaining = floats[2 * lanes : 2 * lanes + lanes * cohorts]
    end = floats[2 * lanes + lanes * cohorts :]
    size = ints[: lanes * cohorts]
    small = ints[lanes * cohorts :]
    running = small[:lanes]
    row = small[lanes : 2 * lanes]
    rank = small[2 * lanes : 3 * lanes]
    sequence = small[3 * lanes : 4 * lanes]
    left = small[4 * lanes : 5 * lanes]
    used_cohorts = small[5 * lanes : 6 * lanes]
    cursor = small[6 * lanes : 7 * lanes]
    heads = small[7 * lanes : 8 * lanes + 1]
    rest = small[9 * lanes + 1 :]
    queue = rest[:count]
    place_of = rest[count : 2 * count]
    pending = rest[2 * count : 3 * count]
    first_waiter = rest[3 * count : 4 * count]
    next_waiter = rest[4 * count : 5 * count]
    queue_operators(order, lane_of, wait, pred_ptr, lanes, heads, cursor, queue, place_of, pending, first_waiter, next_waiter)
    for lane in range(lanes):
        free[lane] = -1.0
        running[lane] = -1
        used_cohorts[lane] = 0
    time = 0.0
    started = 0
    finished = 0
    while finished < count:
        # Heads whose predecessors are finished get a start time.
        for lane in range(lanes):
            if running[lane] >= 0 or cursor[lane] == heads[lane + 1]:
                continue
            index = queue[cursor[lane]]
            if pending[index] > 0:
                continue
            cursor[lane] += 1
            start = 0.0
            if free[lane] >= 0.0:
                start = free[lane] + latency[0]
            for place in range(pred_ptr[index], pred_ptr[index + 1]):
                before = pred_idx[place]
                ready = end[before]
                if lane_of[before] != lane:
                    ready += latency[1]
                start = max(start, ready)
            before = wait[index]
            if before >= 0:
                ready = end[before]
                if lane_of[before] != lane:
                    ready += latency[1]
                start = max(start, ready)
            running[lane] = index
            row[lane] = kernel[index, width_index[index]]
            rank[lane] = place_of[index]
            sequence[lane] = -1
            left[lane] = blocks[row[lane]]
            used_cohorts[lane] = 0
            begin[lane] = start
        # What is resident decides how fast blocks advance.
        arithmetic = 0.0
        memory = 0.0
        for lane in range(lanes):
            if running[lane] >= 0:
                for cohort in range(used_cohorts[lane]):
                    arithmetic += size[lane * cohorts + cohort] * compute[row[lane]]
                    memory += size[lane * cohorts + cohort] * bandwidth[row[lane]]
        arithmetic = max(0.0, arithmetic - 1.0)
        memory = max(0.0, memory - 1.0)
        best = UNREACHED
        best_kind = 2
        best_rank = 0
        best_lane = -1
        best_cohort = -1
        for lane in range(lanes):
            if running[lane] < 0:
                continue
            if sequence[lane] < 0:
                when = begin[lane]
                if when < best or (when == best and (best_kind > 1 or (best_kind == 1 and rank[lane] < best_rank))):
                    best = when
                    best_kind = 1
                    best_rank = rank[lane]
                    best_lane = lane
                    best_cohort = -1
                continue
            slowdown = 1.0 + stall_compute[row[lane]] * arithmetic + stall_bandwidth[row[lane]] * memory
            for cohort in range(used_cohorts[lane]):
                when = time + remaining[lane * cohorts + cohort] * slowdown
                if when < best or (when == best and (best_kind > 0 or rank[lane] < best_rank)):
                    best = when
                    best_kind = 0
                    best_rank = rank[lane]
                    best_lane = lane
                    best_cohort = cohort
        if best_lane < 0:
            return UNREACHED
        passed = best - time
        if passed > 0.0:
            for lane in range(lanes):
                if running[lane] >= 0 and sequence[lane] >= 0:
                    slowdown = 1.0 + stall_compute[row[lane]] * arithmetic + stall_bandwidth[row[lane]] * memory
                    for cohort in range(used_cohorts[lane]):
                        place = lane * cohorts + cohort
                        remaining[place] = max(0.0, remaining[place] - passed / slowdown)
            time = best
        if best_kind == 1:
            sequence[best_lane] = started
            started += 1
            start_us[running[best_lane]] = time
        else:
            used_cohorts[best_lane] -= 1
            for cohort in range(best_cohort, used_cohorts[best_lane]):
                place = best_lane * cohorts + cohort
                size[place] = size[place + 1]
                remaining[place] = remaining[place + 1]
            if left[best_lane] == 0 and used_cohorts[best_lane] == 0:
                done = running[best_lane]
                running[best_lane] = -1
                end[done] = time
                free[best_lane] = time
                finished += 1
                release(done, succ_ptr, succ_idx, pending, first_waiter, next_waiter)
        # Dispatch into the free room, earliest start first; nobody overtakes a kernel that still has blocks to dispatch.
        used = 0.0
        for lane in range(lanes):
            if running[lane] >= 0:
                for cohort in range(used_cohorts[lane]):
                    used += size[lane * cohorts + cohort] / float(capacity[row[lane]])
        after = -1
        while True:
            chosen = -1
            for lane in range(lanes):
                if running[lane] >= 0 and sequence[lane] > after and (chosen < 0 or sequence[lane] < sequence[chosen]):
                    chosen = lane
            if chosen < 0:
                break
            after = sequence[chosen]
            if left[chosen] == 0:
                continue
            fits = float(capacity[row[chosen]])
            taken = min(left[chosen], max(0, int(np.floor((1.0 - used) * fits + ROOM_DUST))))
            if taken > 0:
                left[chosen] -= taken
                used += taken / fits
                if used_cohorts[chosen] < cohorts:
                    place = chosen * cohorts + used_cohorts[chosen]
                    size[place] = taken
                    remaining[place] = block_us[row[chosen]]
                    used_cohorts[chosen] += 1
                else:
                    place = chosen * cohorts + cohorts - 1
                    both = size[place] + taken
                    remaining[place] = (remaining[place] * size[place] + block_us[row[chosen]] * taken) / both
                    size[place] = both
            if left[chosen] > 0:
                break
    return time + latency[2]
