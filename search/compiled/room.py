"""Slowdowns where three or more operators want more room than the device has; the twin of what ``fluid.FluidState`` does then."""

from __future__ import annotations

from autosched.search.compiled.cache import inlined
from autosched.search.compiled.layout import LEAST_SHARE, ROOM_DUST


@inlined
def share_room(turn, active, row, room, part):  # type: ignore[no-untyped-def]
    """Set the part of its room that each running operator gets, as ``costmodel.composition.shares``; 1 if one gets less than all.

    Args:
        turn: int32 ``[K]``, the lanes of those that run, in order of start.
        active: how many they are.
        row: int32 ``[K]``, the kernel on each lane.
        room: of ``Problem``.
        part: float64 ``[K]``, by lane, overwritten for those that run.
    """
    used = 0.0
    widest = 0.0
    short = 0
    for place in range(active):
        own = room[row[turn[place]]]
        free = max(0.0, 1.0 - used)
        got = 1.0
        share = 1.0
        if own > free + ROOM_DUST:
            got = max(LEAST_SHARE, free / own)
            share = got
            alone = max(0.0, 1.0 - widest)
            if own > alone + ROOM_DUST:
                share = min(1.0, got / max(LEAST_SHARE, alone / own))
            if share < 1.0:
                short = 1
        part[turn[place]] = share
        used += own * got
        widest = max(widest, own)
    return short


@inlined
def leave(turn, active, lane):  # type: ignore[no-untyped-def]
    """Take a lane out of those that run; how many are left."""
    active -= 1
    place = 0
    while turn[place] != lane:
        place += 1
    while place < active:
        turn[place] = turn[place + 1]
        place += 1
    return active


@inlined
def weigh(turn, active, row, part, excess_first, excess_last, slowdown):  # type: ignore[no-untyped-def]
    """Set the slowdown (float64 ``[K]``, by lane) of every running operator from the part of the room that each gets."""
    for place in range(active):
        own = row[turn[place]]
        total = 1.0
        for other in range(place):
            total += part[turn[other]] * excess_last[own, row[turn[other]]]
        for other in range(place + 1, active):
            total += part[turn[other]] * excess_first[own, row[turn[other]]]
        slowdown[turn[place]] = total / part[turn[place]]
