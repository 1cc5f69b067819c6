"""The compiled simulators and the loops around them: fluid evaluation, list decoding, beam levels, annealing steps.

Everything compiled is in this one module, because numba's cache does not see edits in functions of other files. Signatures are
explicit, so that one specialisation exists of each; fastmath is off, because it assumes that no infinities occur.

A *state* is one float row and one int row (offsets below), so that copying a prefix is two memory copies. With ``K`` lanes and ``n``
operators the float row holds: time; then for each lane start, remaining, slowdown, free-since (all microseconds but the third); then
the end of each operator. The int row holds: starts so far, placed so far, finished so far, last finished operator, length of the ready
list, three unused; for each lane operator (-1 idle), kernel, place among starts (-1 while it waits, -2 once put off), launch rank; for
each operator pending predecessors, lane (-1 not placed), width index, extra wait (-1 none); the launch order; the ready list.

``commit`` and ``advance_to_finish`` hold the twins of ``fluid.FluidState.place`` and ``advance``; the tests hold them equal.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np

logger = logging.getLogger(__name__)

HEADER = 8
UNREACHED = 1e300
MIN_SLOWDOWN = 0.25

Function = Callable[..., Any]

_I1 = "i4[::1]"
_F1 = "f8[::1]"
_F2 = "f8[:,::1]"
_ARRAYS = f"{_I1},{_I1},{_I1},{_I1},i4[:,::1],{_F1},{_F2},{_F2},{_F1}"


def _compiled(signature: str) -> Callable[[Function], Function]:
    """``numba.njit`` cached on disk; without the cache where neither the package nor the user's cache folder can be written."""

    def decorate(function: Function) -> Function:
        try:
            return cast(Function, numba.njit(signature, cache=True, nogil=True, error_model="numpy")(function))
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            logger.info("compiled code is not cached: %s", error)
            return cast(Function, numba.njit(signature, nogil=True, error_model="numpy")(function))

    return decorate


_inlined = cast(Callable[[Function], Function], numba.njit(inline="always", error_model="numpy"))
"""For a function with one caller: compiled as part of it, which saves a library, its wrappers and its optimisation."""


def _compiled_on_demand(signature: str) -> Callable[[Function], Function]:
    """As :func:`_compiled`, at the first call: for entries that a process may never need and no compiled code calls."""

    def decorate(function: Function) -> Function:
        ready: list[Function] = []

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            if not ready:
                ready.append(_compiled(signature)(function))
            return ready[0](*arguments)

        return call

    return decorate


def float_row(count: int, lanes: int) -> int:
    """Length of a state's float row."""
    return 1 + 4 * lanes + count


def int_row(count: int, lanes: int) -> int:
    """Length of a state's int row."""
    return HEADER + 4 * lanes + 6 * count


def scratch_row(count: int, lanes: int) -> int:
    """Length of the int row that ``evaluate`` overwrites."""
    return 6 * count + 7 * lanes + 2


def reset_state(floats: Any, ints: Any, lanes: int, count: int, pred_ptr: Any) -> None:
    """Make a state empty: nothing placed, sources ready. Not compiled: it is called once for each schedule and takes microseconds."""
    floats[:] = 0.0
    ints[:] = 0
    floats[1 + 3 * lanes :] = -1.0
    ints[3] = -1
    ints[HEADER : HEADER + lanes] = -1
    ints[HEADER + 2 * lanes : HEADER + 3 * lanes] = -1
    base = HEADER + 4 * lanes
    ints[base : base + count] = pred_ptr[1:] - pred_ptr[:-1]
    ints[base + count : base + 2 * count] = -1
    ints[base + 3 * count : base + 4 * count] = -1
    sources = np.flatnonzero(ints[base : base + count] == 0)
    ints[base + 5 * count : base + 5 * count + len(sources)] = sources
    ints[4] = len(sources)


