"""What both simulators do with lanes: queue the operators, let go of those that waited.

When the next operator of a lane may start is written out in each simulator: inlined from here, it made annealing clearly slower.

The arrays are parts of a simulator's scratch. For each lane: ``heads`` int32 ``[K + 1]``, where its operators begin in ``queue``, and
``cursor``, the next of them. For each operator: ``pending``, how many it waits for; the operators that have an extra wait for it are a
list, ``first_waiter`` and then ``next_waiter``, which ends with -1.
"""

from __future__ import annotations

from autosched.search.compiled.cache import I1, compiled, inlined


@inlined
def queue_operators(  # type: ignore[no-untyped-def]
    order, lane_of, wait, pred_ptr, lanes, heads, cursor, queue, place_of, pending, first_waiter, next_waiter
):
    """Fill the queues from a launch order; ``place_of`` gets each operator's place in it."""
    count = order.shape[0]
    heads[:] = 0
    for index in range(count):
        first_waiter[index] = -1
        heads[lane_of[index] + 1] += 1
        pending[index] = pred_ptr[index + 1] - pred_ptr[index]
    for lane in range(lanes):
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


@compiled(f"i8({I1},{I1},{I1},{I1},i8)")
def open_phase(order, lane_of, width_index, heads, place):  # type: ignore[no-untyped-def]
    """Let a team's lanes go on from ``place`` of the launch order: a wide operator alone, or the narrow ones up to the next wide one.

    ``heads`` then end each lane's queue behind the last operator that may begin. Returns the place of the first that may not.
    """
    first = place
    while place < order.shape[0] and (place == first or (width_index[order[place]] == 0 and width_index[order[first]] == 0)):
        heads[lane_of[order[place]] + 1] += 1
        place += 1
    return place


@inlined
def release(done, succ_ptr, succ_idx, pending, first_waiter, next_waiter):  # type: ignore[no-untyped-def]
    """``done`` has finished: whatever waits for it waits for one less."""
    for place in range(succ_ptr[done], succ_ptr[done + 1]):
        pending[succ_idx[place]] -= 1
    waiter = first_waiter[done]
    while waiter >= 0:
        pending[waiter] -= 1
        waiter = next_waiter[waiter]
