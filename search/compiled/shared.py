"""How far a schedule that annealing tries is surely simulated like the current one, and so from which mark its simulation can go on.

Counted in operators that have finished, which no rounding changes: an operator is ready after the last of those it waits for, so until then
it cannot matter whether it, or its place among the operators of its lane, has changed. ``known`` is that of
:mod:`autosched.search.compiled.marks`; extra waits are left out, which errs on the safe side.
"""

from __future__ import annotations

import numpy as np

from autosched.search.compiled.cache import F1, I1, compiled, inlined
from autosched.search.compiled.lanes import is_wide
from autosched.search.compiled.layout import SIDE
from autosched.search.compiled.marks import OPENED, WAS_RANK, mark_at, rows_of


@compiled(f"i8(i8,i8,i8,i8,{I1},{I1},u4[:,::1])")
def finished_before(lane, place, skipped, other, order, lane_of, known):  # type: ignore[no-untyped-def]
    """Rank of the last operator on ``lane`` that is launched before ``place``, without the two that are named; -1 there is none."""
    for at in range(place - 1, -1, -1):
        index = order[at]
        if lane_of[index] == lane and index != skipped and index != other:
            return np.int64(known[WAS_RANK, index])
    return -1


@inlined
def ready_after(operator, before, pred_ptr, pred_idx, known):  # type: ignore[no-untyped-def]
    """The highest rank among an operator's predecessors and ``before``."""
    for edge in range(pred_ptr[operator], pred_ptr[operator + 1]):
        before = max(before, np.int64(known[WAS_RANK, pred_idx[edge]]))
    return before


@compiled(f"i8(i8,i8,i8,i8,i8,{I1},{I1},{I1},{I1},u4[:,::1])")
def next_ready(lane, place, skipped, other, before, order, lane_of, pred_ptr, pred_idx, known):  # type: ignore[no-untyped-def]
    """The least rank after which the next operator on ``lane`` from ``place`` on is ready, if that before it there has rank ``before``."""
    for at in range(place, order.shape[0]):
        index = order[at]
        if lane_of[index] == lane and index != skipped and index != other:
            return ready_after(index, before, pred_ptr, pred_idx, known)
    return order.shape[0]


@inlined
def low_of_lanes(lanes, place, order, lane_of, known):  # type: ignore[no-untyped-def]
    """The least of ``finished_before`` over all lanes."""
    low = order.shape[0]
    for lane in range(lanes):
        low = min(low, finished_before(lane, place, -1, -1, order, lane_of, known))
    return low


@compiled(f"i8(i8,i8,i8,i8,{I1},{I1},{I1},{I1},u4[:,::1])")
def shared_by_move(operator, old_place, new_lane, new_place, order, lane_of, pred_ptr, pred_idx, known):  # type: ignore[no-untyped-def]
    """How many operators surely finish as before if ``operator`` moves, or waits for another, or gets another width, from the current
    schedule. ``new_place`` is that in the new launch order."""
    old_lane = lane_of[operator]
    place = new_place + int(new_place > old_place)
    old = finished_before(old_lane, old_place, operator, -1, order, lane_of, known)
    new = finished_before(new_lane, place, operator, -1, order, lane_of, known)
    shared = ready_after(operator, min(old, new), pred_ptr, pred_idx, known)
    if new_lane != old_lane or new_place != old_place:
        shared = min(shared, next_ready(old_lane, old_place, operator, -1, old, order, lane_of, pred_ptr, pred_idx, known))
        shared = min(shared, next_ready(new_lane, place, operator, -1, new, order, lane_of, pred_ptr, pred_idx, known))
    return shared


@compiled(f"i8(i8,i8,i8,i8,{I1},{I1},{I1},{I1},{I1},u4[:,::1])")
def shared_by_exchange(first, second, first_lane, second_lane, order, lane_of, position, pred_ptr, pred_idx, known):  # type: ignore[no-untyped-def]
    """The same if two operators change places, and are then on ``first_lane`` and ``second_lane``."""
    low = order.shape[0]
    shared = low
    for turn in range(4):
        place = position[first] if turn == 0 or turn == 3 else position[second]
        lane = lane_of[first]
        if turn == 1:
            lane = lane_of[second]
        elif turn == 2:
            lane = first_lane
        elif turn == 3:
            lane = second_lane
        before = finished_before(lane, place, first, second, order, lane_of, known)
        low = min(low, before)
        shared = min(shared, next_ready(lane, place, first, second, before, order, lane_of, pred_ptr, pred_idx, known))
    shared = min(shared, ready_after(first, low, pred_ptr, pred_idx, known))
    return min(shared, ready_after(second, low, pred_ptr, pred_idx, known))


@compiled(f"i8(i8,i8,{I1},{I1},{F1})")
def gate_of(low, high, order, width_index, latency):  # type: ignore[no-untyped-def]
    """``low`` if any operator from that place of the launch order to the place ``high`` is wide, else -1. In a team a wide one is a gate
    between those before it and those after it, and where none is passed the gates stay as they are."""
    for place in range(low, high + 1):
        if is_wide(width_index[order[place]], latency):
            return low
    return -1


@compiled("i8(i8,i8,i8,i8,u4[:,::1],u4[:,::1])")
def mark_for(shared, gate, marks, count, lane_numbers, links):  # type: ignore[no-untyped-def]
    """The last mark, or -1, that the new schedule shares: no more than ``shared`` have finished there, or, if ``gate`` is not -1, none of
    the team's operators from that place on has been opened."""
    for mark in range(marks - 1, -1, -1):
        if gate >= 0:
            if np.int64(lane_numbers[rows_of(mark, links[SIDE, mark]) + OPENED, -1]) < gate:
                return mark
        elif mark_at(mark, marks, count) <= shared:
            return mark
    return -1
