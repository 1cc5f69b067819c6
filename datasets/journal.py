"""What a tuning job has measured so far, kept so that an interrupted job goes on where it stopped.

One JSON object a line, only ever appended, under a file lock, one fsync for each batch. Every line carries the digest of its own
content. A line that was cut off by a crash at the end of the file is forgotten; a damaged line elsewhere is moved to a file beside
the journal, with one warning. Processes that write to one journal lose nothing of each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import msgspec
from filelock import FileLock

from autosched.core.atomic_write import write_atomically
from autosched.core.decoding import decode_json
from autosched.core.errors import IncompatibleArtifact, UsageError, newer_schema
from autosched.core.records import DeviceKey, Engine, Failure, PairRecord, SoftwareKey, SoloRecord
from autosched.core.regular_file import open_regular, read_regular

logger = logging.getLogger(__name__)

SCHEMA = 1
"""Version of a line; raised when the meaning of a field changes."""

_WAIT_S = 20.0
"""A journal is locked for one batch, or for reading one: whoever holds it for longer was stopped (Ctrl-Z), and nobody waits for that."""


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One measurement: what was asked (``kind`` and ``key``) and exactly one answer."""

    schema: int
    scope: str
    kind: Literal["solo", "pair"]
    key: tuple[str | int, ...]
    solo: SoloRecord | None = None
    pair: PairRecord | None = None
    failure: Failure | None = None


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    check: str
    entry: msgspec.Raw


class _Version(msgspec.Struct, frozen=True):
    schema: int


@dataclass(frozen=True, slots=True)
class Scope:
    """What a measurement is valid for: one device with one set of software versions."""

    device: DeviceKey
    software: SoftwareKey

    @property
    def digest(self) -> str:
        """sha256 of both keys, 24 hexadecimal digits."""
        return hashlib.sha256(msgspec.json.encode((self.device, self.software), order="sorted")).hexdigest()[:24]


