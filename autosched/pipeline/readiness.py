"""What a machine compiles once, and a job must have before its time counts: the native lanes of a CPU, and the searches."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import time

from autosched.core.progress import Progress
from autosched.core.python_command import python_command
from autosched.runtime.cores import usable_cores
from autosched.runtime.native.build import build_native, native_library, obstacle
from autosched.runtime.orphans import start_tied

logger = logging.getLogger(__name__)

_COMPILING_LIMIT_S = 300.0
"""Ten times what it takes: beyond it something is wrong with the processes, not with the code."""

_compilers: list[subprocess.Popen[bytes]] = []
"""Processes that compile the searches of this one."""


def ready_lanes(kind: str, progress: Progress) -> str:
    """Build the lanes for a job on a device of ``kind`` if they are not there; a note for its report where that cannot be done.

    What is measured with one engine says nothing of the other.

    Once on a machine for each PyTorch, some ten seconds of a compiler, which the table of stages has. Nothing is said where the user
    has switched them off.
    """
    if kind != "cpu" or native_library() is not None:
        return ""
    if not obstacle():
        progress.stage("compiling the native lanes")
    reason = build_native()
    return f"lanes are threads of Python, which share its lock: {reason}" if reason and "AUTOSCHED_NATIVE" not in reason else ""


def begin_searches(progress: Progress) -> None:
    """Load the searches; if that means compiling them, which numba does the first time on a machine, leave it to processes beside the job.

    It takes half a minute of one core. Capturing the model and starting its first process, which are next, have no need of them.
    """
    # Not before somebody searches: numba takes half a second to import.
    from autosched.search.compiled.ready import load_kept, searches_loaded

    if _compilers or searches_loaded():
        return
    progress.stage("loading the searches")
    if not load_kept():
        _start_compilers()


def ready_searches(progress: Progress) -> None:
    """Wait for what :func:`begin_searches` began, before the budget counts and anything is measured.

    Of a minute's budget their compiling is what a job would lack for its measurements, which it would disturb besides.
    """
    from autosched.search.compiled.ready import load_searches, searches_loaded

    if searches_loaded():
        return
    progress.stage("loading the searches")
    until_s = time.monotonic() + _COMPILING_LIMIT_S
    for process in _compilers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until_s - time.monotonic()))
    drop_searches()
    # Whatever they have not kept, on a full disk for one, is compiled here.
    load_searches()


def drop_searches() -> None:
    """End the processes that still compile: the job is over, or waits no longer."""
    while _compilers:
        process = _compilers.pop()
        process.kill()
        process.wait()


def _start_compilers() -> None:
    from autosched.search.compiled.ready import PROCESSES

    for number in range(min(PROCESSES, usable_cores())):
        # Behind the job itself, where cores are few.
        code = (
            "import os; os.nice(5); from autosched.search.compiled.ready import load_searches; "
            f"from autosched.core.python_command import imports_done; imports_done(); load_searches({number})"
        )
        try:
            process = start_tied(python_command(code), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except OSError as error:
            logger.info("no process to compile searches in: %s", error)
            return
        _compilers.append(process)
