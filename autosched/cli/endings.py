"""How a command ends before its time: somebody interrupts it, asks it to stop, closes its terminal, or no longer reads what it prints."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 128 + signal.SIGINT  # as a shell would say it, and what typer makes of an interrupt
_MOMENT_S = 0.05
_INTERRUPTS = ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL))
_GOES_ON = frozenset({"tune", "compare", "collect"})


class _Stopped(KeyboardInterrupt):
    """An interrupt of a type of its own: Python, once it has seen a bare one pass through ``exec``, ends by SIGINT whoever caught it."""


class Stop:
    """What the process was told; at first nothing."""

    def __init__(self) -> None:
        self.signal = signal.SIGINT

    @property
    def exit_code(self) -> int:
        """As a shell would say it."""
        return 128 + self.signal


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
    """Within, SIGTERM and SIGHUP are interrupts like Ctrl-C, so that children, locks and scratch files go the same way.

    One that somebody handles or ignores already (``nohup``) is left to them.
    """
    stop = Stop()

    def interrupt(number: int, frame: FrameType | None) -> None:
        stop.signal = signal.Signals(number)
        # A second one does what it would have done without us, should the first take too long.
        signal.signal(number, usual[number])
        if number == signal.SIGHUP:
            _leave_closed_terminal()
        raise _Stopped

    timers: list[threading.Timer] = []

    def ignored(what: sys.UnraisableHookArgs) -> None:
        """It came where Python lets no exception out (a callback of a C library, a destructor): once more, a moment later."""
        if not isinstance(what.exc_value, _Stopped):
            usual_hook(what)
            return
        signal.signal(stop.signal, interrupt)
        again = threading.Timer(_MOMENT_S, os.kill, (os.getpid(), stop.signal))
        again.daemon = True
        again.start()
        timers.append(again)

    usual: dict[int, Any] = {
        number: handler
        for number, handler in _INTERRUPTS
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is handler
    }
    for number in usual:
        signal.signal(number, interrupt)
    usual_hook, sys.unraisablehook = sys.unraisablehook, ignored
    try:
        yield stop
    finally:
        sys.unraisablehook = usual_hook
        for timer in timers:
            timer.cancel()
        for number, handler in usual.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def sudden_ends(tell: Callable[[int], int]) -> Iterator[None]:
    """Within, code that ends this process by ``os._exit``, as no command does, ends it with what ``tell`` makes of its status.

    Left to itself, it would end a command that has done nothing without a word, and as one that has done all. Forked processes, which are
    to end so, are let go.
    """
    leave, owner = os._exit, os.getpid()

    def told(status: int) -> NoReturn:
        leave(tell(status) if os.getpid() == owner else status)

    os._exit = told
    try:
        yield
    finally:
        os._exit = leave


def how_to_go_on(arguments: list[str]) -> str:
    """What to say of an interrupted command."""
    if arguments[:1] and arguments[0] in _GOES_ON:
        return "interrupted; finished measurements are kept, and the same command continues from them"
    return "interrupted"


def reader_left(error: BaseException | None) -> bool:
    """Whether a command ended because nobody reads its output any more, as behind ``| head``: rich and typer exit with 1 then."""
    return isinstance(error, BrokenPipeError) or (error is not None and isinstance(error.__context__, BrokenPipeError))


def flush_output() -> None:
    """Write what is left in stdout's buffer; where nobody reads it, the interpreter shall not complain of that at its end.

    Raises:
        OSError: if it cannot be written for another reason.
    """
    try:
        # None where the process was started without one.
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        drop_output()


def _leave_closed_terminal() -> None:
    """What goes to a terminal that is gone goes nowhere from now on: each write would fail, and hide that the command was stopped."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
                _to_nowhere(number)


def drop_output() -> None:
    """From now on what is written to stdout, and what is in its buffer, goes nowhere."""
    if sys.stdout is None:
        return
    _to_nowhere(sys.stdout.fileno())


def _to_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
