"""A plan as a program for ``native/lanes.cpp``: a run is one call without the interpreter, where all of its kernels say what they do.

Python threads cost what they cost at every operator: whoever ends one needs the interpreter's lock, and where another lane holds it, that
is a sleep and a wake-up. Here the lock is given up once for each run. Lanes are the threads of the calling thread's OpenMP team, the one
that its wide operators have: they are awake, and a core has no second thread that spins beside it. Where there are more lanes than cores,
or fewer threads come than lanes there are, lanes have threads of their own, those of ``lane_pool``, if there are threads.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from autosched.core.computed_once import computed_once
from autosched.core.from_outside import let_through
from autosched.runtime.instructions import instructions_of
from autosched.runtime.kernels import BoundProgram
from autosched.runtime.lane_pool import LanePool, NoThreads, Signals, threads_are_real, threads_can_start
from autosched.runtime.lateness import Lateness, Walkers
from autosched.runtime.native.build import Library
from autosched.runtime.native.code import NativeCode, NativeStep, NotNative, Writer
from autosched.runtime.phases import Phase, phases_of
from autosched.runtime.plan import Step
from autosched.runtime.thread_state import inference_mode

if TYPE_CHECKING:
    from autosched.runtime.lanes import Trace

_log = logging.getLogger(__name__)

# A lane that waits has the core of a team's thread, which would spin there if it had nothing to walk.
TEAM_SPIN_US = 2000.0
# The numbers of native/walk.h.
_FORSAKEN, _DESERTED, _ENDED, _PAUSED, _LATE = -2, -1, 0, 1, 2


class Deserted(RuntimeError):
    """Fewer threads came to a team than it has lanes: others have them, or OpenMP was told to have fewer. A failure like an operator's.

    Args:
        midway: whether operators had run by then.
    """

    def __init__(self, *, midway: bool) -> None:
        super().__init__("OpenMP gave fewer threads than a schedule has lanes")
        self.midway = midway


class NativeProgram:
    """Lanes that the library runs. May be run from several threads at once: what a run changes is its own.

    Args:
        library: what was built of ``lanes.cpp``.
        native: what to run; the caller's thread takes the first lane.

    Raises:
        NotNative: if it holds something that cannot be done natively.
    """

    def __init__(self, library: Library, native: NativeCode) -> None:
        written = Writer(native)
        try:
            with inference_mode(True):
                self._handle: int = library.compile(written.code, written.reals, written.texts, written.dtypes, written.constants)
        except (RuntimeError, IndexError) as error:
            let_through(error)
            raise NotNative(str(error).splitlines()[0]) from None
        self._library = library
        self._lanes = native.lanes
        self._threaded = native.lanes > 1 and not native.team
        self._kept = written.kept
        self.late = False  # whether the team was, in the last run
        weakref.finalize(self, library.delete_program, self._handle).atexit = False

    def run(self, inputs: Sequence[torch.Tensor], times: torch.Tensor | None, pool: LanePool) -> list[torch.Tensor]:
        """Run it on the calling thread, which is in inference mode, and as many others as it has other lanes: a team's, or the pool's.

        Args:
            times: int64 ``[2, flags]``, where the starts and ends of steps go, nanoseconds of ``time.perf_counter_ns``.
            pool: runs of several lanes that share one take turns, whosever threads they have.

        Returns:
            The tensors of the outputs, in order.

        Raises:
            Deserted: the team is too small. The run is not done, and nothing of it is left but what its operators wrote in place.
            BaseException: what the first failing operator raised; the other lanes have stopped by then.
        """
        if self._threaded:
            return self._on_threads(_Run(self._library, self._handle, inputs, times), pool)
        if self._lanes == 1:
            return self._here(inputs, times)
        with pool.turn:
            return self._here(inputs, times)

    def _here(self, inputs: Sequence[torch.Tensor], times: torch.Tensor | None) -> list[torch.Tensor]:
        outputs: list[torch.Tensor]
        try:
            outputs, outcome = self._library.run_here(self._handle, inputs, times)
            # It comes back to Python now and then, so that signals are heard.
            begun = outcome == _PAUSED
            while outcome == _PAUSED:
                outputs, outcome = self._library.resume(self._handle)
        except BaseException:
            # An interrupt is heard just when the run has paused.
            self._library.forget(self._handle)
            raise
        if outcome < _ENDED:
            raise Deserted(midway=begun or outcome == _FORSAKEN)
        self.late = outcome == _LATE
        return outputs

    def _on_threads(self, run: _Run, pool: LanePool) -> list[torch.Tensor]:
        signals = _NativeSignals(run, self._lanes)
        return run.finished(lambda: pool.run(signals.walk, self._lanes, signals, 0))


class NativePlan:
    """One plan of one bound program.

    Args:
        library: what was built of ``lanes.cpp``.
        bound: the program, on the CPU.
        lanes: the steps of each lane; the caller's thread takes the first.
        spin_us: how long a lane that has a thread of its own asks again before it sleeps.
        steps: all of them in launch order.
        as_team: whether the lanes are a team's threads; else they have threads of their own.
        delays_us: how long an operator is held back, by index: for tests that look for missing waits.

    Raises:
        NotNative: if a kernel does not say what it does, or says something that cannot be done natively.
    """

    def __init__(
        self,
        library: Library,
        bound: BoundProgram,
        lanes: Sequence[Sequence[Step]],
        spin_us: float,
        steps: Sequence[Step],
        *,
        as_team: bool = False,
        delays_us: Mapping[int, float] | None = None,
    ) -> None:
        self._library = library
        self._bound = bound
        self._lanes: Phase = tuple(tuple(steps) for steps in lanes)
        self._spin_us = spin_us
        self._delays_us = dict(delays_us or {})
        self._operators = len(bound.kernels)
        self._steps = tuple(steps)
        self._lateness = Lateness()
        self._of_team = self._program(phases_of(steps), TEAM_SPIN_US, team_size(lanes)) if as_team else None
        if self._of_team is None:
            _ = self._of_lanes

    @property
    def one_team(self) -> bool:
        """Whether its lanes are a team's threads."""
        return self._of_team is not None

    def run(self, inputs: Sequence[torch.Tensor], trace: Trace | None, pool: LanePool) -> list[torch.Tensor]:
        """As :meth:`NativeProgram.run`; a team that is too small is not asked again, and the lanes run on threads of their own.

        Raises:
            Deserted: only where operators of a run that writes in place had run by then.
        """
        if trace is None:
            return self._run(inputs, None, pool)
        # Zeros: an operator that did not run has none.
        times = torch.zeros(2, self._operators, dtype=torch.int64, device="cpu")
        try:
            return self._run(inputs, times, pool)
        finally:
            trace.start_ns, trace.end_ns = times.tolist()

    def _run(self, inputs: Sequence[torch.Tensor], times: torch.Tensor | None, pool: LanePool) -> list[torch.Tensor]:
        # Whoever wants times wants those of the team.
        who = Walkers.TEAM if times is not None else self._lateness.walkers()
        begin_ns = time.perf_counter_ns()
        if self._of_team is not None and who is Walkers.TEAM:
            try:
                outputs = self._of_team.run(inputs, times, pool)
            except Deserted as why:
                _log.info("OpenMP gave fewer threads than there are lanes; from now on they have threads of their own")
                self._of_team = None
                if why.midway and self._bound.in_place:
                    # A second run would change once more what the first has changed.
                    raise
            else:
                self._lateness.came(time.perf_counter_ns() - begin_ns, late=self._of_team.late)
                return outputs
        if self._of_team is None:
            return self._without_team(inputs, times, pool)
        outputs = self._of_caller.run(inputs, times, pool) if who is Walkers.ALONE else self._without_team(inputs, times, pool)
        self._lateness.took(who, time.perf_counter_ns() - begin_ns)
        return outputs

    def _without_team(self, inputs: Sequence[torch.Tensor], times: torch.Tensor | None, pool: LanePool) -> list[torch.Tensor]:
        """By a thread for each lane, or by the caller alone where there are none."""
        try:
            return (self._of_lanes if threads_are_real() else self._of_caller).run(inputs, times, pool)
        except NoThreads:
            return self._of_caller.run(inputs, times, pool)

    @computed_once
    def _of_lanes(self) -> NativeProgram:
        return self._program((self._lanes,), self._spin_us, 0)

    @computed_once
    def _of_caller(self) -> NativeProgram:
        # Launch order keeps every wait, and what is freed after a step has no reader behind it.
        return self._program(((self._steps,),), self._spin_us, 0)

    def _program(self, phases: Sequence[Phase], spin_us: float, team: int) -> NativeProgram:
        graph = self._bound.program.graph
        native = tuple(tuple(tuple(self._step(step) for step in lane) for lane in phase) for phase in phases)
        return NativeProgram(
            self._library, NativeCode(native, self._operators, spin_us, self._bound.constants, graph.inputs, graph.outputs, team)
        )

    def _step(self, step: Step) -> NativeStep:
        instructions = instructions_of(self._bound.kernels[step.operator])
        if instructions is None:
            raise NotNative(f"operator {step.operator} can only be called from Python")
        delay_us = self._delays_us.get(step.operator, 0.0)
        return NativeStep(step.operator, step.width, instructions, step.waits, step.records, step.frees, delay_us=delay_us)


