"""The compiled twin of :func:`autosched.search.leftover.simulate`."""

from __future__ import annotations

import numpy as np

from autosched.search.compiled.cache import F1, I1, compiled
from autosched.search.compiled.lanes import link_operators, release
from autosched.search.compiled.layout import PLACE, READY, ROOM_DUST, UNREACHED


def int_row(lanes: int, cohorts: int) -> int:
    """Length of the int row that ``evaluate_blocks`` overwrites."""
    return lanes * cohorts + 6 * lanes


_BLOCK_ARRAYS = f"{I1},{I1},{F1},{F1},{F1},{F1},{F1}"
_LINKS = "u4[:,::1],u4[:,::1]"


@compiled(f"f8({I1},{I1},{I1},{I1},i4[:,::1],{F1},{_BLOCK_ARRAYS},i8,i8,{I1},{I1},{I1},{I1},{F1},{F1},{I1},{_LINKS})")
def evaluate_blocks(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, latency,
    blocks, capacity, block_us, compute, bandwidth, stall_compute, stall_bandwidth,
    lanes, cohorts, order, lane_of, width_index, wait, floats, start_us, ints, lane_numbers, links,
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
        lane_numbers, links: of ``layout.workspace``, overwritten.
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
    ready = link_operators(order, lane_of, wait, pred_ptr, lanes, 0, lane_numbers, links)
    for lane in range(lanes):
        free[lane] = -1.0
        running[lane] = -1
        used_cohorts[lane] = 0
    time = 0.0
    started = 0
    finished = 0
    while finished < count:
        for entry in range(ready):
            index = lane_numbers[READY, entry]
            lane = lane_of[index]
            start = 0.0
            if free[lane] >= 0.0:
                start = free[lane] + latency[0]
            for place in range(pred_ptr[index], pred_ptr[index + 1]):
                before = pred_idx[place]
                arrived = end[before]
                if lane_of[before] != lane:
                    arrived += latency[1]
                start = max(start, arrived)
            before = wait[index]
            if before >= 0:
                arrived = end[before]
                if lane_of[before] != lane:
                    arrived += latency[1]
                start = max(start, arrived)
            running[lane] = index
            row[lane] = kernel[index, width_index[index]]
            rank[lane] = links[PLACE, index]
            sequence[lane] = -1
            left[lane] = blocks[row[lane]]
            used_cohorts[lane] = 0
            begin[lane] = start
        ready = 0
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
                ready = release(done, ready, succ_ptr, succ_idx, lane_numbers, links)
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
