"""Processes that compile regions: started, some of them before there is anything to compile, told what to do, and ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from autosched.core.python_command import python_command
from autosched.runtime.compiler_files import inductor_moved
from autosched.runtime.orphans import start_tied
from autosched.runtime.regions.worker import Job, OpeningFile

_log = logging.getLogger(__name__)

OPENING_LIMIT_S = 120.0
_DYING_S = 10.0  # until a process that has closed its pipes is gone: one that used a GPU, or much memory, takes a while


@dataclass(eq=False)
class Compiler:
    """One process, and what it works on; ``job`` is ``None`` until it has answered its opening."""

    process: subprocess.Popen[bytes]
    answers: int
    deadline_s: float = 0.0
    limit_s: float = 0.0
    job: Job | None = None
    buffer: bytearray = field(default_factory=bytearray)

    def open(self, opening_file: Path) -> None:
        """Tell it what all jobs have in common; it has ``OPENING_LIMIT_S`` to answer."""
        self._send(OpeningFile(os.fsencode(opening_file)), OPENING_LIMIT_S)

    def give(self, job: Job, limit_s: float) -> None:
        """Give it a job, for so many seconds."""
        self.job = job
        self._send(job, limit_s)

    def take_line(self) -> bytes | None:
        """The first whole line of what it has answered."""
        end = self.buffer.find(b"\n")
        if end < 0:
            return None
        line = bytes(self.buffer[:end])
        del self.buffer[: end + 1]
        return line

    def end(self) -> None:
        """End it, with every process that it has started, and wait until it is gone."""
        # The group first: once the leader is reaped, its number may mean somebody else.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self.process.wait()
        os.close(self.answers)

    def how_it_ended(self) -> str:
        """Of one that has closed its answers."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_DYING_S)
        status = self.process.returncode
        if status is None or status >= 0:
            return f"it ended with status {status}"
        with contextlib.suppress(ValueError):
            return f"it was killed by {signal.Signals(-status).name}"
        return f"it was killed by signal {-status}"

    def _send(self, message: OpeningFile | Job, limit_s: float) -> None:
        self.limit_s, self.deadline_s = limit_s, time.monotonic() + limit_s
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has died: the end of its answers says so
            self.process.stdin.write(msgspec.json.encode(message) + b"\n")


def start_compiler(kind: str, plugin: Path | None = None) -> Compiler | None:
    """A process that imports what regions for a ``kind`` of device need, and waits to be opened; ``None`` if none starts."""
    try:
        answers, theirs = os.pipe()
    except OSError as error:
        _log.info("no process to compile regions in: %s", error)
        return None
    try:
        code = "from autosched.runtime.regions.worker import main; main()"
        process = start_tied(
            python_command(code, str(theirs), kind, str(plugin or "")),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            pass_fds=(theirs,),
        )
    except OSError as error:
        os.close(answers)
        _log.info("no process to compile regions in: %s", error)
        return None
    finally:
        os.close(theirs)
    return Compiler(process, answers)


_ahead: list[tuple[str, Compiler]] = []
"""Started before there was anything to compile, with the kind of device that each is for."""


def start_ahead(kind: str, count: int) -> None:
    """Start ``count`` processes that will have imported PyTorch and Inductor, which takes seconds, when there is something to compile."""
    if count < 1 or _ahead:
        return
    for _ in range(count):
        compiler = start_compiler(kind)
        if compiler is None:
            return
        _ahead.append((kind, compiler))


def take_ahead(kind: str, most: int) -> list[Compiler]:
    """At most ``most`` of those that :func:`start_ahead` started, which are the caller's to end; the others are ended."""
    taken: list[Compiler] = []
    while _ahead:
        started_for, compiler = _ahead.pop()
        # They would put their code where this process does not look.
        if started_for == kind and len(taken) < most and not inductor_moved():
            taken.append(compiler)
        else:
            compiler.end()
    return taken


def end_ahead() -> None:
    """End what :func:`start_ahead` started: nothing is to be compiled."""
    take_ahead("", 0)