@_compiled(f"f8({_ARRAYS},i8,{_I1},{_I1},{_I1},{_I1},{_F1},f8,{_F1},{_F1},{_I1})")
def evaluate(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency,
    lanes, order, lane_of, width_index, wait, bound, limit, floats, start_us, scratch,
):  # fmt: skip
    """Makespan of one schedule in microseconds, or ``UNREACHED`` once it must exceed ``limit``.

    One loop without calls, because this is where a search spends its time; ``advance_to_finish`` is the same arithmetic for prefix states.

    Args:
        pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency: ``Problem.arrays``.
        lanes: lane slots.
        order, lane_of, width_index: int32 ``[n]``.
        wait: int32 ``[n]``, one more operator to wait for, or -1.
        bound: float64 ``[n]``, least time from an operator's start to the end of the run; zeros if not known.
        limit: give up above this makespan.
        floats: a state's float row, overwritten; its last ``n`` hold the end of each operator.
        start_us: float64 ``[n]``, overwritten with starts (or length 0: not wanted).
        scratch: int32 ``[scratch_row(n, K)]``, overwritten; its last ``n + 1`` hold what each operator's start waited for (-1 nothing), and
            the operator that finished last.
    """
    count = order.shape[0]
    gap = latency[0]
    cross = latency[1]
    concurrent = latency[3]
    limit -= latency[2]
    begin = floats[1 : 1 + lanes]
    remaining = floats[1 + lanes : 1 + 2 * lanes]
    slowdown = floats[1 + 2 * lanes : 1 + 3 * lanes]
    free = floats[1 + 3 * lanes : 1 + 4 * lanes]
    end = floats[1 + 4 * lanes :]
    running = scratch[:lanes]  # operator on the lane, -1 none
    row = scratch[lanes : 2 * lanes]
    sequence = scratch[2 * lanes : 3 * lanes]  # place among starts, -1 while it waits, -2 once put off
    rank = scratch[3 * lanes : 4 * lanes]
    cursor = scratch[4 * lanes : 5 * lanes]
    heads = scratch[5 * lanes : 6 * lanes + 1]
    rest = scratch[7 * lanes + 1 :]
    queue = rest[:count]
    place_of = rest[count : 2 * count]
    pending = rest[2 * count : 3 * count]
    first_waiter = rest[3 * count : 4 * count]
    next_waiter = rest[4 * count : 5 * count]
    held_by = rest[5 * count : 6 * count + 1]
    heads[:] = 0
    for index in range(count):
        first_waiter[index] = -1
        heads[lane_of[index] + 1] += 1
        pending[index] = pred_ptr[index + 1] - pred_ptr[index]
    for lane in range(lanes):
        free[lane] = -1.0
        running[lane] = -1
        heads[lane + 1] += heads[lane]
        cursor[lane] = heads[lane]
    for place in range(count):
        index = order[place]
        place_of[index] = place
        lane = lane_of[index]
        queue[cursor[lane]] = index
        cursor[lane] += 1
        before = wait[index]
        if before >= 0:
            pending[index] += 1
            next_waiter[index] = first_waiter[before]
            first_waiter[before] = index
    for lane in range(lanes):
        cursor[lane] = heads[lane]
    time = 0.0
    started = 0
    finished = 0
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
                        ready += cross
                    if ready > start:
                        start = ready
                        held = before
                before = wait[index]
                if before >= 0:
                    ready = end[before]
                    if lane_of[before] != lane:
                        ready += cross
                    if ready > start:
                        start = ready
                        held = before
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
                when = time + remaining[lane] * max(slowdown[lane], MIN_SLOWDOWN)
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
                            remaining[lane] = max(0.0, remaining[lane] - passed / max(slowdown[lane], MIN_SLOWDOWN))
                continue
        if best_kind == 1:
            own = 1.0
            for lane in range(lanes):
                if running[lane] >= 0 and sequence[lane] >= 0:
                    if moved:
                        remaining[lane] = max(0.0, remaining[lane] - passed / max(slowdown[lane], MIN_SLOWDOWN))
                    own += excess_last[chosen, row[lane]]
                    slowdown[lane] += excess_first[row[lane], chosen]
            if start_us.shape[0] > 0:
                start_us[running[best_lane]] = time
            slowdown[best_lane] = own
            sequence[best_lane] = started
            started += 1
            continue
        done = running[best_lane]
        since = sequence[best_lane]
        running[best_lane] = -1
        others = 0
        last = 0
        for lane in range(lanes):
            if running[lane] >= 0 and sequence[lane] >= 0:
                if moved:
                    remaining[lane] = max(0.0, remaining[lane] - passed / max(slowdown[lane], MIN_SLOWDOWN))
                if sequence[lane] < since:
                    slowdown[lane] -= excess_first[row[lane], chosen]
                else:
                    slowdown[lane] -= excess_last[row[lane], chosen]
                others += 1
                last = lane
        if others == 1:
            slowdown[last] = 1.0
        end[done] = time
        free[best_lane] = time
        finished += 1
        held_by[count] = done
        for place in range(succ_ptr[done], succ_ptr[done + 1]):
            pending[succ_idx[place]] -= 1
        waiter = first_waiter[done]
        while waiter >= 0:
            pending[waiter] -= 1
            waiter = next_waiter[waiter]
    return time + latency[2]


