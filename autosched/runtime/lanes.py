"""The CPU executor: lanes are threads, an event is a flag, and every lane walks its own part of the plan.

Without the interpreter, where that was built and every kernel of the plan says what it does (``native.lanes``): lanes are then the threads
of one OpenMP team, as far as there are cores. Else in Python: PyTorch releases the interpreter's lock inside operators, but every operator
that ends takes it back, and waits for it where another lane has it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence

import torch

from autosched.core.in_place import Chain
from autosched.core.records import Engine
from autosched.runtime.calls import Kernel, Slots
from autosched.runtime.cores import usable_cores
from autosched.runtime.kernels import BoundProgram
from autosched.runtime.lane_pool import SPINS_OWN_CORE, SPINS_SHARED_CORE, LanePool, LaneStopped, NoThreads, Signals, threads_are_real
from autosched.runtime.native.build import native_library
from autosched.runtime.native.code import NotNative
from autosched.runtime.native.lanes import NativePlan, team_comes, team_size
from autosched.runtime.plan import Plan, Step
from autosched.runtime.thread_count import use_threads
from autosched.runtime.thread_state import inference_mode
from autosched.runtime.walk import walk

_log = logging.getLogger(__name__)

SPIN_OWN_CORE_US = 280.0
"""How long a native lane that waits spins where it has a core of its own, to be met awake: as long as the turns of one in Python take."""
_SPIN_SHARED_CORE_US = 15.0


class Trace:
    """When each operator of one run started and ended: nanoseconds of ``time.perf_counter_ns``, by operator index; 0 if not run."""

    __slots__ = ("begin_ns", "end_ns", "finish_ns", "start_ns")

    def __init__(self, operators: int) -> None:
        self.begin_ns = 0
        self.finish_ns = 0
        self.start_ns = [0] * operators
        self.end_ns = [0] * operators


class LaneExecutor:
    """Runs one plan of one bound program, again and again. Nothing is kept between runs; concurrent runs queue on the pool.

    Args:
        bound: the program, on the CPU.
        plan: of the same graph.
        pool: threads to share with other executors; its own by default.
        engine: the fastest that can run this plan; ``PYTHON`` for that one in any case.
        as_team: false gives native lanes threads of their own in any case: for comparisons.
    """

    def __init__(
        self, bound: BoundProgram, plan: Plan, pool: LanePool | None = None, engine: Engine = Engine.NATIVE, *, as_team: bool = True
    ) -> None:
        self._bound = bound
        self._kernels = bound.kernels
        self._operators = len(bound.kernels)
        lanes = [plan.of_lane(lane) for lane in range(plan.lanes)] if plan.lanes > 1 else [plan.steps]
        # Where lanes have threads of their own, the caller's takes the lane with the wide operators: OpenMP gives every thread that runs
        # one a team of its own, and two teams on the same cores stop spinning at their barriers for as long as the process lives, which
        # slows both.
        lanes.sort(key=lambda steps: -sum(step.width > 1 for step in steps))
        self._steps = tuple(lanes)
        self._in_order = plan.steps
        self._pool = pool if pool is not None else LanePool()
        self._widest = max((step.width for step in plan.steps), default=1)
        own_core = plan.lanes <= usable_cores() and self._widest == 1
        self._spins = SPINS_OWN_CORE if own_core else SPINS_SHARED_CORE
        self._native = _native_plan(bound, plan, self._steps, own_core, as_team) if engine is Engine.NATIVE else None

    @property
    def engine(self) -> Engine:
        """What runs the lanes."""
        return Engine.PYTHON if self._native is None else Engine.NATIVE

    @property
    def one_team(self) -> bool:
        """Whether the lanes are the threads of one team, so that an operator of several threads runs alone."""
        return self._native is not None and self._native.one_team

    @property
    def lanes(self) -> int:
        """Number of lanes, the caller's thread included."""
        return len(self._steps)

    @property
    def in_place(self) -> tuple[Chain, ...]:
        """What a run changes of its inputs."""
        return self._bound.in_place

    @property
    def widest(self) -> int:
        """Most threads that one operator uses."""
        return self._widest

    @property
    def team(self) -> int:
        """Most threads of the calling thread's OpenMP team that are at work at once; 1 if it has none."""
        return max(self._widest, self.lanes if self.one_team else 1)

    def run(self, inputs: Sequence[torch.Tensor], trace: Trace | None = None) -> list[torch.Tensor]:
        """Run the plan.

        Args:
            inputs: in the order of the graph's inputs.
            trace: filled in if given; costs about 0.2 us for each operator.

        Returns:
            The tensors of the graph's outputs, in order.

        Raises:
            BaseException: what the first failing operator raised; the other lanes have stopped by then.
        """
        with inference_mode(True):
            if trace is not None:
                trace.begin_ns = time.perf_counter_ns()
            outputs = self._run_python(inputs, trace) if self._native is None else self._native.run(inputs, trace, self._pool)
            if trace is not None:
                trace.finish_ns = time.perf_counter_ns()
            return outputs

    def _run_python(self, inputs: Sequence[torch.Tensor], trace: Trace | None) -> list[torch.Tensor]:
        threads = torch.get_num_threads()
        slots = self._bound.new_slots(inputs)
        try:
            if len(self._steps) == 1:
                walk(self._steps[0], _lane(slots, self._kernels, None, trace))
            else:
                self._run_lanes(slots, trace)
        finally:
            try:
                self._put_back(threads)
            except BaseException:
                # Of a signal's handler, just then: the thread would keep a lane's count for life.
                self._put_back(threads)
                raise
        return self._bound.outputs(slots)

    def _put_back(self, threads: int) -> None:
        # Also when PyTorch's count of this thread is untouched: MKL's, which cannot be asked for, may not be.
        if self.lanes > 1 or torch.get_num_threads() != threads:
            use_threads(threads)

    def _run_lanes(self, slots: Slots, trace: Trace | None) -> None:
        signals = Signals(self._operators + len(self._steps), self._spins)
        steps, kernels = self._steps, self._kernels

        def walk_lane(lane: int) -> None:
            walk(steps[lane], _lane(slots, kernels, signals, trace))

        if threads_are_real():
            with contextlib.suppress(NoThreads):
                self._pool.run(walk_lane, len(steps), signals, self._operators)
                return
        walk(self._in_order, _lane(slots, kernels, signals, trace))


