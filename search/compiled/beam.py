"""What a beam (:mod:`autosched.search.beam`) does with one prefix: list its decisions, carry one out, name the state it leads to."""

from __future__ import annotations

from autosched.search.compiled.cache import ARRAYS, F1, I1, compiled, inlined
from autosched.search.compiled.layout import HEADER, UNREACHED
from autosched.search.compiled.prefix import advance_to_finish, commit, idle_lanes, run_alone


@inlined
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


@compiled(f"i8({ARRAYS},{F1},{I1},i8,i8,i8,i8,i8,i8[::1])")
def extend(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency,
    floats, ints, lanes, used, operator, width, hold, words,
):  # fmt: skip
    """One decision of a beam: commit, then go on to the next decision (past the next finish if ``hold``). Returns ``prefix_key``."""
    count = kernel.shape[0]
    if width > 0 and latency[7] > 0.0:
        run_alone(
            pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency,
            floats, ints, lanes, operator, width,
        )  # fmt: skip
        return prefix_key(floats, ints, lanes, count, words)
    commit(floats, ints, lanes, count, used, operator, width, kernel, solo, pred_ptr, pred_idx, latency)
    go_on = hold
    while go_on or (ints[2] < count and (ints[4] == 0 or idle_lanes(ints, used) == 0)):
        advance_to_finish(floats, ints, lanes, count, succ_ptr, succ_idx, room, excess_first, excess_last, latency)
        go_on = 0
    return prefix_key(floats, ints, lanes, count, words)


@compiled(f"i8({ARRAYS},{F1},{I1},i8,i8,{F1},{I1},{I1},i8)")
def branches(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency,
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
    idle = idle_lanes(ints, used)
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
            if idle < 2 or ints[4] < 2 or (width > 0 and latency[7] > 0.0):
                continue  # nobody is there to hold back
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