class Journal:
    """Measurements by content. Not shared between threads; processes each open their own.

    On a CPU they are those of the engine that the scope's software names. A record of another engine answers as long as this journal is
    open, for whoever asked has it anyway, and is not kept for others; one from before records said what ran them answers only where
    there was no choice.

    A newer answer to the same question replaces the older one. Answers wait in memory until :meth:`flush` or
    :meth:`close`, or until ``batch`` of them have gathered.
    """

    def __init__(self, path: Path, scope: Scope, *, batch: int = 16) -> None:
        self._path = path
        self._scope = scope.digest
        self._engine = scope.software.engine
        self._batch = batch
        self._file_lock = FileLock(f"{path}.lock")
        self._wait_s = _WAIT_S
        self._entries: dict[tuple[str, tuple[str | int, ...]], _Entry] = {}
        self._pending: list[bytes] = []
        self._complained = False
        self._read_to = 0
        self._last_line = b""

    @classmethod
    def open(cls, path: Path, scope: Scope, *, batch: int = 16) -> Journal:
        """Open, or begin, the journal at ``path``; its folder is made if it is not there.

        Args:
            path: the file; a lock file appears beside it.
            scope: measurements of other devices or versions in the same file are kept and not answered.
            batch: measurements in one fsync.

        Raises:
            IncompatibleArtifact: a line of a newer schema than this version writes.
            OSError: the folder cannot be written, what is there is no file, or another process holds the file and was stopped.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        journal = cls(path, scope, batch=batch)
        journal.refresh()
        return journal

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        """Questions of this scope that have an answer."""
        return len(self._entries)

    def solo(self, signature: str, width: int, *, min_count: int = 0) -> SoloRecord | Failure | None:
        """The answer for one kernel alone, or None if it was not measured with at least ``min_count`` samples."""
        entry = self._entries.get(("solo", (signature, width)))
        if entry is None or (entry.solo is not None and entry.solo.samples.count < min_count):
            return None
        return entry.solo or entry.failure

    def pair(self, first: str, first_width: int, last: str, last_width: int, *, min_count: int = 0) -> PairRecord | Failure | None:
        """The answer for two kernels in this start order, or None."""
        entry = self._entries.get(("pair", (first, first_width, last, last_width)))
        if entry is None or (entry.pair is not None and entry.pair.count < min_count):
            return None
        return entry.pair or entry.failure

    def pairs(self) -> list[PairRecord]:
        """Every pair measured in this scope, in a fixed order."""
        return [entry.pair for _, entry in sorted(self._entries.items(), key=lambda item: str(item[0])) if entry.pair is not None]

    def add_solo(self, signature: str, width: int, answer: SoloRecord | Failure) -> None:
        """Keep the answer for one kernel alone."""
        key = (signature, width)
        if isinstance(answer, Failure):
            self._add(_Entry(SCHEMA, self._scope, "solo", key, failure=answer))
        else:
            self._add(_Entry(SCHEMA, self._scope, "solo", key, solo=answer))

    def add_pair(self, first: str, first_width: int, last: str, last_width: int, answer: PairRecord | Failure) -> None:
        """Keep the answer for two kernels in this start order."""
        key = (first, first_width, last, last_width)
        if isinstance(answer, Failure):
            self._add(_Entry(SCHEMA, self._scope, "pair", key, failure=answer))
        else:
            self._add(_Entry(SCHEMA, self._scope, "pair", key, pair=answer))

    def add(self, answer: SoloRecord | PairRecord) -> None:
        """Keep a record that says itself what it is of."""
        if isinstance(answer, SoloRecord):
            self.add_solo(answer.signature, answer.width, answer)
        else:
            self.add_pair(answer.first, answer.first_width, answer.last, answer.last_width, answer)

    def flush(self) -> None:
        """Put everything added so far on the disk, and read what other processes have added.

        Where that cannot be done, a full disk say, it is said once and tried again with the next batch: this process has its answers.
        Where a newer autosched has written to the journal meanwhile, what follows is not read.
        """
        if not self._pending:
            return
        try:
            self._append()
            self._pending.clear()
            # It may have to write, too: without the lines that somebody has damaged.
            self.refresh()
        except IncompatibleArtifact as error:
            logger.info("what others measure is not read any more: %s", error)
        except OSError as error:
            if not self._complained:
                logger.warning(
                    "measurements are not kept: %s cannot be written (%s); set AUTOSCHED_CACHE to a folder that can", self._path, error
                )
            self._complained = True

    def _append(self) -> None:
        with self._locked():
            self._cut_torn_tail()
            # Opened anew for each batch: another process may have replaced the file while taking damaged lines out.
            with open_regular(self._path, "ab") as file:
                file.write(b"".join(self._pending))
                file.flush()
                os.fsync(file.fileno())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock of the file.

        Raises:
            OSError: if it cannot be had; after that it is only asked for, not waited for.
        """
        wait_s, self._wait_s = self._wait_s, 0.0
        with self._file_lock.acquire(timeout=wait_s):
            self._wait_s = _WAIT_S
            yield

    def refresh(self) -> None:
        """Read what was appended since the last time, by any process."""
        if not self._path.exists():
            return
        with self._locked():
            with open_regular(self._path) as file:
                # By its end: a file in the place of the one that was read may have the number of that.
                file.seek(self._read_to - len(self._last_line))
                if file.read(len(self._last_line)) != self._last_line:
                    self._read_to, self._last_line = 0, b""
                    file.seek(0)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            lines = whole.splitlines(keepends=True)
            damaged: list[bytes] = []
            for line in lines:
                entry = self._decode(line)
                if entry is None:
                    damaged.append(line)
                elif entry.scope == self._scope and self._of_engine(entry, unsaid=Engine.PYTHON):
                    self._entries[entry.kind, entry.key] = entry
            if lines:
                self._read_to, self._last_line = self._read_to + len(whole), lines[-1]
            if damaged:
                self._quarantine(damaged)

    def close(self) -> None:
        """Flush. May be called twice."""
        self.flush()

    def _add(self, entry: _Entry) -> None:
        body = msgspec.json.encode(entry)
        try:
            decode_json(body, _Entry)
        except msgspec.ValidationError as error:
            raise UsageError(
                f"the {entry.kind} record of {entry.key} cannot be kept: {error}; expected finite numbers: make it a Failure"
            ) from error
        self._entries[entry.kind, entry.key] = entry
        if not self._of_engine(entry, unsaid=self._engine):
            return
        self._pending.append(msgspec.json.encode(_Line(_digest(body), msgspec.Raw(body))) + b"\n")
        if len(self._pending) % self._batch == 0:
            self.flush()

    def _of_engine(self, entry: _Entry, *, unsaid: Engine) -> bool:
        """Whether an entry is of the scope's engine, as all are on a GPU; ``unsaid`` is that of a record that does not say."""
        record = entry.solo or entry.pair
        return record is None or (record.engine or unsaid) is self._engine

    def _decode(self, line: bytes) -> _Entry | None:
        """The entry of a line, or None if its bytes are not what was written."""
        try:
            outer = decode_json(line, _Line)
            body = bytes(outer.entry)
            if _digest(body) != outer.check:
                return None
            version = decode_json(body, _Version).schema
            if version > SCHEMA:
                raise newer_schema(str(self._path), version, SCHEMA, "set AUTOSCHED_CACHE to another folder")
            return decode_json(body, _Entry)
        except msgspec.DecodeError:
            return None

    def _cut_torn_tail(self) -> None:
        """Drop the end of the file that has no line break: under the lock nobody can still be writing it."""
        if not self._path.exists():
            return
        with open_regular(self._path, "r+b") as file:
            end = file.seek(0, os.SEEK_END)
            if end == 0:
                return
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)

    def _quarantine(self, damaged: Sequence[bytes]) -> None:
        """Move damaged lines beside the journal and write the file anew without them; the lock is held."""
        aside = self._path.with_name(f"{self._path.name}.corrupt-{time.time_ns()}")
        write_atomically(aside, b"".join(damaged))
        bad = set(damaged)
        kept = [line for line in read_regular(self._path).splitlines(keepends=True) if line not in bad]
        write_atomically(self._path, b"".join(kept))
        self._read_to, self._last_line = 0, b""
        logger.warning("%s held %d damaged lines; they are kept in %s and will be measured again", self._path, len(damaged), aside)


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]