class _Lane:
    """One lane of one run, as the walk sees it."""

    __slots__ = ("_kernels", "_signals", "_slots", "_width")

    def __init__(self, slots: Slots, kernels: tuple[Kernel, ...], signals: Signals | None) -> None:
        self._slots = slots
        self._kernels = kernels
        self._signals = signals
        self._width = torch.get_num_threads()

    def wait(self, step: Step, producer: int) -> None:
        assert self._signals is not None
        self._signals.wait(producer)

    def launch(self, step: Step) -> None:
        if step.width != self._width:
            self._widen(step.width)
        if self._signals is not None and self._signals.error is not None:
            raise LaneStopped
        self._kernels[step.operator](self._slots)

    def record(self, step: Step) -> None:
        if self._signals is not None:
            self._signals.set(step.operator)

    def free(self, step: Step) -> None:
        slots = self._slots
        for value in step.frees:
            slots[value] = None

    def _widen(self, width: int) -> None:
        use_threads(width)
        self._width = width


class _TracedLane(_Lane):
    """A lane that notes when each operator ran."""

    __slots__ = ("_trace",)

    def __init__(self, slots: Slots, kernels: tuple[Kernel, ...], signals: Signals | None, trace: Trace) -> None:
        super().__init__(slots, kernels, signals)
        self._trace = trace

    def launch(self, step: Step) -> None:
        if step.width != self._width:
            self._widen(step.width)
        if self._signals is not None and self._signals.error is not None:
            raise LaneStopped
        kernel = self._kernels[step.operator]
        start_ns = time.perf_counter_ns()
        kernel(self._slots)
        end_ns = time.perf_counter_ns()
        self._trace.start_ns[step.operator] = start_ns
        self._trace.end_ns[step.operator] = end_ns


def _lane(slots: Slots, kernels: tuple[Kernel, ...], signals: Signals | None, trace: Trace | None) -> _Lane:
    return _Lane(slots, kernels, signals) if trace is None else _TracedLane(slots, kernels, signals, trace)


def _native_plan(bound: BoundProgram, plan: Plan, lanes: Sequence[Sequence[Step]], own_core: bool, as_team: bool) -> NativePlan | None:
    if (library := native_library()) is None:
        return None
    # Lanes that share a core wait for each other, and none may wait for a thread that has none.
    as_team = as_team and 1 < len(lanes) <= usable_cores() and team_comes(library, team_size(lanes))
    spin_us = SPIN_OWN_CORE_US if own_core else _SPIN_SHARED_CORE_US
    try:
        return NativePlan(library, bound, lanes, spin_us, plan.steps, as_team=as_team)
    except NotNative as why:
        _log.info("a plan runs on lanes of Python: %s", why)
        return None
