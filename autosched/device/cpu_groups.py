"""Three and more operators at the same time on as many lanes, started one after the other: what pair figures are composed to, measured.

There may be more lanes than cores: the lanes then take turns on them, as they would in a schedule with that many lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from autosched.core.records import Failure, GroupRecord
from autosched.device.base import Group
from autosched.device.cpu_measure import CpuMeasurer, no_collector
from autosched.device.cpu_pairs import Loop, balanced_repeats, loop_of, time_alone, values_of
from autosched.device.requests import group_refusal
from autosched.device.worker_child import describe
from autosched.runtime.calls import Slots
from autosched.runtime.host_key import usable_cores
from autosched.runtime.lanes import Signals

# Turns a lane yields before it sleeps: lanes without a core of their own would take it from those that work.
_SPINS_OWN_CORE = 400
_SPINS_SHARED_CORE = 20


def measure_groups(
    measurer: CpuMeasurer, groups: Sequence[Group], repeats: int, seed: int
) -> Iterator[tuple[int, GroupRecord | None, Failure | None]]:
    """Time each group ``repeats`` times, each time beside all its members alone, in random order, as pairs are.

    Yields the group's place and a record or a failure.
    """
    rng = np.random.default_rng(seed)
    try:
        values = values_of(measurer, {operator for group in groups for operator in group.operators})
    except Exception as error:
        for index in range(len(groups)):
            yield index, None, describe(error)
        return
    for index, group in enumerate(groups):
        measurer.beat(index)
        if (refusal := group_refusal(measurer.graph, group, wide=True)) is not None:
            yield index, None, refusal
            continue
        try:
            record = _measure(measurer, group, values, repeats, rng, index)
        except Exception as error:
            yield index, None, describe(error)
        else:
            yield index, record, None


def _measure(measurer: CpuMeasurer, group: Group, values: Slots, repeats: int, rng: np.random.Generator, index: int) -> GroupRecord:
    size = len(group.operators)
    widths = tuple(group.width_of(place) for place in range(size))
    loops = [loop_of(measurer, operator, width, values) for operator, width in zip(group.operators, widths, strict=True)]
    lanes = _lanes_of(widths)
    wide = max(widths) > 1
    start = measurer.meter.start()
    threads = torch.get_num_threads()
    alone_us: list[list[float]] = []
    done_us: list[list[float]] = []
    try:
        with no_collector():
            once_us = []
            for loop, lane in zip(loops, lanes, strict=True):
                time_alone(measurer, loop, lane, size)
                once_us.append(min(time_alone(measurer, loop, lane, size) for _ in range(3)))
            for loop, count in zip(loops, balanced_repeats(*once_us), strict=True):
                loop.repeats = count
            for turn in range(-1, repeats):
                measurer.beat(index)
                times_us = [0.0] * size
                for part in rng.permutation(size + 1).tolist():
                    measurer.settle(wide=wide)
                    if part == size:
                        ends_us = _together(measurer, loops, lanes)
                    else:
                        times_us[part] = time_alone(measurer, loops[part], lanes[part], size)
                if turn >= 0:
                    alone_us.append(times_us)
                    done_us.append(ends_us)
    finally:
        torch.set_num_threads(threads)
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
        contamination=measurer.meter.read(start),
    )


def _lanes_of(widths: Sequence[int]) -> list[int]:
    """Which thread runs each: the wide one, if any, the caller's (see ``LaneExecutor``), the others in their order."""
    order = sorted(range(len(widths)), key=lambda place: widths[place] == 1)
    return [order.index(place) for place in range(len(widths))]


def _together(measurer: CpuMeasurer, loops: Sequence[Loop], lanes: Sequence[int]) -> list[float]:
    """When each loop was done, microseconds from the start of the first."""
    size = len(loops)
    # Flags: [0, k) ends of lanes; [k, 2k) a loop is ready; [2k, 3k) it has started.
    signals = Signals(3 * size, _SPINS_OWN_CORE if size <= usable_cores() else _SPINS_SHARED_CORE)
    place_of = {lane: place for place, lane in enumerate(lanes)}

    def task(lane: int) -> None:
        place = place_of[lane]
        loops[place].prepare()
        signals.set(size + place)
        if place == 0:
            for other in range(1, size):
                signals.wait(size + other)
        else:
            signals.wait(2 * size + place - 1)
        if place == size - 1:
            signals.sleep_at_once()
        loops[place].run(lambda: signals.set(2 * size + place))

    with torch.inference_mode():
        measurer.pool.run(task, size, signals, 0)
    return [max(loop.end_us - loops[0].start_us, 0.001) for loop in loops]
