"""A folder of measured runs: Parquet parts that are written once and never changed.

Layout: ``DIR/<table>/part-<sha256 of the file>.parquet``, so that ``pandas.read_parquet(DIR / "pairs")`` needs nothing of autosched.
A part is written beside its place and renamed, so writers need no lock and lose nothing of each other; its name is checked against its
bytes before any parser sees them, and its pages carry checksums. A damaged part is put aside with one warning; the others stay usable.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from autosched.core.atomic_write import remove_half_written, write_atomically
from autosched.core.errors import ArtifactCorrupt, UsageError, newer_schema, why_of
from autosched.core.regular_file import read_regular
from autosched.datasets.cells import flat, row_of
from autosched.datasets.facts import DISTURBED
from autosched.datasets.migrations import upgraded
from autosched.datasets.schema import (
    COLUMNS,
    SCHEMA,
    TABLES,
    GraphRow,
    GroupRow,
    LimitsRow,
    PairRow,
    Row,
    ScheduleRow,
    ScopeRow,
    SoloRow,
    arrow_schema,
)

logger = logging.getLogger(__name__)
_PARTS = r"part-.*\.parquet"


class Store:
    """Measured runs under one folder. Not shared between threads; any number of processes may append at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[Path, frozenset[str]] = {}
        self._passed_over: set[Path] = set()

    @classmethod
    def create(cls, folder: Path) -> Store:
        """Open a store, making the folder if it is not there."""
        for table in TABLES:
            (folder / table).mkdir(parents=True, exist_ok=True)
        return cls(folder)

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Open an existing store.

        Raises:
            UsageError: there is no such folder, or this user may not look into it.
            ArtifactCorrupt: it holds no table.
        """
        if not os.path.isdir(folder):
            raise UsageError(f"there is no folder {folder}; expected measured runs, as 'autosched collect' and tuning jobs leave them.")
        if not os.access(folder, os.R_OK | os.X_OK):
            raise UsageError(f"cannot read the runs in {folder}: its permissions do not allow it. Let this user read it, or name another.")
        if not any((folder / table).is_dir() for table in TABLES):
            raise ArtifactCorrupt(str(folder), "it holds none of " + ", ".join(TABLES) + " (make one with 'autosched collect')")
        return cls(folder)

    def append(self, rows: Sequence[Row]) -> int:
        """Write rows as one new part for each table; rows whose key is there already are passed over.

        Returns:
            How many rows were new.

        Raises:
            UsageError: a cell that is not finite, naming it; or the part cannot be written.
        """
        written = 0
        for table, kind in TABLES.items():
            mine = [flat(row) for row in rows if isinstance(row, kind)]
            for cells in mine:
                _require_finite(table, cells)
            if not mine:
                continue
            known = self.keys(table)
            fresh = {cells["key"]: cells for cells in mine if cells["key"] not in known}
            if fresh:
                self._write(table, list(fresh.values()))
                written += len(fresh)
        return written

    def keys(self, table: str) -> set[str]:
        """Content keys present in a table: what need not be measured again."""
        found: set[str] = set()
        for part in self._parts(table):
            if part not in self._known:  # a part never changes, so it is read once
                self._known[part] = frozenset(cells["key"] for cells in self._read(table, part, columns=["key"]) or ())
            found |= self._known[part]
        return found

    def scopes(self) -> list[ScopeRow]:
        """Devices with software, by key."""
        return cast(list[ScopeRow], self.rows("scopes"))

    def solo(self) -> list[SoloRow]:
        """Kernels alone, by key."""
        return cast(list[SoloRow], self.rows("solo"))

    def pairs(self) -> list[PairRow]:
        """Pairs, by key."""
        return cast(list[PairRow], self.rows("pairs"))

    def groups(self) -> list[GroupRow]:
        """Groups of three and four, by key."""
        return cast(list[GroupRow], self.rows("groups"))

    def schedules(self) -> list[ScheduleRow]:
        """Schedules of whole models, by key."""
        return cast(list[ScheduleRow], self.rows("schedules"))

    def graphs(self) -> list[GraphRow]:
        """Operator graphs that schedules are of, by hash."""
        return cast(list[GraphRow], self.rows("graphs"))

    def limits(self) -> list[LimitsRow]:
        """What schedules of each graph may use on each device, by key."""
        return cast(list[LimitsRow], self.rows("limits"))

    def merge(self, other: Store) -> int:
        """Append every row of ``other`` that is not here yet; how many those were."""
        rows: list[Row] = []
        for table in TABLES:
            rows += other.rows(table)
        return self.append(rows)

    def _parts(self, table: str) -> list[Path]:
        return sorted((self.folder / table).glob("part-*.parquet"))

    def rows(self, table: str) -> list[Row]:
        """Every row of a table, one for each key; where two processes measured one thing, the larger and less disturbed measurement.

        Raises:
            ArtifactCorrupt: a row that is not one of this table.
        """
        best: dict[str, dict[str, Any]] = {}
        for part in self._parts(table):
            for cells in self._read(table, part) or ():
                held = best.get(cells["key"])
                if held is None or _trust(cells) > _trust(held):
                    best[cells["key"]] = cells
        rows: list[Row] = []
        for key in sorted(best):
            try:
                rows.append(row_of(table, best[key]))
            except (ValueError, KeyError) as error:
                raise ArtifactCorrupt(str(self.folder / table), f"row {key} cannot be read: {error}") from error
        return rows

    def _write(self, table: str, cells: list[dict[str, Any]]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = arrow_schema(table)
        data = {name: [row[name] for row in cells] for name in COLUMNS[table]}
        buffer = io.BytesIO()
        pq.write_table(pa.table(data, schema=schema), buffer, compression="zstd", write_page_checksum=True)
        content = buffer.getvalue()
        place = self.folder / table / f"part-{hashlib.sha256(content).hexdigest()}.parquet"
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(place) and not place.is_file():
                # A folder, or a link to nothing, where this content has its place.
                self._put_aside(place, "it is no file")
            # Of every part: one that was begun and not ended is seldom begun again under the name of the same content.
            remove_half_written(place.parent, _PARTS)
            write_atomically(place, content)
        except OSError as error:
            raise UsageError(
                f"cannot write runs to {place.parent}: {why_of(error)}. Let this user write there and make room, or name another folder."
            ) from error

    def _read(self, table: str, part: Path, columns: list[str] | None = None) -> list[dict[str, Any]] | None:
        """The cells of a part, or None: after putting a damaged one aside, or where this process lacks what reading takes.

        Raises:
            IncompatibleArtifact: written by a newer schema.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            content = read_regular(part)
        except OSError as error:
            self._pass_over(part, error)
            return None
        if f"part-{hashlib.sha256(content).hexdigest()}.parquet" != part.name:
            self._put_aside(part, "its content is not what its name promises")
            return None
        try:
            # No threads: parts are small, where there are no more threads to be had, Arrow fails for want of them, and one that lets go of
            # the content while the process ends aborts it.
            file = pq.ParquetFile(io.BytesIO(content), page_checksum_verification=True, pre_buffer=False)
            metadata = file.schema_arrow.metadata or {}
            version = int(metadata.get(b"autosched.schema", b"0"))
            if version > SCHEMA:
                raise newer_schema(str(part), version, SCHEMA, "name another folder of runs")
            if metadata.get(b"autosched.table", b"").decode() != table:
                self._put_aside(part, f"it is not a part of table {table}")
                return None
            cells = cast(list[dict[str, Any]], file.read(columns=columns if version == SCHEMA else None, use_threads=False).to_pylist())
        except (OSError, ValueError) as error:
            self._put_aside(part, str(error))
            return None
        except (pa.ArrowException, MemoryError) as error:
            # Of this process, not of the part, whose bytes are what was written.
            self._pass_over(part, error)
            return None
        return [upgraded(table, version, SCHEMA, row) for row in cells]

    def _pass_over(self, part: Path, why: object) -> None:
        # A table is read again and again.
        if part not in self._passed_over:
            self._passed_over.add(part)
            logger.warning("%s cannot be read now (%s); it stays where it is, and this process does without it", part, why)

    def _put_aside(self, part: Path, why: str) -> None:
        # Whoever reads the whole folder, as pandas does, passes over what begins with an underscore.
        aside = part.with_name(f"_{part.name}.corrupt-{time.time_ns()}")
        try:
            part.rename(aside)
        except FileNotFoundError:  # another process saw it first
            return
        except OSError:  # in a folder that can only be read
            self._pass_over(part, f"it is damaged: {why}")
            return
        logger.warning("%s is damaged (%s); it is kept as %s, and what it held will be measured again", part, why, aside.name)


def union(folders: Iterable[Path], into: Path) -> Store:
    """A new store with the rows of several; ``into`` may exist.

    Raises:
        ArtifactCorrupt: a folder that is not a store.
    """
    target = Store.create(into)
    for folder in folders:
        target.merge(Store.open(folder))
    return target


def _require_finite(table: str, cells: dict[str, Any]) -> None:
    for name, value in cells.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"column {name} of a row for table {table} is {value}; expected a finite number: keep it as a Failure instead")


def _trust(cells: dict[str, Any]) -> tuple[float, float]:
    load = float(cells.get("foreign_load", 0.0))
    # Where it is not known, behind what is known to be quiet, and before what is known to be disturbed.
    return float(cells.get("count", 0)), -(load if load >= 0.0 else DISTURBED)
