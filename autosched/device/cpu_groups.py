"""Three and more operators at the same time on as many lanes, started one after the other: what pair figures are composed to, measured.

There may be more lanes than cores: the lanes then take turns on them, as they would in a schedule with that many lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from autosched.core.records import Failure, GroupRecord
from autosched.device.base import Group
from autosched.device.cpu_loops import Loop, alone_and_together, loop_of, on_one_engine, one_by_one, run_in_turn
from autosched.device.cpu_measure import CpuMeasurer
from autosched.device.requests import group_refusal
from autosched.runtime.calls import Slots


def measure_groups(
    measurer: CpuMeasurer, groups: Sequence[Group], repeats: int, seed: int
) -> Iterator[tuple[int, GroupRecord | None, Failure | None]]:
    """Time each group ``repeats`` times, each time beside all its members alone, in random order, as pairs are.

    Yields the group's place and a record or a failure.
    """
    rng = np.random.default_rng(seed)
    return one_by_one(
        measurer,
        groups,
        {operator for group in groups for operator in group.operators},
        lambda group: group_refusal(measurer.graph, group, wide=True),
        lambda group, values, index: _measure(measurer, group, values, repeats, rng, index),
    )


def _measure(measurer: CpuMeasurer, group: Group, values: Slots, repeats: int, rng: np.random.Generator, index: int) -> GroupRecord:
    widths = tuple(group.width_of(place) for place in range(len(group.operators)))
    loops = [loop_of(measurer, operator, width, values) for operator, width in zip(group.operators, widths, strict=True)]
    on_one_engine(measurer, loops)
    alone_us, done_us, contamination = alone_and_together(measurer, loops, lambda: _together(measurer, loops), repeats, rng, index)
    counts = tuple(loop.repeats for loop in loops)
    solo_us = np.median(np.array(alone_us), axis=0) / np.array(counts)
    return GroupRecord(
        signatures=tuple(measurer.graph.operators[operator].signature for operator in group.operators),
        widths=widths,
        solo_us=tuple(solo_us.tolist()),
        repeats=counts,
        finish_us=tuple(np.median(np.array(done_us), axis=0).tolist()),
        together_us=float(np.median(np.max(np.array(done_us), axis=1))),
        count=len(done_us),
        contamination=contamination,
    )


def _together(measurer: CpuMeasurer, loops: Sequence[Loop]) -> list[float]:
    """When each loop was done, microseconds from the start of the first."""
    run_in_turn(measurer, loops)
    return [max(loop.end_us - loops[0].start_us, 0.001) for loop in loops]