@_compiled(f"void({_F1},{_I1},i8,i8,i8,i8,i8,i4[:,::1],{_F1},{_I1},{_I1},{_F1})")
def commit(  # type: ignore[no-untyped-def]
    floats, ints, lanes, count, used_lanes, operator, width, kernel, solo, pred_ptr, pred_idx, latency
):
    """Place a ready operator on the idle lane with the earliest start.

    An operator that could have started before now on that lane was held back on purpose; it gets a wait for the last operator that
    finished, because without that edge the exported schedule would start it earlier than simulated here.
    """
    time = floats[0]
    event = ints[3]
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
                ready_us += latency[1]
            if ready_us > start:
                start = ready_us
        wait = -1
        if start < time:
            wait = event
            start = max(start, time + latency[1])
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


@_compiled(f"i8({_F1},{_I1},i8,i8,{_I1},{_I1},{_F2},{_F2},{_F1})")
def advance_to_finish(floats, ints, lanes, count, succ_ptr, succ_idx, excess_first, excess_last, latency):  # type: ignore[no-untyped-def]
    """Go on until an operator has finished and its successors that became ready are listed; -2 if nothing is placed."""
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
                when = time + floats[1 + lanes + lane] * max(floats[1 + 2 * lanes + lane], MIN_SLOWDOWN)
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
            for lane in range(lanes):
                if ints[HEADER + lane] >= 0 and ints[HEADER + 2 * lanes + lane] >= 0:
                    left = floats[1 + lanes + lane] - passed / max(floats[1 + 2 * lanes + lane], MIN_SLOWDOWN)
                    floats[1 + lanes + lane] = max(0.0, left)
            floats[0] = best
        chosen = ints[HEADER + lanes + best_lane]
        if best_kind == 1:
            company = 0
            for lane in range(lanes):
                if ints[HEADER + lane] >= 0 and ints[HEADER + 2 * lanes + lane] >= 0:
                    company += 1
            if company > 0 and latency[3] > 0.0 and ints[HEADER + 2 * lanes + best_lane] == -1:
                floats[1 + best_lane] += latency[3]
                ints[HEADER + 2 * lanes + best_lane] = -2
                continue
            slowdown = 1.0
            for lane in range(lanes):
                if ints[HEADER + lane] >= 0 and ints[HEADER + 2 * lanes + lane] >= 0:
                    other = ints[HEADER + lanes + lane]
                    slowdown += excess_last[chosen, other]
                    floats[1 + 2 * lanes + lane] += excess_first[other, chosen]
            floats[1 + 2 * lanes + best_lane] = slowdown
            ints[HEADER + 2 * lanes + best_lane] = ints[0]
            ints[0] += 1
            continue
        operator = ints[HEADER + best_lane]
        sequence = ints[HEADER + 2 * lanes + best_lane]
        ints[HEADER + best_lane] = -1
        running = 0
        last_running = -1
        for lane in range(lanes):
            if ints[HEADER + lane] >= 0 and ints[HEADER + 2 * lanes + lane] >= 0:
                other = ints[HEADER + lanes + lane]
                if ints[HEADER + 2 * lanes + lane] < sequence:
                    floats[1 + 2 * lanes + lane] -= excess_first[other, chosen]
                else:
                    floats[1 + 2 * lanes + lane] -= excess_last[other, chosen]
                running += 1
                last_running = lane
        if running == 1:
            floats[1 + 2 * lanes + last_running] = 1.0
        floats[1 + 4 * lanes + operator] = floats[0]
        floats[1 + 3 * lanes + best_lane] = floats[0]
        break
    base = HEADER + 4 * lanes
    ints[2] += 1
    ints[3] = operator
    for place in range(succ_ptr[operator], succ_ptr[operator + 1]):
        after = succ_idx[place]
        ints[base + after] -= 1
        if ints[base + after] == 0:
            ints[base + 5 * count + ints[4]] = after
            ints[4] += 1
    return operator


@_compiled(f"i8({_I1},i8,i8)")
def idle_lanes(ints, lanes, used_lanes):  # type: ignore[no-untyped-def]
    """How many of the first ``used_lanes`` lanes hold nothing."""
    idle = 0
    for lane in range(used_lanes):
        if ints[HEADER + lane] < 0:
            idle += 1
    return idle


