"""List scheduling under a policy (:mod:`autosched.search.policies`), from any prefix."""

from __future__ import annotations

from autosched.search.compiled.cache import ARRAYS, F1, I1, compiled
from autosched.search.compiled.layout import HEADER, UNREACHED
from autosched.search.compiled.prefix import advance_to_finish, commit, idle_lanes, run_alone


@compiled(f"f8({ARRAYS},{F1},{I1},i8,{F1},{F1},{I1},i8)")
def list_finish(  # type: ignore[no-untyped-def]
    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency,
    floats, ints, lanes, priority, policy, fastest, narrow,
):  # fmt: skip
    """Complete a prefix by list scheduling; the makespan in microseconds. The rows then hold the whole schedule.

    Args:
        pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency: ``Problem.arrays``.
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
        idle = idle_lanes(ints, used)
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
            if chosen_width > 0 and latency[7] > 0.0:
                run_alone(
                    pred_ptr, pred_idx, succ_ptr, succ_idx, kernel, solo, room, excess_first, excess_last, latency,
                    floats, ints, lanes, chosen, chosen_width,
                )  # fmt: skip
                idle = used
            else:
                commit(floats, ints, lanes, count, used, chosen, chosen_width, kernel, solo, pred_ptr, pred_idx, latency)
                idle -= 1
        if ints[2] == count:
            break  # the last one ran alone
        if advance_to_finish(floats, ints, lanes, count, succ_ptr, succ_idx, room, excess_first, excess_last, latency) == -2:
            return UNREACHED
    return floats[0] + latency[2]
