"""Operators repeated in loops on lanes of their own, each alone and all at the same time: how pairs and groups are measured on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch

from autosched.core.graph import Operator
from autosched.core.records import Contamination, Engine, Failure
from autosched.device.cpu_measure import CpuMeasurer, no_collector
from autosched.device.native_loops import native_loops
from autosched.device.worker_child import describe
from autosched.runtime.calls import Kernel, Slots
from autosched.runtime.cores import usable_cores
from autosched.runtime.lane_pool import SPINS_OWN_CORE, SPINS_SHARED_CORE, Signals

# Threads start within some tens of microseconds of each other; a run must be long beside that.
_SHORTEST_RUN_US = 400.0
_MOST_REPEATS = 256

_Wanted = TypeVar("_Wanted")
_Record = TypeVar("_Record")
_Run = TypeVar("_Run")


def one_by_one(
    measurer: CpuMeasurer,
    wanted: Sequence[_Wanted],
    operators: Collection[int],
    refusal: Callable[[_Wanted], Failure | None],
    measure: Callable[[_Wanted, Slots, int], _Record],
) -> Iterator[tuple[int, _Record | None, Failure | None]]:
    """Measure each pair or group that is not refused; what goes wrong with one is its own failure.

    Args:
        measurer: of the program.
        wanted: pairs or groups.
        operators: all that they name; they read the values that the program really gives them.
        refusal: why one is not to be measured at all, if so.
        measure: given one, values and its place.

    Yields:
        The place, and a record or a failure.
    """
    try:
        values = values_of(measurer, operators)
    except Exception as error:
        for index in range(len(wanted)):
            yield index, None, describe(error)
        return
    for index, item in enumerate(wanted):
        measurer.beat(index)
        if (refused := refusal(item)) is not None:
            yield index, None, refused
            continue
        try:
            record = measure(item, values, index)
        except Exception as error:
            yield index, None, describe(error)
        else:
            yield index, record, None


def values_of(measurer: CpuMeasurer, operators: Collection[int]) -> Slots:
    """Slots as after one run, with what ``operators`` are given when they run alone; all other values are gone by the end of it."""
    graph = measurer.graph
    touched = {value for index in operators if 0 <= index < len(graph) for value in _touched(graph.operators[index])}
    return measurer.bound.slots_after(measurer.inputs, touched, lambda: measurer.beat(-1))


def _touched(operator: Operator) -> tuple[int, ...]:
    return (*operator.reads, *operator.mutates, *operator.writes)


class Loop:
    """One operator, repeated, on its own copy of the value table, so that two lanes never write the same slot."""

    def __init__(self, kernel: Kernel, slots: Slots, width: int) -> None:
        self.kernel = kernel
        self.slots = slots
        self.width = width
        self.repeats = 1
        self.engine = Engine.NATIVE
        """The fastest that may run it."""
        self.start_us = 0.0
        self.end_us = 0.0

    def prepare(self) -> None:
        """Give this thread as many threads as the operator may use."""
        if torch.get_num_threads() != self.width:
            torch.set_num_threads(self.width)

    def run(self, started: Callable[[], None] | None = None) -> None:
        """Run all repeats and note the times; ``started`` is called once the clock runs."""
        kernel, slots = self.kernel, self.slots
        self.start_us = time.perf_counter_ns() / 1000.0
        if started is not None:
            started()
        for _ in range(self.repeats):
            kernel(slots)
        self.end_us = time.perf_counter_ns() / 1000.0

    def length_us(self) -> float:
        """Of the last run."""
        return max(self.end_us - self.start_us, 0.001)


def loop_of(measurer: CpuMeasurer, operator: int, width: int, values: Slots, variant: int = 0) -> Loop:
    """One operator at a width in a variant, with values of its own to work on."""
    bound = measurer.programs.at(width)
    own = list(values)
    for value in measurer.programs.packed_reads(operator, bound.constants):
        own[value] = bound.constants[value]
    return Loop(measurer.kernel(operator, width, variant), own, width)


def lanes_of(widths: Sequence[int]) -> list[int]:
    """Which thread runs each: the wide one, if any, the caller's (see ``LaneExecutor``), the others in their order."""
    order = sorted(range(len(widths)), key=lambda place: widths[place] == 1)
    return [order.index(place) for place in range(len(widths))]


