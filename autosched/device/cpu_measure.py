"""Timing on CPU lanes, inside the measuring process: operators in place, whole schedules interleaved, and the costs between operators."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from autosched.core.computed_once import computed_once
from autosched.core.graph import OpGraph, ValueRole
from autosched.core.program import Call, Ref
from autosched.core.records import Engine, Failure, FailureKind, Paging, ScheduleRecord
from autosched.core.schedule import Schedule, canonical_key, sequential
from autosched.device.base import Comparison
from autosched.device.contamination import LoadMeter
from autosched.device.paging import PagingMeter
from autosched.device.timing import summarize
from autosched.device.worker_child import describe
from autosched.device.worker_messages import CompareAnswer
from autosched.runtime.calls import Kernel, Slots
from autosched.runtime.cores import usable_cores
from autosched.runtime.float32 import full_float32, rounded_as
from autosched.runtime.in_place import granted, homes_of
from autosched.runtime.instructions import CallOperator, carrying
from autosched.runtime.kernels import BoundProgram
from autosched.runtime.lane_pool import LanePool
from autosched.runtime.lanes import LaneExecutor, Trace
from autosched.runtime.numerics import Agreement, compare
from autosched.runtime.plan import Plan, Step, make_plan
from autosched.runtime.rounding import coarsest_of
from autosched.runtime.state import copies_of
from autosched.runtime.widths import WidePrograms
from autosched.runtime.workspace import peak_live_bytes

_WARM_UPS = 2
# After a wide operator the threads of OpenMP's team spin for some milliseconds (libgomp's default, 300,000 turns) and would take
# a core from whatever is timed next.
TEAM_SPIN_S = 0.008
_MOST_PREPARED = 256
_TRACED_RUNS = 5
# One run of half a millisecond is at the mercy of every interrupt; the mean over ten milliseconds is not.
SHORTEST_BLOCK_US = 10_000.0
MOST_RUNS = 50
# A run this long counts although none was before it: empty caches and sleeping threads cost some milliseconds.
LONG_RUN_US = 1e6


@dataclass(frozen=True, slots=True)
class LaneCosts:
    """What lies between operators, in microseconds, and whether lanes are one team, as in ``Limits``."""

    launch_gap_us: float
    cross_lane_us: float
    fixed_us: float
    concurrent_gap_us: float = 0.0
    one_team: bool = False


@dataclass(slots=True)
class _Prepared:
    """A schedule ready to be timed; ``run_us`` is the least that it was seen to take."""

    executor: LaneExecutor
    peak_bytes: int
    run_us: float


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Without Python's garbage collector, whose pauses would land in somebody's sample.

    Only what was made a moment ago is collected first: all of a process that holds torch and a compiler takes longer than what is timed.
    """
    was_on = gc.isenabled()
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def runs_lasting(block_us: float, run_us: float) -> int:
    """How many runs of ``run_us`` last at least ``block_us``, microseconds; one or more."""
    return max(1, math.ceil(block_us / run_us))


def warmed_us(runs_us: Callable[[int], float], block: Callable[[float], int], long_us: float = LONG_RUN_US) -> float:
    """Mean time of a block of runs, microseconds, after one run that does not count, or of that one if it takes ``long_us``.

    What ran before left its own data in the caches and its own threads awake.

    Args:
        runs_us: mean time of so many runs.
        block: how many there are in a block, by the time of the first.
    """
    first_us = runs_us(1)
    return first_us if first_us >= long_us else runs_us(block(first_us))


