"""The CPU executor: lanes are threads, an event is a flag, and every lane walks its own part of the plan.

Python threads suffice because PyTorch releases the interpreter lock inside operators. A waiting lane spins for a bounded
time, giving up the lock at every turn, and then sleeps: unbounded spinning collapses as soon as another process takes a core.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue

import torch

from autosched.runtime.calls import Kernel, Slots
from autosched.runtime.forking import outlive_forks
from autosched.runtime.host_key import usable_cores
from autosched.runtime.kernels import BoundProgram
from autosched.runtime.plan import Plan, Step
from autosched.runtime.walk import walk

# Turns of yielding before a waiting lane sleeps, about 0.7 us each. Waking a sleeper costs tens of microseconds, so lanes that
# have a core each wait long; a lane that waits beside wide operators, or without a core of its own, would steal what it waits for.
_SPINS_OWN_CORE = 400
_SPINS_SHARED_CORE = 20

_Task = Callable[[int], None]


def _sleep_zero() -> None:
    time.sleep(0)


# A zero sleep costs the timer slack (tens of microseconds) on Linux; sched_yield costs less than one.
_give_way: Callable[[], None] = getattr(os, "sched_yield", _sleep_zero)


class LaneStopped(Exception):
    """Raised in a lane because another lane failed; never leaves this module."""


class Signals:
    """Flags that lanes raise for each other during one run. All methods may be called from any lane.

    Relies on the interpreter lock for the order of memory accesses.

    Args:
        count: number of flags, all down at first.
        spins: turns a waiting lane yields before it sleeps.
    """

    __slots__ = ("_condition", "_flags", "_sleepers", "_spins", "error")

    def __init__(self, count: int, spins: int = _SPINS_OWN_CORE) -> None:
        self._spins = spins
        self._flags = bytearray(count)
        self._condition = threading.Condition(threading.Lock())
        self._sleepers = 0
        self.error: BaseException | None = None

    def set(self, index: int) -> None:
        """Raise flag ``index`` and wake whoever sleeps."""
        self._flags[index] = 1
        # A lane counts itself as a sleeper before it looks at the flag for the last time, so none can be missed here.
        if self._sleepers:
            with self._condition:
                self._condition.notify_all()

    def sleep_at_once(self) -> None:
        """From now on whoever waits sleeps without polling first: a lane that polls takes the interpreter's lock from those that work."""
        self._spins = 0

    def fail(self, error: BaseException) -> None:
        """Remember the first error of the run and wake every lane, so that it stops."""
        with self._condition:
            if self.error is None:
                self.error = error
            self._condition.notify_all()

    def wait(self, index: int) -> None:
        """Return once flag ``index`` is up.

        Raises:
            LaneStopped: if a lane failed meanwhile.
        """
        if not self._await(index, stop_on_error=True):
            raise LaneStopped

    def join(self, index: int) -> None:
        """Return once flag ``index`` is up, whatever failed."""
        self._await(index, stop_on_error=False)

    def _await(self, index: int, *, stop_on_error: bool) -> bool:
        flags = self._flags
        if flags[index]:
            return True
        for _ in range(self._spins):
            _give_way()
            if flags[index]:
                return True
        with self._condition:
            self._sleepers += 1
            try:
                while not flags[index]:
                    if stop_on_error and self.error is not None:
                        return False
                    self._condition.wait()
            finally:
                self._sleepers -= 1
        return True


class Trace:
    """When each operator of one run started and ended: nanoseconds of ``time.perf_counter_ns``, by operator index; 0 if not run."""

    __slots__ = ("begin_ns", "end_ns", "finish_ns", "start_ns")

    def __init__(self, operators: int) -> None:
        self.begin_ns = 0
        self.finish_ns = 0
        self.start_ns = [0] * operators
        self.end_ns = [0] * operators