@_compiled(f"f8({_ARRAYS},{_F1},{_I1},i8,{_F1},{_F1},{_I1},i8)")
def list_finish(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency,
    floats, ints, lanes, priority, policy, fastest, narrow,
):  # fmt: skip
    """Complete a prefix by list scheduling; the makespan in microseconds. The rows then hold the whole schedule.

    Args:
        pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency: ``Problem.arrays``.
        floats, ints: a state's rows, after ``reset_state`` or any number of commits.
        lanes: lane slots.
        priority: float64 ``[n]``, higher goes first, microseconds.
        policy: alpha (weight of the interference cost against the priority), gate (an operator whose interference cost exceeds this many
            times its own time is held back while anything runs), wide_below (the fastest width is chosen when at most this many others
            are ready or running), lanes used.
        fastest: int32 ``[n]``: width index with the least time alone.
        narrow: width index taken otherwise.
    """
    count = kernel.shape[0]
    base = HEADER + 4 * lanes
    ready = base + 5 * count
    used = min(lanes, max(1, int(policy[3])))
    while ints[2] < count:
        idle = idle_lanes(ints, lanes, used)
        while idle > 0 and ints[4] > 0:
            best = -UNREACHED
            chosen = -1
            chosen_width = 0
            others = ints[4] - 1 + used - idle
            for place in range(ints[4]):
                operator = ints[ready + place]
                width = narrow
                if others <= policy[2]:
                    width = fastest[operator]
                row = kernel[operator, width]
                score = priority[operator]
                if idle < used:
                    cost = 0.0  # time lost on both sides, as if it started now beside what is placed
                    for lane in range(lanes):
                        if ints[HEADER + lane] >= 0:
                            other = ints[HEADER + lanes + lane]
                            overlap = min(solo[row], floats[1 + lanes + lane])
                            cost += overlap * (excess_last[row, other] + excess_first[other, row])
                    if cost > policy[1] * solo[row]:
                        continue
                    score -= policy[0] * cost
                if score > best or (score == best and operator < chosen):
                    best = score
                    chosen = operator
                    chosen_width = width
            if chosen < 0:
                break
            commit(floats, ints, lanes, count, used, chosen, chosen_width, kernel, solo, pred_ptr, pred_idx, latency)
            idle -= 1
        if advance_to_finish(floats, ints, lanes, count, succ_ptr, succ_idx, excess_first, excess_last, latency) == -2:
            return UNREACHED
    return floats[0] + latency[2]


@_inlined
def prefix_key(floats, ints, lanes, count, words):  # type: ignore[no-untyped-def]
    """A hash of what decides a prefix's future: what is placed, what runs, and how much of it is left. ``words`` int64 ``[n]``."""
    base = HEADER + 4 * lanes
    key = 0
    for index in range(count):
        if ints[base + count + index] >= 0:
            key ^= words[index]
    for lane in range(lanes):
        operator = ints[HEADER + lane]
        if operator >= 0:
            key += words[operator] * (1 + int(floats[1 + lanes + lane] * 1e4))
    return key ^ int(floats[0] * 1e4)


@_compiled(f"i8({_ARRAYS},{_F1},{_I1},i8,i8,i8,i8,i8,i8[::1])")
def extend(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency,
    floats, ints, lanes, used, operator, width, hold, words,
):  # fmt: skip
    """One decision of a beam: commit, then go on to the next decision (past the next finish if ``hold``). Returns ``prefix_key``."""
    count = kernel.shape[0]
    commit(floats, ints, lanes, count, used, operator, width, kernel, solo, pred_ptr, pred_idx, latency)
    go_on = hold
    while go_on or (ints[2] < count and (ints[4] == 0 or idle_lanes(ints, lanes, used) == 0)):
        advance_to_finish(floats, ints, lanes, count, succ_ptr, succ_idx, excess_first, excess_last, latency)
        go_on = 0
    return prefix_key(floats, ints, lanes, count, words)