class CpuMeasurer:
    """Times one bound program on this process's cores.

    Schedules are timed as they are served, with write-backs in place: of the inputs, those that a second run leaves as the first one did
    (``Chain.repeatable``), so that every run has the same to do. The others are made anew, and nothing is copied back.

    Args:
        programs: the program, for every width.
        inputs: used for every timing.
        beat: called with what is worked on, before anything that may hang or crash.
    """

    def __init__(self, programs: WidePrograms, inputs: Sequence[torch.Tensor], beat: Callable[[int], None]) -> None:
        self.programs = programs
        self.bound = programs.at(1)
        self.inputs = list(inputs)
        self.beat = beat
        self.pool = LanePool()
        self.meter = LoadMeter()
        self._reference: list[torch.Tensor] | None = None
        self._was_wide = False
        self._was_team = 1
        # What is made is free to hold something else as long as nothing of the program runs.
        self._tick_slot = next(value.index for value in self.graph.values if value.role is ValueRole.INTERMEDIATE)
        self._tick_tensor = torch.rand(100_000)
        self._prepared: dict[Schedule, _Prepared] = {}
        self._in_order: dict[int, BoundProgram] = {}

    def settle(self, *, wide: bool, team: int = 1) -> None:
        """Let threads of an earlier measurement fall asleep: those of wide operators, and those of lanes where fewer are at work next.

        A process that timed lanes of one team settles before it answers: another one's first block, of ten milliseconds, was seen to take
        1.6 times as long while they spun on.

        Args:
            wide: whether an operator of the next one uses more than one thread.
            team: ``LaneExecutor.team`` of the next one.
        """
        if self._was_wide or self._was_team > team:
            time.sleep(TEAM_SPIN_S)
        self._was_wide, self._was_team = wide, team

    @computed_once
    def engine(self) -> Engine:
        """What runs the lanes of this program: the native one only if all of its operators can say what they do."""
        return self._executor(make_plan(self.graph, sequential(self.graph))).engine

    @property
    def graph(self) -> OpGraph:
        """The program's graph."""
        return self.bound.program.graph

    def in_order(self, width: int) -> BoundProgram:
        """The program at a width, with what a run in the graph's order may do in place."""
        if width not in self._in_order:
            plan = make_plan(self.graph, sequential(self.graph, width=width))
            chains = [chain for chain in granted(self.bound.program, plan) if chain.repeatable]
            self._in_order[width] = self.programs.in_place(self.programs.at(width), chains)
        return self._in_order[width]

    def kernel(self, operator: int, width: int, variant: int = 0) -> Kernel:
        """As ``WidePrograms.kernel``, in place where a run in the graph's order is."""
        made = self.programs.kernel(operator, width, variant)
        return self.in_order(width).kernels[operator] if made is self.programs.at(width).kernels[operator] else made

    def costs(self, *, repeats: int = 15) -> LaneCosts:
        """Measure what a lane spends between operators, on a wait for another lane, and once for each run.

        The wait is timed in a chain of real operators of some 50 us that changes lane at every step, against the same chain on
        one lane: between idle lanes it would look cheaper, and after long waits dearer. The gap between operators of a lane is timed a
        second time while another lane works on operators of its own.
        """
        noops: tuple[Kernel, ...] = (carrying(_nothing, ()),) * 256
        empty, many = self._chain(noops, 0, 1), self._chain(noops, len(noops), 1)
        ticks: tuple[Kernel, ...] = (_tick(self._tick_slot),) * 48
        alone = self._chain(ticks, len(ticks), 1)
        crossing = self._chain(ticks, len(ticks), 2) if usable_cores() > 1 else alone
        beside = self._chain(ticks, len(ticks), 2, linked=False) if usable_cores() > 1 else alone
        gaps_us: list[tuple[float, float]] = []
        columns: list[list[float]] = []
        with no_collector():
            for _ in range(repeats + _WARM_UPS):
                self.beat(-1)
                columns.append([self._once_us(executor) for executor in (empty, many, alone, crossing)])
                gaps_us.append((self._mean_gap_us(alone, len(ticks), 1), self._mean_gap_us(beside, len(ticks), 2)))
        fixed, walked, straight, crossed = np.median(np.array(columns[_WARM_UPS:]), axis=0)
        return LaneCosts(
            launch_gap_us=max(0.0, float(walked - fixed) / len(noops)),
            cross_lane_us=max(0.0, float(crossed - straight) / (len(ticks) - 1)),
            fixed_us=float(fixed),
            # Threads that launch at the same time wait for the interpreter's lock and are woken later: the mean, because it is the tail
            # that costs.
            concurrent_gap_us=max(0.0, float(np.median([two - one for one, two in gaps_us[_WARM_UPS:]]))),
            one_team=crossing.one_team,
        )

    def schedules(
        self, schedules: Sequence[Schedule], rounds: int, trace: bool, min_block_us: float, seed: int
    ) -> Iterator[tuple[int, ScheduleRecord | None, Failure | None]]:
        """Time schedules in ``rounds`` interleaved rounds, each a block of runs of at least ``min_block_us`` after one that does
        not count (:func:`warmed_us`).

        ``peak_memory_bytes`` is computed, not measured: the most bytes of intermediates and outputs that are alive at once when the plan's
        frees are followed in launch order; parameters and operators' scratch memory are not in it.
        """
        rng = np.random.default_rng(seed)
        executors: dict[int, LaneExecutor] = {}
        block: dict[int, int] = {}
        peaks: dict[int, int] = {}
        for index, schedule in enumerate(schedules):
            prepared = self._prepare(schedule, index)
            if isinstance(prepared, Failure):
                yield index, None, prepared
                continue
            executors[index], peaks[index] = prepared.executor, prepared.peak_bytes
            block[index] = runs_lasting(min_block_us, prepared.run_us)
        times_us: dict[int, list[float]] = {index: [] for index in executors}
        start = self.meter.start()
        with no_collector():
            for _ in range(rounds):
                for index in rng.permutation(list(executors)).tolist():
                    if index not in executors:
                        continue
                    self.beat(index)
                    try:
                        times_us[index].append(self._fresh_block_us(executors[index], block[index]))
                    except Exception as error:
                        del executors[index]
                        yield index, None, describe(error)
        load = self.meter.read(start)
        for index, executor in executors.items():
            self.beat(index)
            starts, ends, paging = self._traced(executor) if trace else ((), (), Paging())
            key = canonical_key(self.graph, schedules[index], lanes_matter=True)
            yield index, ScheduleRecord(key, summarize(times_us[index]), peaks[index], load, starts, ends, paging=paging), None
        self.settle(wide=False)

    def paired(self, schedules: Sequence[Schedule], rounds: int, seed: int) -> list[tuple[float, ...]] | Failure:
        """Times in microseconds, ``[len(schedules)][rounds]``, or the failure of the first schedule that fails.

        Each round times every schedule once, in a random order; a short one as the mean of a block of ``SHORTEST_BLOCK_US``.
        """
        rng = np.random.default_rng(seed)
        ready: list[_Prepared] = []
        for index, schedule in enumerate(schedules):
            prepared = self._prepare(schedule, index)
            if isinstance(prepared, Failure):
                return Failure(prepared.kind, f"schedule {index}: {prepared.detail}")
            ready.append(prepared)
        times_us = np.zeros((len(ready), rounds))
        with no_collector():
            for turn in range(rounds):
                for index in rng.permutation(len(ready)):
                    self.beat(int(index))
                    item = ready[index]
                    runs = min(MOST_RUNS, runs_lasting(SHORTEST_BLOCK_US, item.run_us))
                    times_us[index, turn] = self._fresh_block_us(item.executor, runs)
                    # If its first runs were interrupted, its blocks would stay shorter, and more of them without interruptions.
                    item.run_us = min(item.run_us, times_us[index, turn])
        self.settle(wide=False)
        return [tuple(row) for row in times_us.tolist()]

    def compare(
        self, schedule: Schedule, inputs: Sequence[Sequence[torch.Tensor]], references: Sequence[Sequence[torch.Tensor]]
    ) -> CompareAnswer:
        """Outputs of ``schedule`` against the same operators in order on one lane (bitwise) and the model's (tolerance).

        The schedule overwrites all that it may, the operators on one lane nothing. The model's outputs are in full float32. Where this
        process may round float32, the tolerance is judged on the same operators without that.
        """
        executor = self._executor(make_plan(self.graph, schedule), every=True)
        one_lane = make_plan(self.graph, dataclasses.replace(schedule, lane=(0,) * len(schedule.lane)))
        in_order = LaneExecutor(self.programs.for_plan(one_lane), one_lane, self.pool)
        coarsest = coarsest_of(self.graph)
        bitwise, within, worst = True, True, 0.0
        for given, wanted in zip(inputs, references, strict=True):
            self.beat(0)
            # Each run gets its own copies: a model may change its inputs.
            got = executor.run(copies_of(given))
            self.beat(0)
            bitwise = compare(got, in_order.run(copies_of(given))).bitwise and bitwise
            agreement = compare(got, wanted, coarsest=coarsest)
            if (failure := _incomparable(agreement, got, wanted)) is not None:
                return CompareAnswer(failure=failure)
            if not agreement.within_tolerance and (rounding := rounded_as("cpu")) is not None:
                # Compiled code keeps the rounding that it was compiled with.
                compiled = bool(self.programs.program.source) or any(schedule.variant)
                with full_float32():
                    exact = in_order.run(copies_of(given))
                within = within and compare(exact, wanted, rounded=rounding if compiled else None, coarsest=coarsest).within_tolerance
            else:
                within = within and agreement.within_tolerance
            worst = max(worst, agreement.max_abs_error)
        return CompareAnswer(Comparison(bitwise, worst, within))

    def _prepare(self, schedule: Schedule, index: int) -> _Prepared | Failure:
        """Plan, run and check a schedule once, however often it is timed."""
        self.beat(index)
        known = self._prepared.pop(schedule, None)
        if known is None:
            try:
                plan = make_plan(self.graph, schedule)
                executor = self._executor(plan)
                outputs = executor.run(self.inputs)
                if self._reference is None:
                    self._reference = self.bound.run(self.inputs)
                if (failure := _incomparable(compare(outputs, self._reference), outputs, self._reference)) is not None:
                    return failure
                del outputs
                self.beat(index)
                run_us = self._once_us(executor)
                if run_us < LONG_RUN_US:
                    run_us = min(run_us, self._once_us(executor))
            except Exception as error:
                return describe(error)
            homes = homes_of(executor.in_place)
            known = _Prepared(executor, peak_live_bytes(self.graph, plan, homes), run_us)
            self._was_wide, self._was_team = executor.widest > 1, executor.team
        self._prepared[schedule] = known
        while len(self._prepared) > _MOST_PREPARED:
            del self._prepared[next(iter(self._prepared))]
        return known

    def _executor(self, plan: Plan, *, every: bool = False) -> LaneExecutor:
        """Of a plan that changes its inputs where a second run would change nothing more, or, for inputs of its own, ``every`` one."""
        chains = [chain for chain in granted(self.bound.program, plan) if every or chain.repeatable]
        return LaneExecutor(self.programs.in_place(self.programs.for_plan(plan), chains), plan, self.pool)

    def _fresh_block_us(self, executor: LaneExecutor, runs: int) -> float:
        self.settle(wide=executor.widest > 1, team=executor.team)
        return warmed_us(lambda count: self._block_us(executor, count), lambda _: runs)

    def _block_us(self, executor: LaneExecutor, runs: int) -> float:
        start_ns = time.perf_counter_ns()
        for _ in range(runs):
            executor.run(self.inputs)
        return max(1, time.perf_counter_ns() - start_ns) / (1000.0 * runs)

    def _once_us(self, executor: LaneExecutor) -> float:
        return self._block_us(executor, 1)

    def _traced(self, executor: LaneExecutor) -> tuple[tuple[float, ...], tuple[float, ...], Paging]:
        # The run of median length, whole: a median of each operator's times would show a timeline that never happened.
        found: list[Trace] = []
        meter = PagingMeter()
        self.settle(wide=executor.widest > 1, team=executor.team)
        for _ in range(_TRACED_RUNS):
            trace = Trace(len(self.graph))
            with meter:
                executor.run(self.inputs, trace)
            found.append(trace)
            if trace.finish_ns - trace.begin_ns >= 1000.0 * LONG_RUN_US:
                break
        chosen = sorted(found, key=lambda item: item.finish_ns - item.begin_ns)[len(found) // 2]
        begin = chosen.begin_ns
        starts, ends = (tuple((at - begin) / 1000.0 for at in times) for times in (chosen.start_ns, chosen.end_ns))
        return starts, ends, meter.read()

    def _mean_gap_us(self, executor: LaneExecutor, length: int, lanes: int) -> float:
        """Mean time from the end of an operator to the start of the next one of its lane."""
        trace = Trace(length)
        executor.run(self.inputs, trace)
        return float(np.mean(np.subtract(trace.start_ns[lanes:], trace.end_ns[:-lanes]))) / 1000.0

    def _chain(self, kernels: tuple[Kernel, ...], length: int, lanes: int, *, linked: bool = True) -> LaneExecutor:
        waits = linked and lanes > 1
        steps = tuple(Step(index, index % lanes, 1, 0, 0, (index - 1,) if waits and index else (), waits, ()) for index in range(length))
        constants = self.bound.constants.copy()
        constants[self._tick_slot] = self._tick_tensor
        bound = dataclasses.replace(self.bound, kernels=kernels, constants=constants)
        return LaneExecutor(bound, Plan(self.graph.hash, lanes, steps, ()), self.pool, self.engine)


def _tick(slot: int) -> Kernel:
    """A real operator of some 50 us on the tensor in ``slot``, which releases the interpreter lock, as the program's own do."""

    def run(slots: Slots) -> None:
        torch.neg(slots[slot])

    return carrying(run, [CallOperator(Call("aten::neg.default", (Ref(slot),), (), (-1,)))])


def _nothing(slots: Slots) -> None:
    pass


def _incomparable(agreement: Agreement, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> Failure | None:
    """The failure of outputs that differ by more than a number can say: in form, or in where they are not finite."""
    if math.isfinite(agreement.max_abs_error):
        return None
    same_form = [(item.shape, item.dtype) for item in got] == [(item.shape, item.dtype) for item in want]
    return Failure(FailureKind.NONFINITE if same_form else FailureKind.MISMATCH, agreement.reason)
