"""What threads that wait or spin cost those that work; the twins of ``fluid.FluidState``'s methods of the same names."""

from __future__ import annotations

from autosched.search.compiled.cache import inlined


@inlined
def arrival(end, free, cross, polling):  # type: ignore[no-untyped-def]
    """When a lane that is free since ``free`` may go on after an operator elsewhere that ended at ``end``: awake it saw the end at once."""
    if polling > 0.0 and end - free < polling:
        return end
    return end + cross


@inlined
def lateness(time, own_lane, lanes, turn, active, free, latency):  # type: ignore[no-untyped-def]
    """By how much an operator ends late: ``latency[1]`` while a lane that has run something polls, else 0.

    ``turn`` lists the ``active`` lanes on which something still runs.
    """
    late = 0.0
    for lane in range(lanes):
        runs = lane == own_lane
        for place in range(active):
            runs |= turn[place] == lane
        if not runs and free[lane] >= 0.0:
            idle = time - free[lane]
            if idle > latency[0] and idle < latency[4]:
                late = latency[1]
    return late


@inlined
def crowding(turn, active, row, room, spin_room):  # type: ignore[no-untyped-def]
    """How many times slower what runs is for helper threads that spin."""
    wanted = 0.0
    for place in range(active):
        wanted += room[row[turn[place]]]
    return max(1.0, (wanted + spin_room) / max(1.0, wanted))
