"""The compiled twin of :func:`autosched.search.fluid.simulate`."""

from __future__ import annotations

from autosched.search.compiled.cache import ARRAYS, F1, I1, compiled
from autosched.search.compiled.lanes import open_phase, queue_operators, release
from autosched.search.compiled.layout import MIN_SLOWDOWN, UNREACHED
from autosched.search.compiled.room import leave, share_room, weigh
from autosched.search.compiled.threads import arrival, crowding, lateness


@compiled(f"f8({ARRAYS},i8,{I1},{I1},{I1},{I1},{F1},f8,{F1},{F1},{I1})")
def evaluate(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency,
    lanes, order, lane_of, width_index, wait, bound, limit, floats, start_us, scratch,
):  # fmt: skip
    """Makespan of one schedule in microseconds, or ``UNREACHED`` once it must exceed ``limit``.

    One loop without calls (what it takes from another file is inlined), because this is where a search spends its time;
    ``advance_to_finish`` is the same arithmetic for prefix states.

    Args:
        pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency: ``Problem.arrays``.
        lanes: lane slots.
        order, lane_of, width_index: int32 ``[n]``.
        wait: int32 ``[n]``, one more operator to wait for, or -1.
        bound: float64 ``[n]``, least time from an operator's start to the end of the run; zeros if not known.
        limit: give up above this makespan.
        floats: a state's float row, overwritten; it then holds the end of each operator.
        start_us: float64 ``[n]``, overwritten with starts (or length 0: not wanted).
        scratch: int32 ``[scratch_row(n, K)]``, overwritten; its last ``n + 1`` hold what each operator's start waited for (-1 nothing), and
            the operator that finished last.
    """
    count = order.shape[0]
    gap = latency[0]
    cross = latency[1]
    concurrent = latency[3]
    polling = latency[4]
    spin = latency[5]
    wide = 1.5 * latency[6]  # more room than this is that of several threads
    one_team = latency[7] > 0.0
    limit -= latency[2]
    begin = floats[1 : 1 + lanes]
    remaining = floats[1 + lanes : 1 + 2 * lanes]
    slowdown = floats[1 + 2 * lanes : 1 + 3 * lanes]
    free = floats[1 + 3 * lanes : 1 + 4 * lanes]
    end = floats[1 + 4 * lanes : 1 + 4 * lanes + count]
    part = floats[1 + 4 * lanes + count :]
    running = scratch[:lanes]  # operator on the lane, -1 none
    row = scratch[lanes : 2 * lanes]
    sequence = scratch[2 * lanes : 3 * lanes]  # place among starts, -1 while it waits, -2 once put off
    rank = scratch[3 * lanes : 4 * lanes]
    cursor = scratch[4 * lanes : 5 * lanes]
    heads = scratch[5 * lanes : 6 * lanes + 1]
    turn = scratch[6 * lanes + 1 : 7 * lanes + 1]  # lanes that run, in order of start
    rest = scratch[7 * lanes + 1 :]
    queue = rest[:count]
    place_of = rest[count : 2 * count]
    pending = rest[2 * count : 3 * count]
    first_waiter = rest[3 * count : 4 * count]
    next_waiter = rest[4 * count : 5 * count]
    held_by = rest[5 * count : 6 * count + 1]
    queue_operators(order, lane_of, wait, pred_ptr, lanes, heads, cursor, queue, place_of, pending, first_waiter, next_waiter)
    for lane in range(lanes):
        free[lane] = -1.0
        running[lane] = -1
    time = 0.0
    started = 0
    finished = 0
    limited = lanes > 2 and room.shape[0] > 0  # whether room has to be looked at
    active = 0  # how many run, if so
    short = 0  # 1 while one of them gets less room than it would beside one other
    crowd = 1.0
    spin_until = -1.0
    spin_room = 0.0
    opened = count  # a team's operators from this place of the launch order on begin when all before it have ended
    opener = -1  # the last of those
    if one_team:
        for lane in range(lanes):
            heads[lane + 1] = cursor[lane]
        opened = open_phase(order, lane_of, width_index, heads, 0)
    while finished < count:
        best = UNREACHED
        best_lane = -1
        best_kind = 2
        best_rank = 0
        for lane in range(lanes):
            if running[lane] < 0:
                if cursor[lane] == heads[lane + 1]:
                    continue
                index = queue[cursor[lane]]
                if pending[index] > 0:
                    continue
                cursor[lane] += 1
                start = 0.0
                held = -1
                if free[lane] >= 0.0:
                    start = free[lane] + gap
                    held = queue[cursor[lane] - 2]
                for place in range(pred_ptr[index], pred_ptr[index + 1]):
                    before = pred_idx[place]
                    ready = end[before]
                    if lane_of[before] != lane:
                        ready = arrival(ready, free[lane], cross, polling)
                    if ready > start:
                        start = ready
                        held = before
                before = wait[index]
                if before >= 0:
                    ready = end[before]
                    if lane_of[before] != lane:
                        ready = arrival(ready, free[lane], cross, polling)
                    if ready > start:
                        start = ready
                        held = before
                if one_team:
                    if opener >= 0 and lane_of[opener] != lane:
                        ready = arrival(end[opener], free[lane], cross, polling)
                        if ready > start:
                            start = ready
                            held = opener
                    if width_index[index] > 0:
                        for other in range(lanes):
                            if other != lane and free[other] >= 0.0:
                                ready = arrival(free[other], free[lane], cross, polling)
                                if ready > start:
                                    start = ready
                                    held = queue[cursor[other] - 1]
                held_by[index] = held
                if start + bound[index] > limit:
                    return UNREACHED
                running[lane] = index
                row[lane] = kernel[index, width_index[index]]
                begin[lane] = start
                remaining[lane] = solo[row[lane]]
                slowdown[lane] = 1.0
                sequence[lane] = -1
                rank[lane] = place_of[index]
            if sequence[lane] < 0:
                when = begin[lane]
                kind = 1
            else:
                when = time + remaining[lane] * max(slowdown[lane], MIN_SLOWDOWN) * crowd
                kind = 0
            if when < best or (when == best and (kind < best_kind or (kind == best_kind and rank[lane] < best_rank))):
                best = when
                best_lane = lane
                best_kind = kind
                best_rank = rank[lane]
        if best_lane < 0:
            return UNREACHED  # order and waits contradict each other: the caller built no legal schedule
        passed = best - time
        moved = passed > 0.0
        if moved:
            time = best
        chosen = row[best_lane]
        if best_kind == 1 and concurrent > 0.0 and sequence[best_lane] == -1:
            company = 0
            for lane in range(lanes):
                if running[lane] >= 0 and sequence[lane] >= 0:
                    company += 1
            if company > 0:
                begin[best_lane] += concurrent
                sequence[best_lane] = -2
                if moved:
                    for lane in range(lanes):
                        if running[lane] >= 0 and sequence[lane] >= 0:
                            remaining[lane] = max(0.0, remaining[lane] - passed / (max(slowdown[lane], MIN_SLOWDOWN) * crowd))
                continue
        if best_kind == 1:
            own = 1.0
            for lane in range(lanes):
                if running[lane] >= 0 and sequence[lane] >= 0:
                    if moved:
                        remaining[lane] = max(0.0, remaining[lane] - passed / (max(slowdown[lane], MIN_SLOWDOWN) * crowd))
                    own += excess_last[chosen, row[lane]]
                    slowdown[lane] += excess_first[row[lane], chosen]
            if start_us.shape[0] > 0:
                start_us[running[best_lane]] = time
            slowdown[best_lane] = own
            sequence[best_lane] = started
            started += 1
            if limited:
                turn[active] = best_lane
                active += 1
                if active > 2:
                    short = share_room(turn, active, row, room, part)
                    if short == 1:
                        weigh(turn, active, row, part, excess_first, excess_last, slowdown)
            if spin > 0.0:
                if room[chosen] > wide:
                    spin_until = -1.0
                crowd = 1.0
                if time < spin_until:
                    crowd = crowding(lanes, running, sequence, row, room, spin_room)
            continue
        done = running[best_lane]
        since = sequence[best_lane]
        running[best_lane] = -1
        others = 0
        last = 0
        for lane in range(lanes):
            if running[lane] >= 0 and sequence[lane] >= 0:
                if moved:
                    remaining[lane] = max(0.0, remaining[lane] - passed / (max(slowdown[lane], MIN_SLOWDOWN) * crowd))
                if sequence[lane] < since:
                    slowdown[lane] -= excess_first[row[lane], chosen]
                else:
                    slowdown[lane] -= excess_last[row[lane], chosen]
                others += 1
                last = lane
        if others == 1:
            slowdown[last] = 1.0
        if limited:
            active = leave(turn, active, best_lane)
            if active > 2 or short == 1:
                was_short = short
                short = share_room(turn, active, row, room, part)
                if short == 1 or was_short == 1:
                    weigh(turn, active, row, part, excess_first, excess_last, slowdown)
        late = 0.0
        if polling > 0.0 and started < count:
            late = lateness(time, best_lane, lanes, running, sequence, free, latency)
        end[done] = time + late
        free[best_lane] = time + late
        if spin > 0.0:
            if room[chosen] > wide:
                spin_until = time + spin
                spin_room = room[chosen] - latency[6]
            crowd = 1.0
            if time < spin_until:
                crowd = crowding(lanes, running, sequence, row, room, spin_room)
        finished += 1
        if finished == opened and opened < count:
            opener = done
            opened = open_phase(order, lane_of, width_index, heads, opened)
        held_by[count] = done
        release(done, succ_ptr, succ_idx, pending, first_waiter, next_waiter)
    return time + latency[2]
