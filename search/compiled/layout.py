"""How the compiled code lays out what it works on: states of a list scheduler, and the simulator's workspace; and
the numbers that both halves of the search share. Needs no compiler.

A *workspace* is four arrays, of whose rows each has a name (below): two with a column for each lane, two with one for each operator.
The whole numbers have no sign, because compiled code asks of every signed index whether it counts from the end, which took a sixth of an
evaluation's time; where there is no operator they hold ``n``. The first two also have rows for
*marks* (:mod:`autosched.search.compiled.marks`), and their last column is used there only.

A *state* is one float row and one int row (offsets below), so that copying a prefix is two memory copies. With ``K`` lanes and ``n``
operators the float row holds: time; then for each lane start, remaining, slowdown, free-since (all microseconds but the third); then
the end of each operator; then for each lane its part of the room (scratch); then until when a team's helpers spin (-1 none do), the room
they take, and how many times slower everything is for it. The int row holds: starts so far, placed so far, finished so
far, last finished operator, length of the ready list, how many run, 1 while one of those gets less room than it would beside one other,
last wide operator of a team (-1 none); for each lane operator (-1 idle), kernel, place among starts (-1 while it waits, -2 once put off),
launch rank; for each operator pending predecessors, lane (-1 not placed), width index, extra wait (-1 none); the launch order; the ready
list; then the lanes that run, in order of start.
"""

from __future__ import annotations

from typing import Any

import numpy as np

HEADER = 8
"""Numbers about the whole state at the head of an int row."""
UNREACHED = 1e300
"""The makespan of a schedule that was given up."""
MIN_SLOWDOWN = 0.25
"""Below this no sum of measured speed-ups is believed: noise around 1.0 must never make time stand still."""
ROOM_DUST = 1e-9
"""Rounding errors of free room that the simulations overlook."""
LEAST_SHARE = 1e-3
"""``costmodel.composition.LEAST_SHARE``, here because compiled code holds the numbers of this folder only."""


def float_row(count: int, lanes: int) -> int:
    """Length of a state's float row."""
    return 4 + 5 * lanes + count


def int_row(count: int, lanes: int) -> int:
    """Length of a state's int row."""
    return HEADER + 5 * lanes + 6 * count


WHEN, LEFT, PACE, SLOWDOWN, FREE, PART = range(6)
"""Rows of a block of ``lane_times``: the lane's next event (``UNREACHED`` none), the time alone that its operator has left, how many times
slower that passes, the sum that this comes from, the end of the lane's last operator (-1 none), and its operator's part of the room."""
OPERATOR, KERNEL, URGENCY, PUT_OFF, TURN, READY = range(6)
"""Rows of a block of ``lane_numbers``: the lane's latest operator, its kernel, its rank among events at one time (the place in the launch
order, and ``n`` more until it has started), 1 once its start was put off; and two lists: lanes that run, in order of start, and operators
to place."""
START, END = range(2)
"""Rows of ``times``, microseconds."""
PLACE, PENDING, PREVIOUS, FOLLOWING, FIRST_WAITER, NEXT_WAITER, HELD_BY, RANK, FINISHED, SIDE = range(10)
"""Rows of ``links``: place in the launch order, how many it waits for, the operators before and after it on its lane, the operators that
have an extra wait for it (the first, and for each of those the next), what its start waited for, how many finished before it, all
operators in the order in which they finished, and which side of each mark is the current schedule's. Column ``n`` is nobody's; its
``HELD_BY`` is the operator that finished last."""


def workspace(count: int, lanes: int, marks: int = 0) -> tuple[Any, Any, Any, Any]:
    """What ``evaluate`` overwrites.

    ``lane_times`` float64 ``[6 * B, K + 1]`` and ``lane_numbers`` uint32 ``[6 * B, K + 2]`` are ``B`` blocks of six rows, first what
    goes on, then two for each mark; ``times`` is float64 ``[2, n]``, ``links`` uint32 ``[10, n + 1]``.
    """
    rows = 6 * (1 + 2 * marks)
    numbers = np.zeros((rows, lanes + 2), dtype=np.uint32), np.zeros((10, count + 1), dtype=np.uint32)
    return np.zeros((rows, lanes + 1)), numbers[0], np.zeros((2, count)), numbers[1]


def reset_state(floats: Any, ints: Any, lanes: int, count: int, pred_ptr: Any) -> None:
    """Make a state empty: nothing placed, sources ready. Not compiled: it is called once for each schedule and takes microseconds."""
    floats[:] = 0.0
    ints[:] = 0
    floats[1 + 3 * lanes :] = -1.0
    floats[-1] = 1.0
    ints[3] = ints[7] = -1
    ints[HEADER : HEADER + lanes] = -1
    ints[HEADER + 2 * lanes : HEADER + 3 * lanes] = -1
    base = HEADER + 4 * lanes
    ints[base : base + count] = pred_ptr[1:] - pred_ptr[:-1]
    ints[base + count : base + 2 * count] = -1
    ints[base + 3 * count : base + 4 * count] = -1
    sources = np.flatnonzero(ints[base : base + count] == 0)
    ints[base + 5 * count : base + 5 * count + len(sources)] = sources
    ints[4] = len(sources)