def team_size(lanes: Sequence[Sequence[Step]]) -> int:
    """How many threads a team must have to walk ``lanes`` and to run the widest of their operators."""
    return max(len(lanes), *(step.width for steps in lanes for step in steps))


@lru_cache(maxsize=64)
def team_comes(library: Library, threads: int) -> bool:
    """Whether a thread that asks OpenMP for a team of so many gets it, as far as one attempt tells."""
    return threads_can_start(threads - 1) and bool(library.team(threads) >= threads)


class _Run:
    """One run on threads: the memory of a tensor, which every lane refers to while it may still look at it.

    Args:
        program: handle of what is run.
        inputs, times: as for :meth:`NativeProgram.run`.
    """

    __slots__ = ("_handle", "_library")

    def __init__(self, library: Library, program: int, inputs: Sequence[torch.Tensor], times: torch.Tensor | None) -> None:
        self._library = library
        self._handle: torch.Tensor = library.begin(program, inputs, times)

    def finished(self, go_on: Callable[[], None]) -> list[torch.Tensor]:
        """What it makes, once ``go_on`` has returned."""
        try:
            go_on()
            return self.finish()
        except BaseException:
            self.abandon()
            raise

    def walk(self, lane: int) -> None:
        """Walk one lane, which has a thread of its own, to its end; comes back now and then as well."""
        while not self._library.walk(self._handle, lane):
            pass

    def stop(self) -> None:
        """Let every lane stop before its next operator."""
        self._library.stop(self._handle)

    def finish(self) -> list[torch.Tensor]:
        """The outputs, or the first error; every lane has ended."""
        made: list[torch.Tensor] = self._library.finish(self._handle)
        return made

    def abandon(self) -> None:
        """Let go of all tensors, as soon as no lane uses them."""
        self._library.abandon(self._handle)


class _NativeSignals(Signals):
    """The pool's side of a native run: one flag for the end of each lane, and errors of Python's own, such as an interrupt."""

    __slots__ = ("_ended", "_run")

    def __init__(self, run: _Run, lanes: int) -> None:
        super().__init__(lanes)
        self._run = run
        self._ended = False

    def walk(self, lane: int) -> None:
        """The task of a lane."""
        self._run.walk(lane)
        if lane == 0:
            # It ends after all others.
            self._ended = True

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._run.stop()

    def join(self, index: int) -> None:
        # That the threads of other lanes come back to Python as well is nothing to wait for.
        if not self._ended:
            super().join(index)
