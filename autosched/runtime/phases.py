"""A plan cut in its launch order: operators of several threads run alone, and between two of them lanes run side by side.

For lanes that are the threads of one OpenMP team. An operator of several threads needs all of the team, so what was launched before it ends
first, on every lane, and what comes after begins after it. A plan's waits stay as they are: a phase that has ended has raised all flags.
"""

from __future__ import annotations

from collections.abc import Sequence

from autosched.runtime.plan import Step

Phase = tuple[tuple[Step, ...], ...]
"""The steps of each lane, in order; of one lane only, if the calling thread walks them."""


def phases_of(steps: Sequence[Step]) -> tuple[Phase, ...]:
    """The phases of a plan's steps, which are in launch order. Every step is in one of them."""
    found: list[list[Step]] = []
    for step in steps:
        if not found or (step.width > 1) != (found[-1][-1].width > 1):
            found.append([])
        found[-1].append(step)
    return tuple(_lanes(phase) for phase in found)


def _lanes(steps: Sequence[Step]) -> Phase:
    if steps[0].width > 1:
        return (tuple(steps),)
    lanes = sorted({step.lane for step in steps})
    return tuple(tuple(step for step in steps if step.lane == lane) for lane in lanes)
