"""Runs of several calling threads, made by one thread: OpenMP gives each thread that calls a team of its own.

Teams spin for their next operator only as long as all of them together have no more threads than there are cores; from then on each is
put to sleep after every operator and woken for the next, and a model of many small operators takes half as long again. So a thread that
has loaded a model lets its team go, and where threads take turns in calling, one thread of ours runs what they call. A thread that has been
the only one for some time runs its calls itself: to hand a run over takes some tens of microseconds. So does one whose run is not begun for
some milliseconds, because another model's run takes long: with a team of its own it is slower than alone, and need not wait for that.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence

import torch

from autosched.core.standing_aside import serve
from autosched.runtime.cores import cores_of_thread
from autosched.runtime.forking import outlive_forks, rest_openmp
from autosched.runtime.lane_pool import threads_are_real

Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
_Outcome = list[torch.Tensor] | BaseException

# After so many calls in a row it is one thread that calls.
_FAITHFUL = 64
# Longer than the runs of several small models together.
_PATIENCE_S = 0.005


class _HasTeam(threading.local):
    """Whether this thread has run something itself since it let its team go."""

    yes = False


class CallingThreads:
    """The threads of this process that call schedules which want most of its cores."""

    def __init__(self) -> None:
        self._has_team = _HasTeam()
        self._forget()
        outlive_forks(self)

    def run(self, run: Run, inputs: Sequence[torch.Tensor], *, threads: int = 1) -> list[torch.Tensor]:
        """What ``run(inputs)``, which takes so many threads, returns or raises, by whichever thread is the better one."""
        owner = self._owner_for(threading.get_ident(), threads)
        if owner is None:
            self._has_team.yes = True
            return run(inputs)
        if self._has_team.yes:
            self.let_go()
        made = owner.run(run, inputs)
        if made is None:
            self._has_team.yes = True
            return run(inputs)
        return made

    def let_go(self) -> None:
        """Let this thread's team go; it has another when it next runs something itself."""
        self._has_team.yes = False
        rest_openmp()

    def after_fork(self) -> None:
        """The new process has one thread."""
        self._forget()

    def _forget(self) -> None:
        # Its thread may take it again: a signal's handler, or a finalizer, may call a schedule while it is held.
        self._lock = threading.RLock()
        self._last = 0
        self._in_a_row = 0
        self._shared = False
        self._owner: _Owner | None = None

    def _owner_for(self, caller: int, threads: int) -> _Owner | None:
        """Who runs what ``caller`` calls; ``None`` for itself."""
        owner = self._owner
        if owner is not None and caller == owner.ident:
            return None  # an operator in Python that calls a schedule
        if caller == self._last and not self._shared:
            return None
        if sys.is_finalizing():
            return None  # of a finalizer at the interpreter's end, when no thread of ours runs any more
        if not threads_are_real():
            return None  # they have one team in any case
        with self._lock:
            if caller != self._last:
                self._shared = self._last != 0
                self._last, self._in_a_row = caller, 0
            self._in_a_row += 1
            if not self._shared:
                return None
            if self._owner is None:
                if cores_of_thread() < threads:
                    return None  # all calls would have the few cores of this one, for good
                try:
                    self._owner = _Owner()
                except RuntimeError:
                    return None  # there are no more threads
            if self._in_a_row > _FAITHFUL:
                self._shared = False
                self._owner.let_go()
                return None
            return self._owner


class _Owner:
    """A thread that runs what others hand to it, one after the other."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._work, name="autosched-calls", daemon=True)
        thread.start()
        assert thread.ident is not None
        self.ident = thread.ident

    def run(self, run: Run, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """As ``CallingThreads.run``; ``None`` if it is taken back, because another one's run takes long."""
        job = _Job(run, inputs)
        try:
            self._jobs.put(job)
            if not job.wait(_PATIENCE_S) and job.claim():
                return None
            job.wait()
        except BaseException:
            # Until it has ended it uses the caller's memory, and nobody else may run the schedule.
            self._outlast()
            job.take()
            raise
        outcome = job.take()
        assert outcome is not None
        if isinstance(outcome, BaseException):
            try:
                raise outcome
            finally:
                del outcome  # its frames hold this one
        return outcome

    def _outlast(self) -> None:
        """Wait until all that was handed over has ended, whatever signals say meanwhile: the last of it may not have come so far."""
        while True:
            behind = _Job(_nothing, ())
            try:
                self._jobs.put(behind)
                behind.wait()
            except BaseException:  # another Ctrl-C
                continue
            return

    def let_go(self) -> None:
        """Let its team go when it has done what it was given."""
        self._jobs.put(None)

    def _work(self) -> None:
        # Garbage may be collected here, too.
        serve()
        while True:
            job = self._jobs.get()
            if job is None:
                rest_openmp()
                continue
            job.do()
            # Nothing of a caller's is held until the next one calls.
            del job


class _Job:
    """One call, and what came of it. That it has ended is kept and not only told: an interrupt may come just when the caller was told."""

    __slots__ = ("_claimed", "_inputs", "_outcome", "_run", "_running")

    def __init__(self, run: Run, inputs: Sequence[torch.Tensor]) -> None:
        self._run, self._inputs = run, inputs
        self._outcome: _Outcome | None = None
        self._claimed = threading.Lock()
        self._running = threading.Lock()
        self._running.acquire()

    def claim(self) -> bool:
        """Whether it is for the calling thread to run it: nobody else has claimed it."""
        return self._claimed.acquire(blocking=False)

    def do(self) -> None:
        """Run it, and tell the caller, unless that has claimed it."""
        if not self.claim():
            return
        try:
            self._outcome = self._run(self._inputs)
        except BaseException as error:
            self._outcome = error
        self._running.release()

    def wait(self, limit_s: float = -1.0) -> bool:
        """Wait until it has ended, for an interrupt, or for so many seconds; whether it has ended."""
        while self._outcome is None:
            if not self._running.acquire(timeout=limit_s):
                return False
        return True

    def take(self) -> _Outcome | None:
        """Its outcome if it has ended, which is not held here any longer: the frames of an error hold this."""
        outcome, self._outcome = self._outcome, None
        return outcome


def _nothing(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return []


calling_threads = CallingThreads()
