"""Growing a prefix of a schedule: ``commit`` and ``advance_to_finish``, the twins of ``fluid.FluidState.place`` and ``advance``; and
``run_alone``, both for an operator that nothing may run beside.

The rows of a state are laid out in :mod:`autosched.search.compiled.layout`.
"""

from __future__ import annotations

from autosched.search.compiled.cache import ARRAYS, F1, F2, I1, compiled
from autosched.search.compiled.layout import HEADER, MIN_SLOWDOWN, UNREACHED
from autosched.search.compiled.room import leave, share_room, weigh
from autosched.search.compiled.threads import arrival, crowding, lateness


@compiled(f"void({F1},{I1},i8,i8,i8,i8,i8,i4[:,::1],{F1},{I1},{I1},{F1})")
def commit(  # type: ignore[no-untyped-def]
    floats, ints, lanes, count, used_lanes, operator, width, kernel, solo, pred_ptr, pred_idx, latency
):
    """Place a ready operator on the idle lane with the earliest start.

    An operator that could have started before now on that lane was held back on purpose; it gets a wait for the last operator that
    finished, because without that edge the exported schedule would start it earlier than simulated here.
    """
    time = floats[0]
    event = ints[3]
    opener = ints[7]  # -1 where the lanes are no team
    base = HEADER + 4 * lanes
    best = UNREACHED
    best_lane = 0
    best_wait = -1
    for lane in range(used_lanes):
        if ints[HEADER + lane] >= 0:
            continue
        start = 0.0
        free = floats[1 + 3 * lanes + lane]
        if free >= 0.0:
            start = free + latency[0]
        for place in range(pred_ptr[operator], pred_ptr[operator + 1]):
            before = pred_idx[place]
            ready_us = floats[1 + 4 * lanes + before]
            if ints[base + count + before] != lane:
                ready_us = arrival(ready_us, free, latency[1], latency[4])
            if ready_us > start:
                start = ready_us
        if opener >= 0 and ints[base + count + opener] != lane:
            start = max(start, arrival(floats[1 + 4 * lanes + opener], free, latency[1], latency[4]))
        if width > 0 and latency[7] > 0.0:
            for other in range(1, lanes):
                other_free = floats[1 + 3 * lanes + other]
                if other_free >= 0.0:
                    start = max(start, arrival(other_free, free, latency[1], latency[4]))
        wait = -1
        if start < time:
            wait = event
            start = max(start, arrival(floats[1 + 4 * lanes + event], free, latency[1], latency[4]))
        if start < best:
            best = start
            best_lane = lane
            best_wait = wait
    placed = ints[1]
    row = kernel[operator, width]
    floats[1 + best_lane] = best
    floats[1 + lanes + best_lane] = solo[row]
    floats[1 + 2 * lanes + best_lane] = 1.0
    ints[HEADER + best_lane] = operator
    ints[HEADER + lanes + best_lane] = row
    ints[HEADER + 2 * lanes + best_lane] = -1
    ints[HEADER + 3 * lanes + best_lane] = placed
    ints[base + count + operator] = best_lane
    ints[base + 2 * count + operator] = width
    ints[base + 3 * count + operator] = best_wait
    ints[base + 4 * count + placed] = operator
    ints[1] = placed + 1
    ready = base + 5 * count
    for place in range(ints[4]):
        if ints[ready + place] == operator:
            ints[ready + place] = ints[ready + ints[4] - 1]
            ints[4] -= 1
            break


