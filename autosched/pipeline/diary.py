"""What the device loop of one job has measured so far, so that a job that was killed goes on and ends where it would have ended.

One JSON object a line, only ever appended, one fsync for each answer of the device; every line carries the digest of its content. What
follows a damaged or torn line is forgotten and measured again. The times of schedules that ran in the same rounds are one line: they
are compared with each other, so that half of them would be worth nothing. A finished job leaves no diary.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from autosched.core.decoding import decode_json, decoder_of
from autosched.core.graph import OpGraph
from autosched.core.records import Failure
from autosched.core.regular_file import open_regular, read_regular
from autosched.core.schedule import Schedule, canonical_key
from autosched.pipeline.proving import OUT_OF_TIME
from autosched.search.correction import Trace
from autosched.search.loop import Bench

_log = logging.getLogger(__name__)

SCHEMA = 1


class _Begin(msgspec.Struct, frozen=True, tag="begin"):
    schema: int
    question: str
    run: str


class _Times(msgspec.Struct, frozen=True, tag="times"):
    times_us: dict[str, tuple[float, ...]]
    failures: dict[str, Failure]


class _Traces(msgspec.Struct, frozen=True, tag="traces"):
    traces: dict[str, Trace]


_Entry = _Begin | _Times | _Traces


class _Line(msgspec.Struct, frozen=True):
    check: str
    entry: msgspec.Raw


def question_of(*parts: object) -> str:
    """A digest of everything that decides what a loop asks the device: 24 hexadecimal digits."""
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:24]


def remove_lock_file(diary: Path) -> None:
    """Remove the lock file of a diary that is not there any more; only for who holds the lock, and before it is released.

    Who opened the file before it went, and locks it after it went, holds a lock that no newcomer sees. filelock notices (since 3.21) and
    starts over. Where it does not, or cannot (NFS), two jobs would write one diary: nobody ever waits for this lock, so they must meet
    within microseconds, and what they mix up is measured again, for a diary without its first line is forgotten.
    """
    if not diary.exists():
        with contextlib.suppress(OSError):
            Path(f"{diary}.lock").unlink(missing_ok=True)


@dataclass(slots=True)
class Diary:
    """Measurements of one loop by canonical key, and proofs that cost a process. Use it as a context.

    ``run`` names the job across interruptions; ``resumed``: whether an interrupted one left something; ``lots``: of each of ``times_us``,
    which other times it was measured beside.

    Without a path, or where the file cannot be written or belongs to a running job, it remembers in memory only.
    """

    path: Path | None
    question: str
    run: str = ""
    times_us: dict[str, list[float]] = field(default_factory=dict)
    lots: dict[str, list[int]] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    traces: dict[str, Trace] = field(default_factory=dict)
    resumed: bool = False
    _lock: FileLock | None = None
    _broken_off: bool = False
    _count: int = 0

    def __enter__(self) -> Diary:
        self.run = secrets.token_hex(8)
        if self.path is None:
            return self
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(f"{self.path}.lock")
            self._lock.acquire(timeout=0)
            self._read(self.path)
            self.resumed = bool(self.times_us or self.failures)
        except Timeout:
            _log.info("another job writes %s; this one cannot be resumed", self.path)
            self._lock, self.path = None, None
        except OSError as error:
            self._warn(self.path, error)
            self.path = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            if self.path is not None:
                remove_lock_file(self.path)
            self._lock.release()

    def add(self, times_us: dict[str, tuple[float, ...]], failures: dict[str, Failure]) -> None:
        """Keep what one lot of interleaved rounds gave."""
        entry = _Times(times_us, failures)
        self._know(entry)
        self._append(entry)

    def _know(self, entry: _Times) -> None:
        self._count += 1
        for key, times in entry.times_us.items():
            self.times_us.setdefault(key, []).extend(times)
            self.lots.setdefault(key, []).extend([self._count] * len(times))
        self.failures.update(entry.failures)

    def add_traces(self, traces: dict[str, Trace]) -> None:
        """Keep when operators ran."""
        self.traces.update(traces)
        self._append(_Traces(traces))

    def finish(self) -> None:
        """The job is done: the next one begins anew."""
        if self.path is not None:
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                # The job has its result.
                _log.warning("%s cannot be removed (%s); the next such job would go on from it", self.path, error)

    def _read(self, path: Path) -> None:
        sound = 0
        for line in read_regular(path).splitlines(keepends=True) if path.exists() else ():
            entry = _decoded(line)
            if entry is None or (sound == 0 and not isinstance(entry, _Begin)):
                break
            if isinstance(entry, _Begin):
                if entry.question != self.question or entry.schema != SCHEMA:
                    break
                self.run = entry.run
            elif isinstance(entry, _Times):
                self._know(entry)
            else:
                self.traces.update(entry.traces)
            sound += len(line)
        with open_regular(path, "ab") as file:
            file.truncate(sound)
        if sound == 0:
            self._append(_Begin(SCHEMA, self.question, self.run))

    def _append(self, entry: _Entry) -> None:
        if self.path is None or self._broken_off:
            return
        body = msgspec.json.encode(entry)
        try:
            with open_regular(self.path, "ab") as file:
                file.write(msgspec.json.encode(_Line(_digest(body), msgspec.Raw(body))) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            # What there is of it stays for a job that goes on from it, and goes with this one.
            self._broken_off = True
            self._warn(self.path, error)

    @staticmethod
    def _warn(path: Path, error: OSError) -> None:
        _log.warning("a killed job will not go on: %s cannot be written (%s); set AUTOSCHED_CACHE to a folder that can", path, error)


class KeptBench:
    """A ``Bench`` that writes into a diary what another one measures."""

    def __init__(self, bench: Bench, diary: Diary, graph: OpGraph, *, lanes_matter: bool) -> None:
        self._bench, self._diary, self._graph, self._lanes_matter = bench, diary, graph, lanes_matter

    def measure(self, schedules: Sequence[Schedule], rounds: int) -> Sequence[Sequence[float] | Failure]:
        """As ``Bench.measure``."""
        answers = self._bench.measure(schedules, rounds)
        named = list(zip(map(self._key, schedules), answers, strict=True))
        self._diary.add(
            {key: tuple(answer) for key, answer in named if not isinstance(answer, Failure)},
            {key: answer for key, answer in named if isinstance(answer, Failure) and answer != OUT_OF_TIME},
        )
        return answers

    def trace(self, schedules: Sequence[Schedule]) -> Sequence[Trace | Failure]:
        """As ``Bench.trace``."""
        answers = self._bench.trace(schedules)
        named = zip(map(self._key, schedules), answers, strict=True)
        if found := {key: answer for key, answer in named if isinstance(answer, Trace)}:
            self._diary.add_traces(found)
        return answers

    def _key(self, schedule: Schedule) -> str:
        return canonical_key(self._graph, schedule, lanes_matter=self._lanes_matter)


def _decoded(line: bytes) -> _Entry | None:
    """The entry of a line, or None if its bytes are not what was written."""
    try:
        outer = decode_json(line, _Line)
        return decoder_of(_Entry).decode(outer.entry) if _digest(bytes(outer.entry)) == outer.check else None
    except msgspec.DecodeError:
        return None


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]
