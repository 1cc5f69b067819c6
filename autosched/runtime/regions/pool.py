"""Regions compiled several at a time, each in a process that may crash, hang or be killed without harm to the others or to this one.

Why processes, also on a GPU: writing a region's code is Python and holds the lock, and Inductor's own pool is given only the kernels of the
one region being written, which are one or two. So a process here writes the code, builds its kernels (on a GPU with a pool of two) and
checks them; the process that asked then loads the text, and the libraries and cubins from Inductor's and Triton's caches. Each such
process has a context on the GPU, so there are only as many as free memory allows, and one leaves as soon as no job is left for it. Kernels
are timed (reductions, templates of matrix products) one process at a time, under a lock.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from autosched.config import compile_workers, region_limit_s
from autosched.core.decoding import decode_json
from autosched.core.scratch import Scratch
from autosched.runtime.cores import usable_cores
from autosched.runtime.inductor.unfinished import remove_unfinished
from autosched.runtime.memory_limit import free_in_groups
from autosched.runtime.regions.compilers import Compiler, start_ahead, start_compiler, take_ahead
from autosched.runtime.regions.worker import Job, Opening, Result

_log = logging.getLogger(__name__)

REGION_LIMIT_S = 240.0
# Starting a process costs about what a region does.
_LEAST_JOBS = 4
_JOBS_EACH = 2
_MOST_AHEAD = 8
MOST_LATE = 2
"""Regions without a result in time: one may be too large for the compiler, more in a row mean that the compiler hangs."""
_WORKER_BYTES = 2 << 30
_POLL_S = 0.25
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Made:
    """What came of a job.

    Args:
        job: which.
        source: text of its module; empty if there is none.
        refused: why there is none. Neither: no process could take the job, and whoever needs the region compiles it.
    """

    job: Job
    source: str = ""
    refused: str = ""


def worker_count(jobs: int, free_device_bytes: int | None = None) -> int:
    """How many processes are worth starting for so many regions: one for two regions, at most one for each core, within memory.

    1 means none. ``AUTOSCHED_COMPILE_WORKERS`` replaces the number of cores, and what the host says of its memory: a virtual machine
    that is given memory as it uses it says that hardly any is free.

    Args:
        free_device_bytes: on a GPU, what is free there: each process has a context of its own.
    """
    named = compile_workers(0)
    most = named or usable_cores()
    for free_bytes in (None if named else _free_host_bytes(), free_device_bytes):
        if free_bytes is not None:
            most = min(most, max(1, free_bytes // _WORKER_BYTES))
    return 1 if jobs < _LEAST_JOBS else min(most, math.ceil(jobs / _JOBS_EACH))


def begin_ahead(kind: str) -> None:
    """Start processes for a ``kind`` of device while the model is still captured, if there are cores for them.

    Who captures has a core, and so has the process that asks. With eight at work, those that start later are not missed.
    """
    start_ahead(kind, max(0, min(worker_count(sys.maxsize), usable_cores() - 2, _MOST_AHEAD)))


def compile_apart(
    opening: Callable[[Path], Opening],
    jobs: Sequence[Job],
    workers: int,
    beat: Callable[[], None] = lambda: None,
    *,
    limit_s: float | None = None,
    total_s: float | None = None,
    plugin: Path | None = None,
) -> Iterator[Made]:
    """Compile ``jobs`` in at most ``workers`` processes; what came of each, in the order in which they end.

    Args:
        opening: what every process is told, given the file of the lock they share.
        beat: called several times a second while this waits.
        limit_s: seconds for one job; by default ``AUTOSCHED_REGION_LIMIT_S`` or 240. Where jobs exceed it in a row, the rest is refused.
        total_s: seconds for all of them; the processes are ended then, and what is left is nobody's fault.
        plugin: a Python file that each process runs first. For tests that inject faults; nothing a user or a bundle can reach sets it.
    """
    limit_s = region_limit_s(REGION_LIMIT_S) if limit_s is None else limit_s
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(Scratch())
            lock = folder / "turn"
            lock.touch()
            opening_file = folder / "opening.json"
            told = opening(lock)
            opening_file.write_bytes(msgspec.json.encode(told))
        except OSError as error:
            _log.info("no process to compile regions in: %s", error)
            yield from map(Made, jobs)
            return
        pool = _Pool(opening_file, told.device.partition(":")[0], list(jobs), workers, limit_s, plugin)
        try:
            yield from pool.run(beat, math.inf if total_s is None else time.monotonic() + total_s)
        finally:
            pool.close()


class _Pool:
    def __init__(self, opening_file: Path, kind: str, jobs: list[Job], workers: int, limit_s: float, plugin: Path | None) -> None:
        self._opening_file = opening_file
        self._kind = kind
        self._waiting = jobs[::-1]
        self._most = workers
        self._limit_s = limit_s
        self._plugin = plugin
        self._workers: list[Compiler] = []
        self._interrupted = False  # whether a process was ended at work
        self._late = 0  # jobs in a row that had no result within their limit
        self._selector = selectors.DefaultSelector()

    def run(self, beat: Callable[[], None], end_s: float) -> Iterator[Made]:
        most = min(self._most, len(self._waiting))
        for worker in take_ahead(self._kind, most if self._plugin is None else 0):
            self._open(worker)
        while len(self._workers) < most and self._start():
            pass
        while self._workers and time.monotonic() < end_s:
            beat()
            nearest_s = min(worker.deadline_s for worker in self._workers) - time.monotonic()
            for key, _ in self._selector.select(max(0.0, min(_POLL_S, nearest_s))):
                yield from self._read(key.data)
            now_s = time.monotonic()
            for worker in [item for item in self._workers if item.deadline_s <= now_s]:
                self._late += worker.job is not None
                yield from self._lost(worker, f"no result within {worker.limit_s:g} s")
            if self._late >= MOST_LATE:
                yield from self._give_up()
        # Nobody is left to take these, or no time.
        for job in self._left():
            yield Made(job)

    def close(self) -> None:
        for worker in self._workers.copy():
            self._end(worker)
        self._selector.close()
        if self._interrupted:
            remove_unfinished()

    def _start(self) -> bool:
        worker = start_compiler(self._kind, self._plugin)
        if worker is not None:
            self._open(worker)
        return worker is not None

    def _open(self, worker: Compiler) -> None:
        worker.open(self._opening_file)
        self._workers.append(worker)
        self._selector.register(worker.answers, selectors.EVENT_READ, worker)

    def _read(self, worker: Compiler) -> Iterator[Made]:
        data = os.read(worker.answers, 1 << 20)
        if not data:
            yield from self._lost(worker, worker.how_it_ended())
            return
        worker.buffer += data
        line = worker.take_line()
        if line is None:
            return
        result = decode_json(line, Result)
        job, worker.job = worker.job, None
        if job is None:
            if result.refused:
                _log.info("a process to compile regions in is not used: %s", result.refused)
                self._end(worker)
                return
        else:
            self._late = 0
            yield Made(job, result.source, result.refused)
        self._give(worker)

    def _give(self, worker: Compiler) -> None:
        if not self._waiting:
            # At once, and not when the others are done: it holds memory, on a GPU too.
            self._end(worker)
            return
        worker.give(self._waiting.pop(), self._limit_s)

    def _lost(self, worker: Compiler, how: str) -> Iterator[Made]:
        job = worker.job
        self._end(worker)
        if job is None:
            _log.info("a process to compile regions in did not start: %s", how)
            return
        yield Made(job, refused=f"the process that compiled it was lost: {how}")
        if len(self._workers) < len(self._waiting):
            self._start()

    def _left(self) -> list[Job]:
        """Jobs without an answer: those that processes are at, and those that wait."""
        return [worker.job for worker in self._workers if worker.job is not None] + self._waiting[::-1]

    def _give_up(self) -> Iterator[Made]:
        """It is the compiler and not the regions: refuse the rest of them."""
        rest = self._left()
        self._waiting.clear()
        for worker in self._workers.copy():
            self._end(worker)
        for job in rest:
            yield Made(job, refused=f"given up after {self._late} regions in a row had no result within {self._limit_s:g} s")

    def _end(self, worker: Compiler) -> None:
        if worker not in self._workers:
            return
        self._interrupted |= worker.job is not None
        self._workers.remove(worker)
        self._selector.unregister(worker.answers)
        worker.end()


def _free_host_bytes() -> int | None:
    """What the machine has left, or a container's limit where that is less."""
    return min((free for free in (_free_machine_bytes(), free_in_groups()) if free is not None), default=None)


def _free_machine_bytes() -> int | None:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return None