@compiled(f"i8({F1},{I1},i8,i8,{I1},{I1},{F1},{F2},{F2},{F1})")
def advance_to_finish(floats, ints, lanes, count, succ_ptr, succ_idx, room, excess_first, excess_last, latency):  # type: ignore[no-untyped-def]
    """Go on until an operator has finished and its successors that became ready are listed; -2 if nothing is placed."""
    base = HEADER + 4 * lanes
    limited = lanes > 2 and room.shape[0] > 0
    wide = 1.5 * latency[6]  # more room than this is that of several threads
    row = ints[HEADER + lanes : HEADER + 2 * lanes]
    turn = ints[base + 6 * count :]
    free = floats[1 + 3 * lanes : 1 + 4 * lanes]
    team = floats[1 + 5 * lanes + count :]  # until when helpers spin, their room, and the factor
    while True:
        time = floats[0]
        best = UNREACHED
        best_lane = -1
        best_kind = 2
        best_rank = 0
        for lane in range(lanes):
            if ints[HEADER + lane] < 0:
                continue
            rank = ints[HEADER + 3 * lanes + lane]
            if ints[HEADER + 2 * lanes + lane] < 0:
                when = floats[1 + lane]
                kind = 1
            else:
                when = time + floats[1 + lanes + lane] * (max(floats[1 + 2 * lanes + lane], MIN_SLOWDOWN) * team[2])
                kind = 0
            if when < best or (when == best and (kind < best_kind or (kind == best_kind and rank < best_rank))):
                best = when
                best_lane = lane
                best_kind = kind
                best_rank = rank
        if best_lane < 0:
            return -2
        passed = best - time
        if passed > 0.0:
            for place in range(ints[5]):
                lane = turn[place]
                left = floats[1 + lanes + lane] - passed / (max(floats[1 + 2 * lanes + lane], MIN_SLOWDOWN) * team[2])
                floats[1 + lanes + lane] = max(0.0, left)
            floats[0] = best
        chosen = row[best_lane]
        if best_kind == 1:
            if ints[5] > 0 and latency[3] > 0.0 and ints[HEADER + 2 * lanes + best_lane] == -1:
                floats[1 + best_lane] += latency[3]
                ints[HEADER + 2 * lanes + best_lane] = -2
                continue
            slowdown = 1.0
            for place in range(ints[5]):
                lane = turn[place]
                slowdown += excess_last[chosen, row[lane]]
                floats[1 + 2 * lanes + lane] += excess_first[row[lane], chosen]
            floats[1 + 2 * lanes + best_lane] = slowdown
            ints[HEADER + 2 * lanes + best_lane] = ints[0]
            ints[0] += 1
            turn[ints[5]] = best_lane
            ints[5] += 1
            if limited and ints[5] > 2:
                part = floats[1 + 4 * lanes + count :]
                ints[6] = share_room(turn, ints[5], row, room, part)
                if ints[6] == 1:
                    weigh(turn, ints[5], row, part, excess_first, excess_last, floats[1 + 2 * lanes : 1 + 3 * lanes])
            if latency[5] > 0.0:
                if room[chosen] > wide:
                    team[0] = -1.0
                team[2] = 1.0
                if floats[0] < team[0]:
                    team[2] = crowding(turn, ints[5], row, room, team[1])
            continue
        operator = ints[HEADER + best_lane]
        since = ints[HEADER + 2 * lanes + best_lane]
        ints[HEADER + best_lane] = -1
        ints[5] = leave(turn, ints[5], best_lane)
        for place in range(ints[5]):
            lane = turn[place]
            if ints[HEADER + 2 * lanes + lane] < since:
                floats[1 + 2 * lanes + lane] -= excess_first[row[lane], chosen]
            else:
                floats[1 + 2 * lanes + lane] -= excess_last[row[lane], chosen]
        if ints[5] == 1:
            floats[1 + 2 * lanes + turn[0]] = 1.0
        if limited and (ints[5] > 2 or ints[6] == 1):
            part = floats[1 + 4 * lanes + count :]
            was_short = ints[6]
            ints[6] = share_room(turn, ints[5], row, room, part)
            if ints[6] == 1 or was_short == 1:
                weigh(turn, ints[5], row, part, excess_first, excess_last, floats[1 + 2 * lanes : 1 + 3 * lanes])
        late = 0.0
        if latency[4] > 0.0 and ints[0] < count:
            late = lateness(floats[0], best_lane, lanes, turn, ints[5], free, latency)
        floats[1 + 4 * lanes + operator] = floats[0] + late
        free[best_lane] = floats[0] + late
        if latency[5] > 0.0:
            if room[chosen] > wide:
                team[0] = floats[0] + latency[5]
                team[1] = room[chosen] - latency[6]
            team[2] = 1.0
            if floats[0] < team[0]:
                team[2] = crowding(turn, ints[5], row, room, team[1])
        break
    ints[2] += 1
    ints[3] = operator
    for place in range(succ_ptr[operator], succ_ptr[operator + 1]):
        after = succ_idx[place]
        ints[base + after] -= 1
        if ints[base + after] == 0:
            ints[base + 5 * count + ints[4]] = after
            ints[4] += 1
    return operator


@compiled(f"void({ARRAYS},{F1},{I1},i8,i8,i8)")
def run_alone(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency, floats, ints, lanes, operator, width
):
    """``commit`` for a wide operator of a team: when all before it has ended, and go on until it has ended itself."""
    count = kernel.shape[0]
    while ints[2] < ints[1]:
        advance_to_finish(floats, ints, lanes, count, succ_ptr, succ_idx, room, excess_first, excess_last, latency)
    commit(floats, ints, lanes, count, 1, operator, width, kernel, solo, pred_ptr, pred_idx, latency)
    advance_to_finish(floats, ints, lanes, count, succ_ptr, succ_idx, room, excess_first, excess_last, latency)
    ints[7] = operator


@compiled(f"i8({I1},i8)")
def idle_lanes(ints, used_lanes):  # type: ignore[no-untyped-def]
    """How many of the first ``used_lanes`` lanes hold nothing."""
    idle = 0
    for lane in range(used_lanes):
        if ints[HEADER + lane] < 0:
            idle += 1
    return idle
