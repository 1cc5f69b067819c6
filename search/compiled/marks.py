"""Simulating a schedule from where it first differs from one that was simulated before.

A move of annealing leaves all as it was until something that it touches becomes ready. So an evaluation leaves *marks*, the whole state of
the simulation at some counts of finished operators, and that of the next schedule goes on from the last mark that both share
(:mod:`autosched.search.compiled.shared`): the same arithmetic from there on, and the same result to the bit. A mark has two sides, the
current schedule's (row ``SIDE`` of ``links``) and one that evaluations write to, because most schedules that are tried are not taken.

``known`` is uint32 ``[3, n + 1]``: the rows ``HELD_BY``, ``RANK`` and ``FINISHED`` of ``links`` as the current schedule left them.
"""

from __future__ import annotations

import numpy as np

from autosched.search.compiled.cache import inlined
from autosched.search.compiled.forecast import BEGAN, ENDED
from autosched.search.compiled.layout import (
    END,
    FINISHED,
    FIRST_WAITER,
    FOLLOWING,
    HELD_BY,
    NEXT_WAITER,
    OPERATOR,
    PENDING,
    PLACE,
    RANK,
    SIDE,
    START,
    URGENCY,
)

TIME, CROWD, SPIN_UNTIL, SPIN_ROOM = range(4)
"""Rows of the last column of a mark in ``lane_times``."""
OPENED, OPENER, ACTIVE, SHORT, READY_COUNT, LAST = range(6)
"""Rows of the last column of a mark in ``lane_numbers``: variables of the simulation, and ``links[HELD_BY, n]``."""
WAS_HELD_BY, WAS_RANK, WAS_FINISHED = range(3)
"""Rows of ``known``."""


@inlined
def marks_of(lane_times):  # type: ignore[no-untyped-def]
    """How many marks a workspace has."""
    return (lane_times.shape[0] // 6 - 1) // 2


@inlined
def mark_at(mark, marks, count):  # type: ignore[no-untyped-def]
    """How many operators have finished at a mark; more than there are if there is no such mark."""
    if mark >= marks:
        return count + 1
    return (mark + 1) * count // (marks + 1)


@inlined
def rows_of(mark, side):  # type: ignore[no-untyped-def]
    """The first row of one side of a mark."""
    return np.uint32(6 + 12 * mark + 6 * side)


@inlined
def copy_block(source, target, lane_times, lane_numbers):  # type: ignore[no-untyped-def]
    """Copy the six rows from ``source`` on to those from ``target`` on, but for the last column."""
    for row in range(6):
        for slot in range(lane_times.shape[1] - 1):
            lane_times[target + row, slot] = lane_times[source + row, slot]
        for slot in range(lane_numbers.shape[1] - 1):
            lane_numbers[target + row, slot] = lane_numbers[source + row, slot]


@inlined
def take_up(finished, opened, order, succ_ptr, succ_idx, lanes, lane_numbers, links):  # type: ignore[no-untyped-def]
    """Links that were just made, and the lanes of a mark, as they are when ``finished`` operators have ended."""
    count = links.shape[1] - 1
    for slot in range(lanes):
        # An operator's rank among events is its place in the launch order, which may have changed.
        index = lane_numbers[OPERATOR, slot]
        waits = lane_numbers[URGENCY, slot] >= count
        lane_numbers[URGENCY, slot] = links[PLACE, index]
        if waits:
            lane_numbers[URGENCY, slot] += np.uint32(count)
    for place in range(finished):
        done = links[FINISHED, place]
        links[PENDING, links[FOLLOWING, done]] -= np.uint32(1)
        for edge in range(succ_ptr[done], succ_ptr[done + 1]):
            links[PENDING, np.uint32(succ_idx[edge])] -= np.uint32(1)
        waiter = links[FIRST_WAITER, done]
        while waiter != count:
            links[PENDING, waiter] -= np.uint32(1)
            waiter = links[NEXT_WAITER, waiter]
    for place in range(opened):
        links[PENDING, np.uint32(order[place])] -= np.uint32(1)


@inlined
def recall(seen, known, times, links):  # type: ignore[no-untyped-def]
    """Put back what an evaluation needs of the current schedule to go on from one of its marks."""
    for index in range(times.shape[1]):
        times[START, index] = seen[BEGAN, index]
        times[END, index] = seen[ENDED, index]
        links[HELD_BY, index] = known[WAS_HELD_BY, index]
        links[RANK, index] = known[WAS_RANK, index]
        links[FINISHED, index] = known[WAS_FINISHED, index]


@inlined
def keep(begin, marks, times, links, seen, known):  # type: ignore[no-untyped-def]
    """The schedule whose evaluation went on from mark ``begin`` (-1 from the beginning) is the current one from now on."""
    for index in range(times.shape[1]):
        seen[BEGAN, index] = times[START, index]
        seen[ENDED, index] = times[END, index]
        known[WAS_HELD_BY, index] = links[HELD_BY, index]
        known[WAS_RANK, index] = links[RANK, index]
        known[WAS_FINISHED, index] = links[FINISHED, index]
    known[WAS_RANK, times.shape[1]] = 1  # there is one to go on from
    for mark in range(begin + 1, marks):
        links[SIDE, mark] ^= np.uint32(1)
