"""A process that may crash, hang or be killed without harm: started, spoken to, and ended with everything it has started.

It runs in its own session, so that one signal reaches all of its descendants, and all of it dies with its parent: by the kernel's hand
where that can be had (``orphans.start_tied``), and because its input ends.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import signal
import subprocess
import threading
import time
import weakref
from pathlib import Path

from autosched.core.python_command import python_command
from autosched.core.records import BY_OTHERS, FailureKind
from autosched.device.registrations import describe_registrations
from autosched.device.worker_messages import BOARD, LENGTH
from autosched.runtime.orphans import start_tied

_logger = logging.getLogger(__name__)

_LOG_BYTES = 65536
_POLL_S = 0.25
_AWAY_S = 2.0  # what a process that wakes up late has not just been busy for
_KILLED_S = 30.0  # until nobody waits any more for a process that was killed
_DYING_S = 10.0  # until a process that has closed its pipes is gone: one that used a GPU, or much memory, takes a while


class ChildDied(Exception):
    """The process ended, or was ended because it did not answer.

    ``item`` is what it was working on (-1: nothing in particular); ``kind`` is ``crash`` or ``timeout``; ``by_others``: whether it may be
    somebody else who ended it.
    """

    def __init__(self, kind: FailureKind, detail: str, item: int, *, by_others: bool = False) -> None:
        super().__init__(detail)
        self.kind = kind
        self.item = item
        self.by_others = by_others


class ChildProcess:
    """One running process; not restarted here.

    Args:
        module: module whose ``main()`` is the process.
        board: a file that holds a fresh ``worker_messages.BOARD``, in a private folder that goes with the process.
        compiling_for: the kind of device for which the process first starts compilers of regions; empty for none.
        plugin: a Python file the process runs first. For tests that inject faults; nothing a user or a bundle can reach sets it.

    The process imports what registers the custom operators trusted now, and trusts them.

    Raises:
        UsageError: as ``registrations.describe_registrations``.
    """

    def __init__(self, module: str, board: Path, *, compiling_for: str = "", plugin: Path | None = None) -> None:
        with board.open("r+b") as file:
            self._board = mmap.mmap(file.fileno(), BOARD.size)
        registrations = describe_registrations()
        answers, answers_theirs, log, log_theirs = _two_pipes()
        arguments = [str(answers_theirs), str(board), str(plugin or ""), registrations]
        # Before PyTorch is imported, which takes seconds: theirs take as long.
        first = f"from autosched.runtime.regions.pool import begin_ahead; begin_ahead({compiling_for!r}); " if compiling_for else ""
        try:
            self._process = start_tied(
                python_command(f"{first}from {module} import main; main()", *arguments),
                stdin=subprocess.PIPE,
                stdout=log_theirs,
                stderr=log_theirs,
                bufsize=0,
                pass_fds=(answers_theirs,),
            )
        except BaseException:
            os.close(answers)
            os.close(log)
            raise
        finally:
            os.close(answers_theirs)
            os.close(log_theirs)
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        os.set_blocking(self._stdin.fileno(), False)
        self._answers = answers
        self._buffer = bytearray()
        self._log = _Log(log)
        self._finalizer = weakref.finalize(self, _end, self._process, self._stdin, answers, self._log, os.getpid())
        try:
            self._log.start()
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._finalizer.alive and self._process.poll() is None

    def send(self, message: bytes, *, timeout_s: float) -> None:
        """Write one packed message.

        Raises:
            ChildDied: if the process is gone or does not read for ``timeout_s`` seconds; it has ended then.
        """
        deadline = time.monotonic() + timeout_s
        view = memoryview(message)
        try:
            while view:
                if not _ready(self._stdin.fileno(), select.POLLOUT, max(0.0, deadline - time.monotonic())):
                    raise self._timed_out(timeout_s)
                view = view[os.write(self._stdin.fileno(), view) :]
        except (BrokenPipeError, ValueError):
            raise self._dead() from None
        except BaseException:
            self.kill()
            raise

    def receive(self, *, timeout_s: float) -> bytes:
        """The body of the next message.

        Args:
            timeout_s: how long the process may show no progress (no answer, no beat on the board).

        Raises:
            ChildDied: if it ended, or showed no progress; it has ended then.
        """
        deadline = time.monotonic() + timeout_s
        beats = self._read_board()[0]
        try:
            while True:
                if (body := self._take()) is not None:
                    return body
                begin_s = time.monotonic()
                wait_s = min(_POLL_S, max(0.0, deadline - begin_s))
                readable = _ready(self._answers, select.POLLIN, wait_s)
                if time.monotonic() - begin_s > wait_s + _AWAY_S:
                    # Whoever stopped this process (a paused container, a batch system) has stopped the other as well.
                    deadline = time.monotonic() + timeout_s
                if readable:
                    data = os.read(self._answers, 1 << 20)
                    if not data:
                        raise self._dead()
                    self._buffer += data
                    continue
                if self._process.poll() is not None:
                    # A descendant may hold the pipe open after its parent's death: then the end of input never comes.
                    raise self._dead()
                if (now := self._read_board()[0]) != beats:
                    beats = now
                    deadline = time.monotonic() + timeout_s
                elif time.monotonic() >= deadline:
                    raise self._timed_out(timeout_s)
        except ValueError:
            raise self._dead() from None
        except BaseException:
            # Also an interrupt: whoever started the process is leaving, so it must not work on.
            self.kill()
            raise

    def kill(self) -> None:
        """End the process and its descendants at once. May be called twice."""
        self._finalizer()

    def close(self, *, grace_s: float = 0.5) -> None:
        """End its input, give it a moment to leave by itself, then kill what is left. May be called twice."""
        if self._finalizer.alive:
            with contextlib.suppress(OSError):
                self._stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self.kill()

    def last_words(self, characters: int = 600) -> str:
        """The end of what it wrote to its output, on one line; of a fatal error's long report, what led to it, and what the thread did."""
        text = self._log.text()
        fatal = text.rfind("Fatal Python error")
        quoted = (
            text[-characters:] if fatal < 0 else text[max(0, fatal - characters // 2) : fatal] + _guilty(text[fatal:])[: characters // 2]
        )
        return " | ".join(line.strip() for line in quoted.splitlines() if line.strip())

    def _take(self) -> bytes | None:
        if len(self._buffer) < LENGTH.size:
            return None
        end = LENGTH.size + int(LENGTH.unpack_from(self._buffer)[0])
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        return body

    def _read_board(self) -> tuple[int, int]:
        beats, item = BOARD.unpack_from(self._board)
        return beats, item

    def _timed_out(self, timeout_s: float) -> ChildDied:
        item = self._read_board()[1]
        self.kill()
        return ChildDied(FailureKind.TIMEOUT, f"no progress for {timeout_s:g} s, so the measuring process was ended{self._quote()}", item)

    def _dead(self) -> ChildDied:
        item = self._read_board()[1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DYING_S)
        status = self._process.returncode
        self.kill()
        by_others = status == -signal.SIGKILL
        if status is not None and status < 0:
            how = f"was killed by {_signal_name(-status)}"
            if by_others:
                how += BY_OTHERS
        elif status is None:
            how = "has closed its pipes and did not end, so it was ended"
        else:
            how = f"ended with status {status}"
        return ChildDied(FailureKind.CRASH, f"the measuring process {how}{self._quote()}", item, by_others=by_others)

    def _quote(self) -> str:
        words = self.last_words()
        return f"; its last words: {words}" if words else ""


class _Log:
    """Drains a pipe in a thread and keeps the end of it, so that a chatty child neither blocks nor fills a disk."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._tail = bytearray()
        self._thread = threading.Thread(target=self._drain, name="autosched-worker-log", daemon=True)

    def start(self) -> None:
        """Begin to drain it.

        Raises:
            RuntimeError: if this process may have no more threads; the pipe is closed then.
        """
        try:
            self._thread.start()
        except RuntimeError:
            os.close(self._descriptor)
            raise

    def text(self) -> str:
        return self._tail.decode(errors="replace")

    def finish(self) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout=1.0)

    def _drain(self) -> None:
        try:
            while data := os.read(self._descriptor, 65536):
                self._tail += data
                if len(self._tail) > _LOG_BYTES:
                    del self._tail[:-_LOG_BYTES]
        except OSError:
            pass
        finally:
            os.close(self._descriptor)


def _guilty(report: str) -> str:
    """A fatal error's report without the stacks of the threads that come before the one it was on."""
    place = report.find("Current thread")
    return report if place < 0 else report.partition("\n")[0] + "\n" + report[place:]


def _ready(descriptor: int, event: int, wait_s: float) -> bool:
    """Whether there is something to read, or room to write, within ``wait_s`` seconds; or an end to be found out.

    Not by ``select``, which refuses numbers from 1024, and a server has as many connections.
    """
    asking = select.poll()
    asking.register(descriptor, event)
    return bool(asking.poll(wait_s * 1e3))


def _two_pipes() -> tuple[int, int, int, int]:
    """Both, or none."""
    one = os.pipe()
    try:
        return (*one, *os.pipe())
    except OSError:
        for end in one:
            os.close(end)
        raise


def _end(process: subprocess.Popen[bytes], stdin: object, answers: int, log: _Log, owner: int) -> None:
    # A process that was forked has this object too, and not the child.
    ours = os.getpid() == owner
    if ours:
        # The group first: once the leader is reaped, its number may mean somebody else.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        stdin.close()  # type: ignore[attr-defined]
    if ours:
        # One that waits in the kernel for a GPU that no longer answers ends when that does, if ever: nobody else waits for it.
        try:
            process.wait(_KILLED_S)
        except subprocess.TimeoutExpired:
            _logger.warning("the measuring process %d was killed and is still there; what it holds of a GPU is not free", process.pid)
    with contextlib.suppress(OSError):
        os.close(answers)
    log.finish()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