class LanePool:
    """Threads that outlive a run, one for each lane but the first, which is always the calling thread.

    They are started when first needed, each in inference mode for its whole life, and end when the pool is closed or collected.
    One run at a time: concurrent callers queue.
    """

    def __init__(self) -> None:
        self._queues: list[SimpleQueue[Callable[[], None] | None]] = []
        self._busy = threading.Lock()
        self._finalizer = weakref.finalize(self, _stop_threads, self._queues)
        outlive_forks(self)

    def run(self, task: _Task, lanes: int, signals: Signals, first_flag: int) -> None:
        """Call ``task(lane)`` on every lane at once and return when all have ended.

        Args:
            task: is called under ``torch.inference_mode()`` on lanes other than 0; the caller sees to lane 0.
            signals: flags ``first_flag + lane`` are raised when a lane has ended; ``LaneStopped`` in a task is swallowed.

        Raises:
            BaseException: the first error of any lane, once.
        """
        with self._busy:
            self._provide(lanes - 1)
            try:
                for lane in range(1, lanes):
                    self._queues[lane - 1].put(_LaneTask(task, lane, signals, first_flag + lane))
                _LaneTask(task, 0, signals, first_flag)()
                self._join(lanes, signals, first_flag)
            except BaseException as error:
                # An interrupt: stop the lanes, then wait for them, so that none works on after the caller has left. Nobody knows which
                # lanes have a task; what is put behind it, or instead of it, tells that the lane has ended.
                signals.fail(error)
                for lane in range(1, lanes):
                    self._queues[lane - 1].put(partial(signals.set, first_flag + lane))
                self._join(lanes, signals, first_flag)
        failure, signals.error = signals.error, None
        if failure is not None:
            try:
                raise failure
            finally:
                # Its traceback holds this frame, and with it every tensor of the run.
                del failure

    def close(self) -> None:
        """End the threads. The pool may be used again afterwards."""
        with self._busy:
            _stop_threads(self._queues)

    def after_fork(self) -> None:
        """The threads are the parent's; so is a run that held the lock."""
        self._queues.clear()
        self._busy = threading.Lock()

    def _join(self, lanes: int, signals: Signals, first_flag: int) -> None:
        for lane in range(1, lanes):
            signals.join(first_flag + lane)

    def _provide(self, threads: int) -> None:
        while len(self._queues) < threads:
            queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            self._queues.append(queue)
            # Daemon: a sleeping lane must never keep a process alive.
            threading.Thread(target=_serve, args=(queue,), name=f"autosched-lane-{len(self._queues)}", daemon=True).start()


class LaneExecutor:
    """Runs one plan of one bound program, again and again. Nothing is kept between runs; concurrent runs queue on the pool.

    Args:
        bound: the program, on the CPU.
        plan: of the same graph.
        pool: threads to share with other executors; its own by default.
    """

    def __init__(self, bound: BoundProgram, plan: Plan, pool: LanePool | None = None) -> None:
        self._bound = bound
        self._kernels = bound.kernels
        self._operators = len(bound.kernels)
        lanes = [plan.of_lane(lane) for lane in range(plan.lanes)] if plan.lanes > 1 else [plan.steps]
        # The caller's thread takes the lane with the wide operators: OpenMP gives every thread that runs one a team of its own, and two
        # teams on the same cores stop spinning at their barriers for as long as the process lives, which slows both.
        lanes.sort(key=lambda steps: -sum(step.width > 1 for step in steps))
        self._steps = tuple(lanes)
        self._pool = pool if pool is not None else LanePool()
        self._widest = max((step.width for step in plan.steps), default=1)
        own_core = plan.lanes <= usable_cores() and self._widest == 1
        self._spins = _SPINS_OWN_CORE if own_core else _SPINS_SHARED_CORE

    @property
    def lanes(self) -> int:
        """Number of lanes, the caller's thread included."""
        return len(self._steps)

    @property
    def widest(self) -> int:
        """Most threads that one operator uses."""
        return self._widest

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
        threads = torch.get_num_threads()
        with torch.inference_mode():
            slots = self._bound.new_slots(inputs)
            if trace is not None:
                trace.begin_ns = time.perf_counter_ns()
            try:
                if len(self._steps) == 1:
                    walk(self._steps[0], _lane(slots, self._kernels, None, trace))
                else:
                    self._run_lanes(slots, trace)
            finally:
                # Also when this thread's own count is untouched: a lane's change is what new threads would inherit.
                if self.lanes > 1 or torch.get_num_threads() != threads:
                    torch.set_num_threads(threads)
            if trace is not None:
                trace.finish_ns = time.perf_counter_ns()
            return self._bound.outputs(slots)

    def _run_lanes(self, slots: Slots, trace: Trace | None) -> None:
        signals = Signals(self._operators + len(self._steps), self._spins)
        steps, kernels = self._steps, self._kernels

        def walk_lane(lane: int) -> None:
            walk(steps[lane], _lane(slots, kernels, signals, trace))

        self._pool.run(walk_lane, len(steps), signals, self._operators)


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
        torch.set_num_threads(width)
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


class _LaneTask:
    """One lane's share of one run, with its errors and its end reported."""

    __slots__ = ("_flag", "_lane", "_signals", "_task")

    def __init__(self, task: _Task, lane: int, signals: Signals, flag: int) -> None:
        self._task = task
        self._lane = lane
        self._signals = signals
        self._flag = flag

    def __call__(self) -> None:
        try:
            self._task(self._lane)
        except LaneStopped:
            pass
        except BaseException as error:
            self._signals.fail(error)
        finally:
            self._signals.set(self._flag)


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    # A new thread takes its thread count from whoever set one last, at its first question; ask now, so that no later answer changes it.
    torch.get_num_threads()
    with torch.inference_mode():
        while (task := queue.get()) is not None:
            task()
            # Else the last run's tensors would live on in this frame until the next one.
            del task


def _stop_threads(queues: Iterable[SimpleQueue[Callable[[], None] | None]]) -> None:
    for queue in list(queues):
        queue.put(None)
    if isinstance(queues, list):
        queues.clear()
