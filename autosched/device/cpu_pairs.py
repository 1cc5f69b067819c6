"""Two operators at the same time on two lanes, one started first: how much each slows the other down."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from autosched.core.graph import Operator
from autosched.core.records import Failure, PairRecord
from autosched.core.variants import variant_signature
from autosched.device.base import Pair
from autosched.device.cpu_measure import CpuMeasurer, no_collector
from autosched.device.requests import pair_refusal
from autosched.device.worker_child import describe
from autosched.runtime.calls import Kernel, Slots
from autosched.runtime.lanes import Signals

# Above it one operator hardly moves while the other runs: they are serialised, and the figure means nothing more.
SLOWDOWN_CAP = 24.0
# Threads start within some tens of microseconds of each other; a run must be long beside that.
_SHORTEST_RUN_US = 400.0
_MOST_REPEATS = 256


@dataclass(frozen=True, slots=True)
class Overlap:
    """One run of two loops together: when each started and ended, in microseconds from one origin."""

    first_start_us: float
    first_end_us: float
    last_start_us: float
    last_end_us: float


def directional_slowdowns(run: Overlap, solo_first_us: float, solo_last_us: float) -> tuple[float, float]:
    """Slowdown of the first-started and of the last-started, each over the time both were running.

    Work done outside the overlap was done at full speed, so what a loop achieved inside it is its solo time less its time
    alone; its slowdown is the overlap over that, capped at 24. If they never overlapped although started together, the last one got
    nothing done beside the first: it has the cap.

    Args:
        run: with starts and ends of both.
        solo_first_us, solo_last_us: times of the same loops alone.

    *Source:* the pair labels of this project; with simultaneous starts they are t'_a / t_a for the one that ends first and
    t'_a / (t_b - (t'_b - t'_a)) for the other.

    >>> directional_slowdowns(Overlap(0.0, 20.0, 0.0, 30.0), 10.0, 20.0)
    (2.0, 2.0)
    """
    begin = max(run.first_start_us, run.last_start_us)
    end = min(run.first_end_us, run.last_end_us)
    both_us = end - begin
    if both_us <= 0:
        return (run.first_end_us - run.first_start_us) / solo_first_us, SLOWDOWN_CAP
    slowdowns = []
    for start_us, end_us, solo_us in (
        (run.first_start_us, run.first_end_us, solo_first_us),
        (run.last_start_us, run.last_end_us, solo_last_us),
    ):
        achieved_us = solo_us - ((end_us - start_us) - both_us)
        slowdowns.append(SLOWDOWN_CAP if achieved_us <= both_us / SLOWDOWN_CAP else both_us / achieved_us)
    return slowdowns[0], slowdowns[1]


def balanced_repeats(*once_us: float) -> tuple[int, ...]:
    """How often to repeat each so that all loops last about as long, and long enough to outlast the start of a thread.

    >>> balanced_repeats(1000.0, 100.0)
    (1, 10)
    """
    length_us = max(*once_us, _SHORTEST_RUN_US)
    return tuple(min(_MOST_REPEATS, max(1, round(length_us / one_us))) for one_us in once_us)


def measure_pairs(
    measurer: CpuMeasurer, pairs: Sequence[Pair], repeats: int, seed: int
) -> Iterator[tuple[int, PairRecord | None, Failure | None]]:
    """Time each pair ``repeats`` times, each time beside both loops alone, in random order, so that a drifting machine cancels.

    Operators read the values that the program really gives them. Yields the pair's place and a record or a failure.
    """
    rng = np.random.default_rng(seed)
    try:
        values = values_of(measurer, {operator for pair in pairs for operator in (pair.first, pair.last)})
    except Exception as error:
        for index in range(len(pairs)):
            yield index, None, describe(error)
        return
    for index, pair in enumerate(pairs):
        measurer.beat(index)
        if (refusal := pair_refusal(measurer.graph, pair, wide=True)) is not None:
            yield index, None, refusal
            continue
        try:
            record = _measure(measurer, pair, values, repeats, rng, index)
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
        self._kernel = kernel
        self._slots = slots
        self.width = width
        self.repeats = 1
        self.start_us = 0.0
        self.end_us = 0.0

    def prepare(self) -> None:
        """Give this thread as many threads as the operator may use."""
        if torch.get_num_threads() != self.width:
            torch.set_num_threads(self.width)

    def run(self, started: Callable[[], None] | None = None) -> None:
        """Run all repeats and note the times; ``started`` is called once the clock runs."""
        kernel, slots = self._kernel, self._slots
        self.start_us = time.perf_counter_ns() / 1000.0
        if started is not None:
            started()
        for _ in range(self.repeats):
            kernel(slots)
        self.end_us = time.perf_counter_ns() / 1000.0

    def length_us(self) -> float:
        """Of the last run."""
        return max(self.end_us - self.start_us, 0.001)


def _measure(measurer: CpuMeasurer, pair: Pair, values: Slots, repeats: int, rng: np.random.Generator, index: int) -> PairRecord:
    graph = measurer.graph
    first = loop_of(measurer, pair.first, pair.first_width, values, pair.first_variant)
    last = loop_of(measurer, pair.last, pair.last_width, values, pair.last_variant)
    start = measurer.meter.start()
    threads = torch.get_num_threads()
    alone_us: list[tuple[float, float]] = []
    together: list[Overlap] = []
    try:
        with no_collector():
            once_us = []
            lanes = _lane_of(first, last, is_first=True), _lane_of(last, first, is_first=False)
            for loop, lane in zip((first, last), lanes, strict=True):
                time_alone(measurer, loop, lane)
                once_us.append(min(time_alone(measurer, loop, lane) for _ in range(3)))
            first.repeats, last.repeats = balanced_repeats(once_us[0], once_us[1])
            for turn in range(-1, repeats):
                measurer.beat(index)
                times_us = [0.0, 0.0]
                for part in rng.permutation(3).tolist():
                    measurer.settle(wide=max(pair.first_width, pair.last_width) > 1)
                    if part == 2:
                        run = _together(measurer, first, last)
                    else:
                        times_us[part] = time_alone(measurer, (first, last)[part], lanes[part])
                if turn >= 0:
                    together.append(run)
                    alone_us.append((times_us[0], times_us[1]))
    finally:
        torch.set_num_threads(threads)
    slowdowns = [directional_slowdowns(run, *alone) for run, alone in zip(together, alone_us, strict=True)]
    solo_first_us, solo_last_us = np.median(np.array(alone_us), axis=0).tolist()
    together_us = float(np.median([max(run.first_end_us, run.last_end_us) - run.first_start_us for run in together]))
    slowdown_first, slowdown_last = np.median(np.array(slowdowns), axis=0).tolist()
    return PairRecord(
        first=variant_signature(graph.operators[pair.first].signature, pair.first_variant),
        first_width=pair.first_width,
        last=variant_signature(graph.operators[pair.last].signature, pair.last_variant),
        last_width=pair.last_width,
        solo_first_us=solo_first_us / first.repeats,
        solo_last_us=solo_last_us / last.repeats,
        together_us=together_us,
        slowdown_first=slowdown_first,
        slowdown_last=slowdown_last,
        makespan_ratio=together_us / (solo_first_us + solo_last_us),
        repeats_first=first.repeats,
        repeats_last=last.repeats,
        count=len(slowdowns),
        contamination=measurer.meter.read(start),
    )


def loop_of(measurer: CpuMeasurer, operator: int, width: int, values: Slots, variant: int = 0) -> Loop:
    """One operator at a width in a variant, with values of its own to work on."""
    bound = measurer.programs.at(width)
    own = list(values)
    for value in measurer.programs.packed_reads(operator, bound.constants):
        own[value] = bound.constants[value]
    return Loop(measurer.programs.kernel(operator, width, variant), own, width)


def _lane_of(loop: Loop, other: Loop, *, is_first: bool) -> int:
    """Which of the two threads runs a loop: the wide one always the caller's, see ``LaneExecutor``; else the first."""
    if (loop.width > 1) != (other.width > 1):
        return 0 if loop.width > 1 else 1
    return 0 if is_first else 1