@_compiled(f"i8({_ARRAYS},{_F1},{_I1},i8,i8,{_F1},{_I1},{_I1},i8)")
def branches(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency,
    floats, ints, lanes, used, priority, widths, out, most,
):  # fmt: skip
    """List the decisions of one state: triples (operator, width index, hold) in ``out``; returns how many.

    The ``most`` operators of highest priority, each at each allowed width. Holding the other lanes back until the next finish is
    offered only where everything else that is ready would lose more than half its own time by starting beside the operator.
    """
    count = kernel.shape[0]
    ready = HEADER + 4 * lanes + 5 * count
    found = 0
    last_priority = UNREACHED
    last_operator = -1
    idle = idle_lanes(ints, lanes, used)
    for _ in range(min(most, ints[4])):
        best = -UNREACHED
        chosen = count
        for place in range(ints[4]):
            operator = ints[ready + place]
            value = priority[operator]
            if value > last_priority or (value == last_priority and operator <= last_operator):
                continue
            if value > best or (value == best and operator < chosen):
                best = value
                chosen = operator
        if chosen == count:
            break
        last_priority = best
        last_operator = chosen
        for place in range(widths.shape[0]):
            width = widths[place]
            out[3 * found] = chosen
            out[3 * found + 1] = width
            out[3 * found + 2] = 0
            found += 1
            if idle < 2 or ints[4] < 2:
                continue
            contended = True
            row = kernel[chosen, width]
            for other_place in range(ints[4]):
                other = ints[ready + other_place]
                if other == chosen:
                    continue
                other_row = kernel[other, widths[0]]
                overlap = min(solo[row], solo[other_row])
                lost = overlap * (excess_last[other_row, row] + excess_first[row, other_row])
                if lost <= 0.5 * solo[other_row]:
                    contended = False
                    break
            if contended:
                out[3 * found] = chosen
                out[3 * found + 1] = width
                out[3 * found + 2] = 1
                found += 1
    return found


@_inlined
def prefix_bound(floats, ints, lanes, count, used, kernel, solo, bottom):  # type: ignore[no-untyped-def]
    """Guide of the plain beam: the larger of longest path and evenly shared work from here, microseconds, plus a little of the other."""
    time = floats[0]
    base = HEADER + 4 * lanes
    path = time
    work = 0.0
    for lane in range(lanes):
        operator = ints[HEADER + lane]
        if operator >= 0:
            left = floats[1 + lanes + lane] * max(1.0, floats[1 + 2 * lanes + lane])
            path = max(path, time + left + bottom[operator] - solo[kernel[operator, 0]])
            work += left
    for index in range(count):
        if ints[base + count + index] < 0:
            work += solo[kernel[index, 0]]
            if ints[base + index] == 0:
                path = max(path, time + bottom[index])
    share = time + work / used
    return max(path, share) + 0.05 * min(path, share)


@_compiled_on_demand(f"i8({_ARRAYS},{_F2},i4[:,::1],i8,i8,i8,{_F1},{_F1},{_I1},i8,i8[::1],i8[:,::1],{_F1},{_F1},{_I1})")
def expand_level(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency,
    beam_floats, beam_ints, states, lanes, used, bottom, priority, widths, most, words, children, scores, floats, ints,
):  # fmt: skip
    """List every child of every state of a beam, scored by ``prefix_bound``; returns how many there are.

    Args:
        pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency: ``Problem.arrays``.
        beam_floats, beam_ints: rows of ``states`` prefixes.
        states, lanes, used: prefixes in the beam, lane slots, lanes used.
        bottom: float64 ``[n]``, longest path to the end, microseconds.
        priority, widths, most: as in ``branches``.
        words: int64 ``[n]``, as in ``prefix_key``.
        children: int64 ``[capacity, 5]``: parent, operator, width index, hold, key. Overwritten.
        scores: float64 ``[capacity]``, microseconds. Overwritten.
        floats, ints: one state's rows, overwritten.
    """
    count = kernel.shape[0]
    found = 0
    out = np.empty(6 * most * widths.shape[0] + 6, dtype=np.int32)
    for state in range(states):
        options = branches(
            pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency,
            beam_floats[state], beam_ints[state], lanes, used, priority, widths, out, most,
        )  # fmt: skip
        for option in range(options):
            if found == children.shape[0]:
                return found
            for place in range(floats.shape[0]):
                floats[place] = beam_floats[state, place]
            for place in range(ints.shape[0]):
                ints[place] = beam_ints[state, place]
            key = extend(
                pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency,
                floats, ints, lanes, used, out[3 * option], out[3 * option + 1], out[3 * option + 2], words,
            )  # fmt: skip
            children[found, 0] = state
            children[found, 1] = out[3 * option]
            children[found, 2] = out[3 * option + 1]
            children[found, 3] = out[3 * option + 2]
            children[found, 4] = key
            scores[found] = prefix_bound(floats, ints, lanes, count, used, kernel, solo, bottom)
            found += 1
    return found


