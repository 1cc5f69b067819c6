"""What both simulators do with lanes: link the operators of a schedule, and let go of those that waited.

An operator waits for its predecessors, for the one before it on its lane, and for one more where the schedule says so. When the last of
them has finished it is listed as ready to be placed, so that nobody has to look at every lane after every event.

When the next operator of a lane may start is written out in each simulator: inlined from here, it made annealing clearly slower.

``lane_numbers`` and ``links`` are those of :func:`autosched.search.compiled.layout.workspace`.
"""

from __future__ import annotations

import numpy as np

from autosched.search.compiled.cache import inlined
from autosched.search.compiled.layout import FIRST_WAITER, FOLLOWING, HELD_BY, NEXT_WAITER, OPERATOR, PENDING, PLACE, PREVIOUS, READY


@inlined
def link_operators(order, lane_of, wait, pred_ptr, lanes, gated, lane_numbers, links):  # type: ignore[no-untyped-def]
    """Set everybody's links from a launch order; how many are ready. Where ``gated`` is 1, everybody waits for one event more."""
    count = order.shape[0]
    for slot in range(lanes):
        lane_numbers[OPERATOR, slot] = count
    links[PENDING, count] = count + 1  # nobody follows the last operator of a lane, and nobody is never ready
    links[HELD_BY, count] = count
    ready = 0
    for place in range(count):
        index = np.uint32(order[place])
        lane = np.uint32(lane_of[index])
        previous = lane_numbers[OPERATOR, lane]
        lane_numbers[OPERATOR, lane] = index
        links[PLACE, index] = place
        links[PREVIOUS, index] = previous
        links[FOLLOWING, index] = count
        links[FOLLOWING, previous] = index
        links[FIRST_WAITER, index] = count
        pending = pred_ptr[index + 1] - pred_ptr[index] + gated
        if previous != count:
            pending += 1
        if wait[index] >= 0:
            pending += 1
            awaited = np.uint32(wait[index])
            links[NEXT_WAITER, index] = links[FIRST_WAITER, awaited]
            links[FIRST_WAITER, awaited] = index
        links[PENDING, index] = pending
        lane_numbers[READY, ready] = index
        ready += pending == 0
    return ready


@inlined
def is_wide(width, latency):  # type: ignore[no-untyped-def]
    """Whether a width index is that of several threads; behind those of all widths is the other variant (``Problem.kernel``)."""
    return width > 0 and width < latency[8]


@inlined
def let_go(operator, ready, lane_numbers, links):  # type: ignore[no-untyped-def]
    """``operator`` waits for one less; how many are ready then. Without a branch, because nobody could foresee which way it goes."""
    pending = links[PENDING, operator] - 1
    links[PENDING, operator] = pending
    lane_numbers[READY, ready] = operator
    return ready + (pending == 0)


@inlined
def release(done, ready, succ_ptr, succ_idx, lane_numbers, links):  # type: ignore[no-untyped-def]
    """``done`` has finished: whatever waits for it waits for one less; how many are ready then."""
    count = links.shape[1] - 1
    ready = let_go(links[FOLLOWING, done], ready, lane_numbers, links)
    for edge in range(succ_ptr[done], succ_ptr[done + 1]):
        ready = let_go(np.uint32(succ_idx[edge]), ready, lane_numbers, links)
    waiter = links[FIRST_WAITER, done]
    while waiter != count:
        ready = let_go(waiter, ready, lane_numbers, links)
        waiter = links[NEXT_WAITER, waiter]
    return ready
