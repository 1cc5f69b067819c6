"""The compiled twin of :func:`autosched.search.fluid.simulate`."""

from __future__ import annotations

import numpy as np

from autosched.search.compiled.cache import ARRAYS, F1, I1, SPACE, compiled
from autosched.search.compiled.lanes import is_wide, let_go, link_operators, release
from autosched.search.compiled.layout import (
    END,
    FINISHED,
    FREE,
    HELD_BY,
    KERNEL,
    LEFT,
    MIN_SLOWDOWN,
    OPERATOR,
    PACE,
    PART,
    PLACE,
    PREVIOUS,
    PUT_OFF,
    RANK,
    READY,
    SIDE,
    SLOWDOWN,
    START,
    TURN,
    UNREACHED,
    URGENCY,
    WHEN,
)
from autosched.search.compiled.marks import (
    ACTIVE,
    CROWD,
    LAST,
    OPENED,
    OPENER,
    READY_COUNT,
    SHORT,
    SPIN_ROOM,
    SPIN_UNTIL,
    TIME,
    copy_block,
    mark_at,
    marks_of,
    rows_of,
    take_up,
)
from autosched.search.compiled.room import share_room, weigh
from autosched.search.compiled.threads import arrival, crowding, lateness


@compiled(f"f8({ARRAYS},{I1},{I1},{I1},{I1},{F1},f8,i8,{SPACE})")
def evaluate(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency,
    order, lane_of, width_index, wait, bound, limit, begin, lane_times, lane_numbers, times, links,
):  # fmt: skip
    """Makespan of one schedule in microseconds, or ``UNREACHED`` once it must exceed ``limit``.

    One loop without calls (what it takes from another file is inlined), because this is where a search spends its time;
    ``advance_to_finish`` is the same arithmetic for prefix states.

    Args:
        pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency: ``Problem.arrays``.
        order, lane_of, width_index: int32 ``[n]``.
        wait: int32 ``[n]``, one more operator to wait for, or -1.
        bound: float64 ``[n]``, least time from an operator's start to the end of the run; zeros if not known.
        limit: give up above this makespan.
        begin: the mark to go on from (see :mod:`autosched.search.compiled.marks`), or -1 to begin at the beginning.
        lane_times, lane_numbers, times, links: a workspace for the lane slots there are, overwritten; ``times`` then holds start and end
            of each operator, and the row ``HELD_BY`` of ``links`` what its start waited for.
    """
    count = order.shape[0]
    lanes = lane_times.shape[1] - 1
    gap = latency[0]
    cross = latency[1]
    concurrent = latency[3]
    polling = latency[4]
    spin = latency[5]
    wide = 1.5 * latency[6]  # more room than this is that of several threads
    one_team = latency[7] > 0.0
    limit -= latency[2]
    ready = link_operators(order, lane_of, wait, pred_ptr, lanes, int(one_team), lane_numbers, links)
    time = 0.0
    finished = 0
    active = 0  # how many run
    limited = lanes > 2 and room.shape[0] > 0  # whether room has to be looked at
    short = 0  # 1 while one of those that run gets less room than it would beside one other
    crowd = 1.0
    spin_until = -1.0
    spin_room = 0.0
    opened = 0  # a team's operators from this place of the launch order on begin when all before it have ended
    opener = count  # the last of those
    marks = marks_of(lane_times)
    mark = begin + 1  # the next to leave
    if begin < 0:
        for slot in range(lanes):
            lane_times[FREE, slot] = -1.0
            lane_times[WHEN, slot] = UNREACHED
    else:
        base = rows_of(begin, links[SIDE, begin])
        copy_block(base, 0, lane_times, lane_numbers)
        finished = mark_at(begin, marks, count)
        opened = int(lane_numbers[base + OPENED, -1])
        opener = int(lane_numbers[base + OPENER, -1])
        active = int(lane_numbers[base + ACTIVE, -1])
        short = int(lane_numbers[base + SHORT, -1])
        ready = int(lane_numbers[base + READY_COUNT, -1])
        links[HELD_BY, count] = lane_numbers[base + LAST, -1]
        time = lane_times[base + TIME, -1]
        crowd = lane_times[base + CROWD, -1]
        spin_until = lane_times[base + SPIN_UNTIL, -1]
        spin_room = lane_times[base + SPIN_ROOM, -1]
        take_up(finished, opened, order, succ_ptr, succ_idx, lanes, lane_numbers, links)
    stop = mark_at(mark, marks, count)
    while finished < count:
        if finished == stop:
            base = rows_of(mark, 1 - links[SIDE, mark])
            copy_block(0, base, lane_times, lane_numbers)
            lane_numbers[base + OPENED, -1] = opened
            lane_numbers[base + OPENER, -1] = opener
            lane_numbers[base + ACTIVE, -1] = active
            lane_numbers[base + SHORT, -1] = short
            lane_numbers[base + READY_COUNT, -1] = ready
            lane_numbers[base + LAST, -1] = links[HELD_BY, count]
            lane_times[base + TIME, -1] = time
            lane_times[base + CROWD, -1] = crowd
            lane_times[base + SPIN_UNTIL, -1] = spin_until
            lane_times[base + SPIN_ROOM, -1] = spin_room
            mark += 1
            stop = mark_at(mark, marks, count)
        if one_team and finished == opened:
            opener = links[HELD_BY, count]
            alone = is_wide(width_index[order[opened]], latency)
            while opened < count and (opened == finished or not (alone or is_wide(width_index[order[opened]], latency))):
                ready = let_go(np.uint32(order[opened]), ready, lane_numbers, links)
                opened += 1
        for place in range(ready):
            index = lane_numbers[READY, place]
            lane = np.uint32(lane_of[index])
            free = lane_times[FREE, lane]
            held = links[PREVIOUS, index]
            start = 0.0
            if held != count:
                start = free + gap
            for edge in range(pred_ptr[index], pred_ptr[index + 1]):
                before = np.uint32(pred_idx[edge])
                arrived = times[END, before]
                if lane_of[before] != lane:
                    arrived = arrival(arrived, free, cross, polling)
                if arrived > start:
                    start = arrived
                    held = before
            if wait[index] >= 0:
                before = np.uint32(wait[index])
                arrived = times[END, before]
                if lane_of[before] != lane:
                    arrived = arrival(arrived, free, cross, polling)
                if arrived > start:
                    start = arrived
                    held = before
            if one_team:
                if opener != count and lane_of[opener] != lane:
                    arrived = arrival(times[END, opener], free, cross, polling)
                    if arrived > start:
                        start = arrived
                        held = opener
                if is_wide(width_index[index], latency):
                    for other in range(lanes):
                        if other != lane and lane_times[FREE, other] >= 0.0:
                            arrived = arrival(lane_times[FREE, other], free, cross, polling)
                            if arrived > start:
                                start = arrived
                                held = lane_numbers[OPERATOR, other]
            links[HELD_BY, index] = held
            if start + bound[index] > limit:
                return UNREACHED
            lane_times[WHEN, lane] = start
            lane_numbers[OPERATOR, lane] = index
            lane_numbers[KERNEL, lane] = kernel[index, np.uint32(width_index[index])]
            lane_numbers[URGENCY, lane] = count + links[PLACE, index]
            lane_numbers[PUT_OFF, lane] = 0
        ready = 0
        chosen = np.uint32(0)
        event = lane_times[WHEN, 0]
        if lanes == 2:
            when = lane_times[WHEN, 1]
            if when < event or (when == event and lane_numbers[URGENCY, 1] < lane_numbers[URGENCY, 0]):
                chosen = np.uint32(1)
                event = when
        else:
            # Which of several lanes is next the processor guesses badly; these lines compile to code without branches.
            tied = False
            for slot in range(1, lanes):
                when = lane_times[WHEN, slot]
                tied = (when == event) | (tied & (when > event))
                chosen = np.uint32(slot) if when < event else chosen
                event = when if when < event else event
            if tied:
                for slot in range(lanes):
                    if lane_times[WHEN, slot] == event and lane_numbers[URGENCY, slot] < lane_numbers[URGENCY, chosen]:
                        chosen = np.uint32(slot)
        if event >= UNREACHED:
            return UNREACHED  # order and waits contradict each other: the caller built no legal schedule
        passed = event - time
        time = event
        for place in range(active):
            lane = lane_numbers[TURN, place]
            lane_times[LEFT, lane] = max(0.0, lane_times[LEFT, lane] - passed / lane_times[PACE, lane])
        row = lane_numbers[KERNEL, chosen]
        starts = lane_numbers[URGENCY, chosen] >= count
        if starts and concurrent > 0.0 and active > 0 and lane_numbers[PUT_OFF, chosen] == 0:
            lane_times[WHEN, chosen] = time + concurrent
            lane_numbers[PUT_OFF, chosen] = 1
        else:
            if starts:
                slowdown = 1.0
                for place in range(active):
                    lane = lane_numbers[TURN, place]
                    other_row = lane_numbers[KERNEL, lane]
                    slowdown += excess_last[row, other_row]
                    lane_times[SLOWDOWN, lane] += excess_first[other_row, row]
                lane_times[SLOWDOWN, chosen] = slowdown
                lane_times[LEFT, chosen] = solo[row]
                lane_numbers[URGENCY, chosen] = links[PLACE, lane_numbers[OPERATOR, chosen]]
                lane_numbers[TURN, active] = chosen
                active += 1
                times[START, lane_numbers[OPERATOR, chosen]] = time
                if spin > 0.0 and room[row] > wide:
                    spin_until = -1.0
            else:
                active -= 1
                later = 0  # 1 behind the lane's own place in the list, with those that started later
                for place in range(active):
                    later |= lane_numbers[TURN, place] == chosen
                    lane = lane_numbers[TURN, place + later]
                    lane_numbers[TURN, place] = lane
                    other_row = lane_numbers[KERNEL, lane]
                    excess = excess_last[other_row, row] if later else excess_first[other_row, row]
                    lane_times[SLOWDOWN, lane] -= excess
                if active == 1:
                    lane_times[SLOWDOWN, lane_numbers[TURN, 0]] = 1.0
                ended = time
                if polling > 0.0 and finished + active + 1 < count:
                    ended += lateness(time, chosen, lanes, lane_numbers[TURN], active, lane_times[FREE], latency)
                done = lane_numbers[OPERATOR, chosen]
                times[END, done] = ended
                lane_times[FREE, chosen] = ended
                lane_times[WHEN, chosen] = UNREACHED
                links[HELD_BY, count] = done
                links[RANK, done] = finished
                links[FINISHED, finished] = done
                finished += 1
                ready = release(done, ready, succ_ptr, succ_idx, lane_numbers, links)
                if spin > 0.0 and room[row] > wide:
                    spin_until = time + spin
                    spin_room = room[row] - latency[6]
            if limited and (active > 2 or short == 1):
                was_short = short
                short = share_room(lane_numbers[TURN], active, lane_numbers[KERNEL], room, lane_times[PART])
                if short == 1 or was_short == 1:
                    weigh(
                        lane_numbers[TURN], active, lane_numbers[KERNEL], lane_times[PART], excess_first, excess_last, lane_times[SLOWDOWN]
                    )
            if spin > 0.0:
                crowd = 1.0
                if time < spin_until:
                    crowd = crowding(lane_numbers[TURN], active, lane_numbers[KERNEL], room, spin_room)
        for place in range(active):
            lane = lane_numbers[TURN, place]
            lane_times[PACE, lane] = max(lane_times[SLOWDOWN, lane], MIN_SLOWDOWN) * crowd
            lane_times[WHEN, lane] = time + lane_times[LEFT, lane] * lane_times[PACE, lane]
    return time + latency[2]