def time_alone(measurer: CpuMeasurer, loop: Loop, own_lane: int, lanes: int) -> float:
    """Time of all repeats of one loop on the thread it has in company, microseconds; the other lanes' threads do nothing."""

    if (native := native_loops((loop,), (own_lane,), lanes, _allowed(measurer, (loop,)))) is not None:
        native.run(measurer.pool)
        return loop.length_us()

    def task(lane: int) -> None:
        if lane == own_lane:
            loop.prepare()
            loop.run()

    with torch.inference_mode():
        # The caller's thread, done at once, must not poll meanwhile: in our own pair runs operators of a few microseconds then took twice
        # as long on the other thread.
        measurer.pool.run(task, lanes, Signals(lanes, spins=0), 0)
    return loop.length_us()


def run_in_turn(measurer: CpuMeasurer, loops: Sequence[Loop]) -> None:
    """Run all loops at the same time, each begun as soon as the one before it has started."""
    size = len(loops)
    lanes = lanes_of([loop.width for loop in loops])
    if (native := native_loops(loops, lanes, size, _allowed(measurer, loops))) is not None:
        native.run(measurer.pool)
        return
    # Flags: [0, k) ends of lanes; [k, 2k) a loop is ready; [2k, 3k) it has started.
    signals = Signals(3 * size, SPINS_OWN_CORE if size <= usable_cores() else SPINS_SHARED_CORE)
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


def on_one_engine(measurer: CpuMeasurer, loops: Sequence[Loop]) -> Engine:
    """Have each of them run alone, too, by what can run all of them together, and say which that is.

    What only Python can call takes its company to lanes of Python; alone on native ones that would look faster than it is beside anything.
    """
    lanes = lanes_of([loop.width for loop in loops])
    found = native_loops(loops, lanes, len(loops), measurer.engine)
    engine = Engine.PYTHON if found is None else Engine.NATIVE
    for loop in loops:
        loop.engine = engine
    return engine


def _allowed(measurer: CpuMeasurer, loops: Sequence[Loop]) -> Engine:
    return Engine.PYTHON if any(loop.engine is Engine.PYTHON for loop in loops) else measurer.engine


def balanced_repeats(*once_us: float) -> tuple[int, ...]:
    """How often to repeat each so that all loops last about as long, and long enough to outlast the start of a thread.

    >>> balanced_repeats(1000.0, 100.0)
    (1, 10)
    """
    length_us = max(*once_us, _SHORTEST_RUN_US)
    return tuple(min(_MOST_REPEATS, max(1, round(length_us / one_us))) for one_us in once_us)


def alone_and_together(
    measurer: CpuMeasurer, loops: Sequence[Loop], together: Callable[[], _Run], repeats: int, rng: np.random.Generator, index: int
) -> tuple[list[list[float]], list[_Run], Contamination]:
    """Time each loop alone and all of them together, ``repeats`` times, in random order, so that a drifting machine cancels.

    Sets the loops' repeats first, so that all last about as long.

    Args:
        measurer: of the program.
        loops: in order of start.
        together: runs all of them; what it returns is handed on.
        repeats: rounds that count; one more is made before them.
        rng: the order within each round.
        index: the place of what is measured, for the board.

    Returns:
        For each round the times alone in microseconds, in the order of ``loops``; what ``together`` said; how busy the machine was.
    """
    size = len(loops)
    widths = [loop.width for loop in loops]
    lanes = lanes_of(widths)
    start = measurer.meter.start()
    threads = torch.get_num_threads()
    alone_us: list[list[float]] = []
    runs: list[_Run] = []
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
                    measurer.settle(wide=max(widths) > 1)
                    if part == size:
                        run = together()
                    else:
                        times_us[part] = time_alone(measurer, loops[part], lanes[part], size)
                if turn >= 0:
                    alone_us.append(times_us)
                    runs.append(run)
    finally:
        torch.set_num_threads(threads)
    return alone_us, runs, measurer.meter.read(start)
