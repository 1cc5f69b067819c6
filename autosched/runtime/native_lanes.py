"""A plan as a program for ``native/lanes.cpp``: every lane is one call without the interpreter, where all of its kernels say what they do.

Python threads cost what they cost at every operator: whoever ends one needs the interpreter's lock, and where another lane holds it, that
is a sleep and a wake-up. Here the lock is given up once for each lane and run. Threads and their queues stay those of ``lane_pool``.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from autosched.runtime.instructions import instructions_of
from autosched.runtime.kernels import BoundProgram
from autosched.runtime.lane_pool import LanePool, Signals
from autosched.runtime.native_build import Library
from autosched.runtime.native_code import NativeCode, NativeStep, NotNative, Writer
from autosched.runtime.plan import Step

if TYPE_CHECKING:
    from autosched.runtime.lanes import Trace


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
            with torch.inference_mode():
                self._handle: int = library.compile(written.code, written.reals, written.texts, written.dtypes, written.constants)
        except (RuntimeError, IndexError) as error:
            raise NotNative(str(error).splitlines()[0]) from None
        self._library = library
        self._lanes = len(native.lanes)
        self._kept = written.kept
        weakref.finalize(self, library.delete_program, self._handle).atexit = False

    def run(self, inputs: Sequence[torch.Tensor], times: torch.Tensor | None, pool: LanePool) -> list[torch.Tensor]:
        """Run it on the calling thread, which is in inference mode, and as many of the pool's as it has other lanes.

        Args:
            times: int64 ``[2, flags]``, where the starts and ends of steps go, nanoseconds of ``time.perf_counter_ns``.

        Returns:
            The tensors of the outputs, in order.

        Raises:
            BaseException: what the first failing operator raised; the other lanes have stopped by then.
        """
        if self._lanes > 1:
            return self._walked(_Run(self._library, self._library.begin(self._handle, inputs, times)), pool)
        outputs, unfinished = self._library.run_alone(self._handle, inputs, times)
        made: list[torch.Tensor] = self._walked(_Run(self._library, unfinished), pool) if unfinished else outputs
        return made

    def _walked(self, run: _Run, pool: LanePool) -> list[torch.Tensor]:
        try:
            if self._lanes == 1:
                run.walk(0)
            else:
                signals = _NativeSignals(run, self._lanes)
                pool.run(signals.walk, self._lanes, signals, 0)
            return run.finish()
        except BaseException:
            run.abandon()
            raise


class NativePlan:
    """One plan of one bound program.

    Args:
        library: what was built of ``lanes.cpp``.
        bound: the program, on the CPU.
        lanes: the steps of each lane; the caller's thread takes the first.
        spin_us: how long a lane that waits asks again before it sleeps.
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
        delays_us: Mapping[int, float] | None = None,
    ) -> None:
        graph, delays = bound.program.graph, delays_us or {}
        steps = tuple(tuple(_native_step(bound, step, delays.get(step.operator, 0.0)) for step in lane) for lane in lanes)
        self._operators = len(bound.kernels)
        self._program = NativeProgram(library, NativeCode(steps, self._operators, spin_us, bound.constants, graph.inputs, graph.outputs))

    def run(self, inputs: Sequence[torch.Tensor], trace: Trace | None, pool: LanePool) -> list[torch.Tensor]:
        """As :meth:`NativeProgram.run`."""
        if trace is None:
            return self._program.run(inputs, None, pool)
        # Zeros: an operator that did not run has none.
        times = torch.zeros(2, self._operators, dtype=torch.int64)
        try:
            return self._program.run(inputs, times, pool)
        finally:
            trace.start_ns, trace.end_ns = times.tolist()


def _native_step(bound: BoundProgram, step: Step, delay_us: float) -> NativeStep:
    instructions = instructions_of(bound.kernels[step.operator])
    if instructions is None:
        raise NotNative(f"operator {step.operator} can only be called from Python")
    return NativeStep(step.operator, step.width, instructions, step.waits, step.records, step.frees, delay_us=delay_us)


class _Run:
    """One run; its memory is given back with the last reference, which every lane has while it may still look at it."""

    __slots__ = ("_handle", "_library")

    def __init__(self, library: Library, handle: int) -> None:
        self._library = library
        self._handle = handle

    def walk(self, lane: int) -> None:
        """Walk a lane to its end. It comes back to Python now and then, so that signals are heard."""
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

    def __del__(self) -> None:
        self._library.delete_run(self._handle)


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
