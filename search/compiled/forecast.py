"""What annealing can say of a move before it simulates it: that it changes nothing, or that it surely makes the run too long.

All of it comes from the times of the current schedule (``seen``, float64 ``[3, n]``, rows below), which cost nothing:
they were simulated when it was accepted. Zeros say that nothing is known, and then nothing is ruled out.

*Source:* estimating a move by the longest path through what moves, every operator taking the time it took: Taillard, "Parallel Taboo Search
Techniques for the Job Shop Scheduling Problem", ORSA Journal on Computing 6, 1994; Balas and Vazacopoulos, Management Science 44, 1998.
"""

from __future__ import annotations

from autosched.search.compiled.cache import F1, F2, I1, compiled, inlined
from autosched.search.compiled.lanes import is_wide

BEGAN, ENDED, TAIL = range(3)
"""Rows of ``seen``: start and end of each operator in the current schedule, and from its end the longest path of waits to the end of the
run; microseconds."""


@compiled(f"void({I1},{I1},{I1},{I1},{I1},{F1},{F2},{F1})")
def find_tails(order, lane_of, wait, pred_ptr, pred_idx, latency, seen, next_tail):  # type: ignore[no-untyped-def]
    """Set the row ``TAIL`` of ``seen`` from the other two. ``next_tail`` is float64 ``[lanes]``, overwritten."""
    seen[TAIL, :] = 0.0
    next_tail[:] = 0.0
    for place in range(order.shape[0] - 1, -1, -1):
        operator = order[place]
        lane = lane_of[operator]
        tail = max(seen[TAIL, operator], next_tail[lane])
        seen[TAIL, operator] = tail
        tail += seen[ENDED, operator] - seen[BEGAN, operator]
        next_tail[lane] = tail + latency[0]
        for edge in range(pred_ptr[operator], pred_ptr[operator + 1]):
            before = pred_idx[edge]
            crossing = latency[1] if lane_of[before] != lane else 0.0
            seen[TAIL, before] = max(seen[TAIL, before], tail + crossing)
        before = wait[operator]
        if before >= 0:
            crossing = latency[1] if lane_of[before] != lane else 0.0
            seen[TAIL, before] = max(seen[TAIL, before], tail + crossing)


@compiled(f"f8(i8,i8,i8,i8,{I1},{I1},{I1},{I1},{I1},{I1},{F1},{F2})")
def path_through(  # type: ignore[no-untyped-def]
    operator, gone, lane, place, order, lane_of, pred_ptr, pred_idx, succ_ptr, succ_idx, latency, seen
):
    """About how long the longest path through ``operator`` would be (microseconds, without the fixed cost) if it ran on ``lane``, launched
    before what is at ``place`` of the order. ``gone`` is an operator that leaves that lane, or -1."""
    head = 0.0
    at = place - 1
    while at >= 0:
        other = order[at]
        if lane_of[other] == lane and other != operator and other != gone:
            head = seen[ENDED, other] + latency[0]
            break
        at -= 1
    for edge in range(pred_ptr[operator], pred_ptr[operator + 1]):
        before = pred_idx[edge]
        crossing = latency[1] if lane_of[before] != lane else 0.0
        head = max(head, seen[ENDED, before] + crossing)
    tail = 0.0
    at = place
    while at < order.shape[0]:
        other = order[at]
        if lane_of[other] == lane and other != operator and other != gone:
            tail = seen[ENDED, other] - seen[BEGAN, other] + seen[TAIL, other] + latency[0]
            break
        at += 1
    for edge in range(succ_ptr[operator], succ_ptr[operator + 1]):
        after = succ_idx[edge]
        crossing = latency[1] if lane_of[after] != lane else 0.0
        tail = max(tail, seen[ENDED, after] - seen[BEGAN, after] + seen[TAIL, after] + crossing)
    return head + seen[ENDED, operator] - seen[BEGAN, operator] + tail


@inlined
def passes_nobody(order, lane_of, width_index, source, target, latency):  # type: ignore[no-untyped-def]
    """Whether the operator at place ``source`` of the launch order can go to ``target`` without any effect: it stays between the same two
    of its lane, and where lanes are one team it neither passes a wide operator nor is one."""
    operator = order[source]
    lane = lane_of[operator]
    alone = is_wide(width_index[operator], latency)
    for place in range(min(source, target), max(source, target) + 1):
        other = order[place]
        if other != operator and (lane_of[other] == lane or (latency[7] > 0.0 and (alone or is_wide(width_index[other], latency)))):
            return False
    return True


@inlined
def is_idle(operator, before, latency, seen):  # type: ignore[no-untyped-def]
    """Whether a new wait of ``operator`` for ``before`` would have no effect; its start may hold a put-off that comes after the wait."""
    return seen[ENDED, before] + latency[1] + latency[3] < seen[BEGAN, operator]