@_compiled("f8(u8[::1])")
def next_uniform(random_state):  # type: ignore[no-untyped-def]
    """Uniform in [0, 1). *Source:* Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (SplitMix64)."""
    random_state[0] += np.uint64(0x9E3779B97F4A7C15)
    mixed = random_state[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return float(mixed >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@_inlined
def draw_position(  # type: ignore[no-untyped-def]
    order, position, operator, pred_ptr, pred_idx, succ_ptr, succ_idx, wait, waits, near_share, reach, random_state
):
    """Another legal place in the launch order for ``operator``: with chance ``near_share`` at most ``reach`` from its own."""
    count = order.shape[0]
    low = -1
    high = count
    own = position[operator]
    for place in range(pred_ptr[operator], pred_ptr[operator + 1]):
        low = max(low, position[pred_idx[place]])
    for place in range(succ_ptr[operator], succ_ptr[operator + 1]):
        high = min(high, position[succ_idx[place]])
    if waits > 0:
        if wait[operator] >= 0:
            low = max(low, position[wait[operator]])
        for index in range(count):
            if wait[index] == operator:
                high = min(high, position[index])
    if high - low <= 2:
        return own
    # Far moves change what runs beside everything in between; near ones mostly refine. Both are needed.
    if next_uniform(random_state) < near_share:
        low = max(low, own - reach - 1)
        high = min(high, own + reach + 1)
    chosen = low + 1 + int(next_uniform(random_state) * (high - low - 2))
    if chosen >= own:
        chosen += 1
    return chosen


@_inlined
def draw_partner(  # type: ignore[no-untyped-def]
    order, position, operator, pred_ptr, pred_idx, succ_ptr, succ_idx, wait, waits, near_share, reach, random_state
):
    """An operator that may change places with ``operator`` in the launch order, or -1: nothing in between may depend on either."""
    count = order.shape[0]
    own = position[operator]
    low = 0
    high = count
    if next_uniform(random_state) < near_share:
        low = max(low, own - reach)
        high = min(high, own + reach + 1)
    place = low + int(next_uniform(random_state) * (high - low))
    if place == own:
        return -1
    partner = order[place]
    early = operator
    late = partner
    if place < own:
        early = partner
        late = operator
    first = position[early]
    last = position[late]
    for edge in range(succ_ptr[early], succ_ptr[early + 1]):
        if position[succ_idx[edge]] <= last:
            return -1
    for edge in range(pred_ptr[late], pred_ptr[late + 1]):
        if position[pred_idx[edge]] >= first:
            return -1
    if waits > 0:
        if wait[late] >= 0 and position[wait[late]] >= first:
            return -1
        for index in range(count):
            if wait[index] == early and position[index] <= last:
                return -1
    return partner


@_compiled(f"void({_I1},{_I1},i8,i8)")
def move_operator(order, position, source, target):  # type: ignore[no-untyped-def]
    """Move the operator at place ``source`` of the launch order to place ``target``."""
    operator = order[source]
    if source < target:
        for place in range(source, target):
            order[place] = order[place + 1]
            position[order[place]] = place
    else:
        for place in range(source, target, -1):
            order[place] = order[place - 1]
            position[order[place]] = place
    order[target] = operator
    position[operator] = target


@_compiled(f"void({_I1},{_I1},{_I1},{_I1},i8,i8)")
def exchange(order, position, lane_of, width_index, first, second):  # type: ignore[no-untyped-def]
    """Two operators change places and, if neither is wide (``problem.one_wide_lane``), lanes. Done twice it changes nothing."""
    place = position[first]
    position[first] = position[second]
    position[second] = place
    order[place] = second
    order[position[first]] = first
    if width_index[first] == 0 and width_index[second] == 0:
        lane = lane_of[first]
        lane_of[first] = lane_of[second]
        lane_of[second] = lane


@_compiled(f"void({_I1},{_I1},{_I1},i8,i8,i8)")
def exchange_tails(order, lane_of, width_index, begin, first, second):  # type: ignore[no-untyped-def]
    """From place ``begin`` of the launch order on, two lanes change names. Done twice it changes nothing."""
    for place in range(begin, order.shape[0]):
        operator = order[place]
        if width_index[operator] == 0:
            if lane_of[operator] == first:
                lane_of[operator] = second
            elif lane_of[operator] == second:
                lane_of[operator] = first


@_inlined
def draw_wait(order, position, lane_of, operator, wait, window, pred_ptr, pred_idx, random_state):  # type: ignore[no-untyped-def]
    """A new extra wait for ``operator``: -1 (more often if it has one), or a recent operator of another lane."""
    if wait[operator] >= 0 and next_uniform(random_state) < 0.7:
        return -1
    place = position[operator]
    if place == 0:
        return -1
    back = 1 + int(next_uniform(random_state) * min(place, window))
    before = order[place - back]
    if lane_of[before] == lane_of[operator]:
        return -1
    for edge in range(pred_ptr[operator], pred_ptr[operator + 1]):
        if pred_idx[edge] == before:
            return -1
    return before


@_compiled("void(i4[:,::1],i4[:,::1])")
def copy_rows(target, source):  # type: ignore[no-untyped-def]
    """Copy ``source`` into ``target``; an array assignment would compile the text of its error message, which takes seconds."""
    for row in range(source.shape[0]):
        for place in range(source.shape[1]):
            target[row, place] = source[row, place]


@_compiled_on_demand(f"i8({_ARRAYS},i8,i4[:,::1],i4[:,::1],{_F1},{_F1},{_I1},{_F1},{_F1},i8,i8,i8,u8[::1],{_F1},{_I1})")
def anneal_steps(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency,
    lanes, current, best, values, bound, widths, moves, temperatures, first_step, steps, total_steps, random_state,
    floats, scratch,
):  # fmt: skip
    """Simulated annealing on launch order, lanes, widths and extra waits; returns how many schedules were simulated (``steps``, or
    fewer where hardly any move changes anything).

    Args:
        pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency: ``Problem.arrays``.
        lanes: lane slots.
        current, best: int32 ``[5, n]``: launch order, place in it, lane, width index, extra wait. Updated.
        values: float64 ``[2]``: makespan of ``current`` and of ``best``, microseconds. Updated.
        bound: as in ``evaluate``.
        widths: allowed width indices.
        moves: float64 ``[9]``, cumulative chances of: lane; order; lane and order; exchange of two operators; exchange of two lanes' tails;
            width; extra wait; then the share of near order moves, and the share of moves of operators on the critical chain.
        temperatures: float64 ``[2]``, first and last, microseconds; geometric between.
        first_step, steps, total_steps: which part of the whole run this call does.
        random_state: uint64 ``[1]``.
        floats, scratch: as in ``evaluate``.
    """
    count = kernel.shape[0]
    no_starts = np.empty(0, dtype=np.float64)
    order, position, lane_of, width_index, wait = current[0], current[1], current[2], current[3], current[4]
    waits = 0
    for index in range(count):
        if wait[index] >= 0:
            waits += 1
    held_by = scratch[scratch.shape[0] - count - 1 :]
    chain = np.empty(count, dtype=np.int32)  # operators that decide the makespan of the current schedule
    chain_length = 0
    simulated = 0
    cooling = np.log(temperatures[1] / temperatures[0])
    for _ in range(4 * steps):
        if simulated == steps:
            break
        temperature = temperatures[0] * np.exp(cooling * (first_step + simulated) / total_steps)
        if chain_length > 0 and next_uniform(random_state) < moves[8]:
            operator = chain[int(next_uniform(random_state) * chain_length)]
        else:
            operator = int(next_uniform(random_state) * count)
        move = next_uniform(random_state)
        old_lane, old_width, old_wait, old_place = lane_of[operator], width_index[operator], wait[operator], position[operator]
        new_lane, new_width, new_wait, new_place = old_lane, old_width, old_wait, old_place
        partner = -1
        tail = -1
        if move < moves[0] or moves[1] <= move < moves[2]:
            new_lane = int(next_uniform(random_state) * (lanes - 1))
            if new_lane >= old_lane:
                new_lane += 1
        if moves[0] <= move < moves[2]:
            new_place = draw_position(
                order, position, operator, pred_ptr, pred_idx, succ_ptr, succ_idx, wait, waits, moves[7], 3 * lanes, random_state
            )  # fmt: skip
        elif moves[2] <= move < moves[3]:
            partner = draw_partner(
                order, position, operator, pred_ptr, pred_idx, succ_ptr, succ_idx, wait, waits, moves[7], 3 * lanes, random_state
            )  # fmt: skip
        elif moves[3] <= move < moves[4]:
            tail = int(next_uniform(random_state) * (lanes - 1))
            if tail >= old_lane:
                tail += 1
        elif moves[4] <= move < moves[5]:
            new_width = widths[int(next_uniform(random_state) * widths.shape[0])]
        elif move >= moves[5]:
            new_wait = draw_wait(order, position, lane_of, operator, wait, 4 * lanes, pred_ptr, pred_idx, random_state)
        if new_width > 0:
            new_lane = 0  # as problem.one_wide_lane
        same = new_lane == old_lane and new_width == old_width and new_wait == old_wait and new_place == old_place
        if same and partner < 0 and tail < 0:
            continue
        lane_of[operator] = new_lane
        width_index[operator] = new_width
        wait[operator] = new_wait
        if new_place != old_place:
            move_operator(order, position, old_place, new_place)
        if partner >= 0:
            exchange(order, position, lane_of, width_index, operator, partner)
        if tail >= 0:
            exchange_tails(order, lane_of, width_index, old_place, old_lane, tail)
        limit = values[0] - temperature * np.log(max(next_uniform(random_state), 1e-300))
        value = evaluate(
            pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency,
            lanes, order, lane_of, width_index, wait, bound, limit, floats, no_starts, scratch,
        )  # fmt: skip
        simulated += 1
        if value <= limit:
            values[0] = value
            chain_length = 0
            holder = held_by[count]
            while holder >= 0:
                chain[chain_length] = holder
                chain_length += 1
                holder = held_by[holder]
            waits += int(new_wait >= 0) - int(old_wait >= 0)
            if value < values[1]:
                values[1] = value
                copy_rows(best, current)
            continue
        if tail >= 0:
            exchange_tails(order, lane_of, width_index, old_place, old_lane, tail)
        if partner >= 0:
            exchange(order, position, lane_of, width_index, operator, partner)
        if new_place != old_place:
            move_operator(order, position, new_place, old_place)
        lane_of[operator] = old_lane
        width_index[operator] = old_width
        wait[operator] = old_wait
    return simulated


@_compiled_on_demand(f"void({_ARRAYS},i8,{_I1},{_I1},{_I1},{_I1},{_F1},{_I1},{_I1},i8,{_F1})")
def enumerate_schedules(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency,
    lanes, best_order, best_lane, width_index, wait, floats, scratch, stack, most, result,
):  # fmt: skip
    """Simulate every launch order with every assignment to alike lanes, depth first.

    Args:
        pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency: ``Problem.arrays``.
        lanes: lane slots.
        best_order, best_lane: int32 ``[n]``, overwritten with the best schedule.
        width_index, wait: as in ``evaluate``.
        floats, scratch: as in ``evaluate``.
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
    no_starts = np.empty(0, dtype=np.float64)
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
                pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency,
                lanes, order, lane_of, width_index, wait, no_bound, result[0], floats, no_starts, scratch,
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


@_compiled_on_demand(f"void({_ARRAYS},i8,i4[:,::1],i4[:,::1],{_F1},{_I1},i8,u8[::1],{_F1},{_I1})")
def random_schedules(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency,
    lanes, current, best, value, widths, trials, random_state, floats, scratch,
):  # fmt: skip
    """Draw ``trials`` schedules and keep the best: each next operator from all that are ready, lanes and widths uniformly.

    Args:
        pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency: ``Problem.arrays``.
        lanes: lane slots.
        current, best: int32 ``[5, n]``: launch order, scratch, lane, width index, extra wait (-1). ``best`` is updated.
        value: float64 ``[1]``: makespan of ``best``, microseconds. Updated.
        widths: allowed width indices.
        trials: how many.
        random_state: uint64 ``[1]``.
        floats, scratch: as in ``evaluate``.
    """
    count = kernel.shape[0]
    no_bound = np.zeros(count, dtype=np.float64)
    no_starts = np.empty(0, dtype=np.float64)
    pending = np.empty(count, dtype=np.int32)
    ready = np.empty(count, dtype=np.int32)
    for _ in range(trials):
        waiting = 0
        for index in range(count):
            pending[index] = pred_ptr[index + 1] - pred_ptr[index]
            current[2, index] = int(next_uniform(random_state) * lanes)
            current[3, index] = widths[int(next_uniform(random_state) * widths.shape[0])]
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
            pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, excess_first, excess_last, latency,
            lanes, current[0], current[2], current[3], current[4], no_bound, value[0], floats, no_starts, scratch,
        )  # fmt: skip
        if makespan < value[0]:
            value[0] = makespan
            copy_rows(best, current)