def time_alone(measurer: CpuMeasurer, loop: Loop, own_lane: int, lanes: int = 2) -> float:
    """Time of all repeats of one loop on the thread it has in company, microseconds; the other lanes' threads do nothing."""

    def task(lane: int) -> None:
        if lane == own_lane:
            loop.prepare()
            loop.run()

    with torch.inference_mode():
        # The caller's thread, done at once, must not poll meanwhile: in our own pair runs operators of a few microseconds then took twice
        # as long on the other thread.
        measurer.pool.run(task, lanes, Signals(lanes, spins=0), 0)
    return loop.length_us()


def _together(measurer: CpuMeasurer, first: Loop, last: Loop) -> Overlap:
    # Flags: 0, 1 ends of lanes; 2 the last lane is ready; 3 the first has started.
    signals = Signals(4)

    lane_of_first = _lane_of(first, last, is_first=True)

    def task(lane: int) -> None:
        if lane == lane_of_first:
            first.prepare()
            signals.wait(2)
            first.run(lambda: signals.set(3))
        else:
            last.prepare()
            signals.set(2)
            signals.wait(3)
            signals.sleep_at_once()
            last.run()

    with torch.inference_mode():
        measurer.pool.run(task, 2, signals, 0)
    return Overlap(first.start_us, first.end_us, last.start_us, last.end_us)
