"""Threads that outlive a run, one for each lane but the first, and the flags that lanes raise for each other.

A waiting lane spins for a bounded time, giving up the interpreter's lock at every turn, and then sleeps: unbounded spinning collapses as
soon as another process takes a core.
"""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from types import BuiltinFunctionType

import torch

from autosched.core.standing_aside import serve
from autosched.runtime.forking import outlive_forks

# Turns of yielding before a waiting lane sleeps, about 0.7 us each. Waking a sleeper costs tens of microseconds, so lanes that
# have a core each wait long; a lane that waits beside wide operators, or without a core of its own, would steal what it waits for.
SPINS_OWN_CORE = 400
SPINS_SHARED_CORE = 20

_Task = Callable[[int], None]


def _sleep_zero() -> None:
    time.sleep(0)


# A zero sleep costs the timer slack (tens of microseconds) on Linux; sched_yield costs less than one.
_give_way: Callable[[], None] = getattr(os, "sched_yield", _sleep_zero)


def threads_are_real() -> bool:
    """Whether a thread that Python starts is one. With gevent and eventlet, which put a function in the place of the interpreter's, it is a
    turn of a single thread: none goes on while another one waits outside of the interpreter.
    """
    return isinstance(_thread.start_new_thread, BuiltinFunctionType)


def threads_can_start(count: int) -> bool:
    """Whether so many more can be started now, as far as one attempt tells: OpenMP ends the process where it cannot (``ulimit -u``, and a
    container's limit of processes, count threads).
    """
    over = threading.Event()
    trial: list[threading.Thread] = []
    try:
        for _ in range(count if threads_are_real() else 0):
            thread = threading.Thread(target=over.wait, name="autosched-trial", daemon=True)
            thread.start()
            trial.append(thread)
    except RuntimeError:
        return False
    finally:
        over.set()
        # The team's threads are to find their places free.
        for thread in trial:
            thread.join()
    return True


class NoThreads(RuntimeError):
    """No thread can be started for a lane; nothing has run."""


class LaneStopped(Exception):
    """Raised in a lane because another lane failed; never leaves a run."""


class Signals:
    """Flags that lanes raise for each other during one run. All methods may be called from any lane.

    Relies on the interpreter lock for the order of memory accesses.

    Args:
        count: number of flags, all down at first.
        spins: turns a waiting lane yields before it sleeps.
    """

    __slots__ = ("_condition", "_flags", "_sleepers", "_spins", "error")

    def __init__(self, count: int, spins: int = SPINS_OWN_CORE) -> None:
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


class LanePool:
    """Threads that outlive a run, one for each lane but the first, which is always the calling thread.

    They are started when first needed, each in inference mode for its whole life, and end when the pool is closed or collected.
    One run at a time: concurrent callers queue.

    Args:
        users_code: whether operators may be a user's own, which may call other schedules.
    """

    def __init__(self, *, users_code: bool = True) -> None:
        self._users_code = users_code
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
            NoThreads: there are none for the other lanes.
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
                # An interrupt: stop the lanes, then wait for them, so that none works on after the caller has left. It may not be the last.
                signals.fail(error)
                while not self._left(lanes, signals, first_flag):
                    pass
        failure, signals.error = signals.error, None
        if failure is not None:
            try:
                raise failure
            finally:
                # Its traceback holds this frame, and with it every tensor of the run.
                del failure

    @property
    def turn(self) -> threading.Lock:
        """Who runs lanes on threads that are not the pool's holds it meanwhile."""
        return self._busy

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

    def _left(self, lanes: int, signals: Signals, first_flag: int) -> bool:
        """Whether all lanes have ended, and not this thread was interrupted again; each stops before its next operator."""
        try:
            # Nobody knows which lanes have a task; what is put behind it, or instead of it, tells that the lane has ended.
            for lane in range(1, lanes):
                self._queues[lane - 1].put(partial(signals.set, first_flag + lane))
            self._join(lanes, signals, first_flag)
        except BaseException:
            # What came first is what the run ends in.
            return False
        return True

    def _provide(self, threads: int) -> None:
        while len(self._queues) < threads:
            if sys.is_finalizing():
                # One that is started now never runs, and before Python 3.12 whoever starts it waits for that.
                raise NoThreads("the interpreter is ending")
            queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            # Daemon: a sleeping lane must never keep a process alive.
            thread = threading.Thread(
                target=_serve, args=(queue, self._users_code), name=f"autosched-lane-{len(self._queues) + 1}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                raise NoThreads(str(error)) from error
            except BaseException:
                # It has come to life, and only this one was interrupted.
                queue.put(None)
                raise
            # Not before: nobody would take what the next run puts there.
            self._queues.append(queue)


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


def _serve(queue: SimpleQueue[Callable[[], None] | None], users_code: bool) -> None:
    if not users_code:
        # Garbage may be collected here, too.
        serve()
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
