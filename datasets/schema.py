"""The columns of stored runs: types, units, keys, and the version of it all.

Four tables of measurements (``solo``, ``pairs``, ``groups``, ``schedules``), one that says of what (``scopes``), and two that a schedule
is read with (``graphs``, ``limits``). Times are microseconds, sizes bytes, slowdowns and ratios have no unit; the unit of each column
is also in its Parquet metadata. ``cells.py`` turns rows into cells and back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from autosched.core.graph import OpGraph
from autosched.core.records import Contamination, DeviceKey, GroupRecord, PairRecord, Samples, ScheduleRecord, SoftwareKey, Source
from autosched.core.schedule import Schedule
from autosched.datasets.facts import DeviceFacts, KernelFacts

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = 2
"""Raised when a column or a table is added, dropped, or changes its meaning; ``migrations.py`` then learns how to read the former one."""


@dataclass(frozen=True, slots=True)
class ScopeRow:
    """A device with its software: ``scope`` is ``journal.Scope.digest`` and is repeated in every measurement."""

    scope: str
    device: DeviceKey
    software: SoftwareKey
    facts: DeviceFacts


@dataclass(frozen=True, slots=True)
class SoloRow:
    """One kernel alone. ``family`` and ``model`` say from which model's graph it was taken."""

    scope: str
    family: str
    model: str
    kernel: KernelFacts
    samples: Samples
    contamination: Contamination
    source: Source = Source.MEASURED

    @property
    def key(self) -> str:
        """Content key: what was measured, not what came out."""
        return content_key("solo", self.scope, self.kernel.signature, self.kernel.width)


@dataclass(frozen=True, slots=True)
class PairRow:
    """Two kernels together. ``repeat`` tells independent repetitions apart; their spread is the noise floor."""

    scope: str
    family: str
    model: str
    record: PairRecord
    repeat: int = 0

    @property
    def key(self) -> str:
        """Content key."""
        record = self.record
        return pair_key(self.scope, record.first, record.first_width, record.last, record.last_width, self.repeat)


@dataclass(frozen=True, slots=True)
class GroupRow:
    """Three or four kernels started together."""

    scope: str
    family: str
    model: str
    record: GroupRecord

    @property
    def key(self) -> str:
        """Content key."""
        return group_key(self.scope, self.record.signatures, self.record.widths)


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """One schedule of a whole model.

    Args:
        graph: ``OpGraph.hash``; the graph itself is in table ``graphs``.
        strategy: who proposed it.
        is_baseline: whether that is a baseline.
        schedule: what was run.
        predicted_us: what the search believed of it before it was timed, microseconds; 0 if it was not asked.
        predictor: the cost model that believed it; empty if unknown.
        record: what came out; operator times are not stored.
    """

    scope: str
    family: str
    model: str
    graph: str
    strategy: str
    is_baseline: bool
    schedule: Schedule
    predicted_us: float
    predictor: str
    record: ScheduleRecord

    @property
    def key(self) -> str:
        """Content key."""
        return content_key("schedule", self.scope, self.graph, self.record.key)


@dataclass(frozen=True, slots=True)
class GraphRow:
    """The operator graph that schedules of a model are of, without the lines of the model's source."""

    family: str
    model: str
    graph: OpGraph

    @property
    def key(self) -> str:
        """``OpGraph.hash``."""
        return self.graph.hash


@dataclass(frozen=True, slots=True)
class LimitsRow:
    """What schedules of one graph may use on one device, and the costs between operators there, as in ``device.base.Limits``."""

    scope: str
    family: str
    model: str
    graph: str
    max_lanes: int
    widths: tuple[int, ...]
    priorities: tuple[int, ...]
    lanes_matter: bool
    launch_gap_us: float
    cross_lane_us: float
    fixed_us: float

    @property
    def key(self) -> str:
        """Content key."""
        return content_key("limits", self.scope, self.graph)


Row: TypeAlias = ScopeRow | SoloRow | PairRow | GroupRow | ScheduleRow | GraphRow | LimitsRow

TABLES: dict[str, type[Row]] = {
    "scopes": ScopeRow,
    "solo": SoloRow,
    "pairs": PairRow,
    "groups": GroupRow,
    "schedules": ScheduleRow,
    "graphs": GraphRow,
    "limits": LimitsRow,
}


def content_key(*parts: object) -> str:
    """sha256 of canonical JSON, 32 hexadecimal digits."""
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def pair_key(scope: str, first: str, first_width: int, last: str, last_width: int, repeat: int = 0) -> str:
    """Content key of a pair in its start order."""
    return content_key("pair", scope, first, first_width, last, last_width, repeat)


def group_key(scope: str, signatures: Sequence[str], widths: Sequence[int]) -> str:
    """Content key of a group in its start order."""
    return content_key("group", scope, tuple(signatures), tuple(widths))


# Column -> (Arrow type name, unit). The order is the order in the file.
_TEXT, _COUNT, _REAL = "string", "int64", "double"
COMMON = {"key": (_TEXT, ""), "scope": (_TEXT, ""), "family": (_TEXT, ""), "model": (_TEXT, "")}
DISTURBANCE = {"foreign_load": (_REAL, "share of all cores, -1 unknown"), "clock_mhz": (_REAL, "MHz, 0 unknown"), "source": (_TEXT, "")}

COLUMNS: dict[str, dict[str, tuple[str, str]]] = {
    "scopes": {
        "key": (_TEXT, ""),
        "device_name": (_TEXT, ""),
        "device_kind": (_TEXT, ""),
        "device_key": (_TEXT, "JSON"),
        "software_key": (_TEXT, "JSON"),
        "units": (_COUNT, "cores or multiprocessors"),
        "peak_gflops": (_REAL, "1e9/s"),
        "bandwidth_gb_s": (_REAL, "1e9 bytes/s"),
        "cache_bytes": (_COUNT, "bytes"),
        "threads_per_unit": (_COUNT, "threads"),
    },
    "solo": {
        **COMMON,
        "signature": (_TEXT, ""),
        "width": (_COUNT, "threads"),
        "kind": (_TEXT, ""),
        "flops": (_COUNT, "operations"),
        "bytes_read": (_COUNT, "bytes"),
        "bytes_written": (_COUNT, "bytes"),
        "elements": (_COUNT, "elements"),
        "calls": (_COUNT, "calls"),
        "blocks": (_COUNT, "blocks, 0 unknown"),
        "threads_per_block": (_COUNT, "threads"),
        "registers_per_thread": (_COUNT, "registers"),
        "shared_bytes": (_COUNT, "bytes"),
        "blocks_per_sm": (_COUNT, "blocks"),
        "device_kernels": (_COUNT, "kernels"),
        "solo_us": (_REAL, "us"),
        "ci_low_us": (_REAL, "us"),
        "ci_high_us": (_REAL, "us"),
        "p95_us": (_REAL, "us"),
        "min_us": (_REAL, "us"),
        "count": (_COUNT, "samples"),
        **DISTURBANCE,
    },
    "pairs": {
        **COMMON,
        "repeat": (_COUNT, ""),
        "first": (_TEXT, ""),
        "first_width": (_COUNT, "threads"),
        "last": (_TEXT, ""),
        "last_width": (_COUNT, "threads"),
        "solo_first_us": (_REAL, "us"),
        "solo_last_us": (_REAL, "us"),
        "together_us": (_REAL, "us"),
        "slowdown_first": (_REAL, ""),
        "slowdown_last": (_REAL, ""),
        "makespan_ratio": (_REAL, ""),
        "repeats_first": (_COUNT, "runs"),
        "repeats_last": (_COUNT, "runs"),
        "count": (_COUNT, "samples"),
        **DISTURBANCE,
    },
    "groups": {
        **COMMON,
        "signatures": (_TEXT, "JSON"),
        "widths": (_TEXT, "JSON"),
        "solo_us": (_TEXT, "JSON, us"),
        "repeats": (_TEXT, "JSON, runs"),
        "finish_us": (_TEXT, "JSON, us"),
        "together_us": (_REAL, "us"),
        "count": (_COUNT, "samples"),
        **DISTURBANCE,
    },
    "schedules": {
        **COMMON,
        "graph": (_TEXT, ""),
        "strategy": (_TEXT, ""),
        "is_baseline": (_COUNT, "0 or 1"),
        "lanes": (_COUNT, "lanes"),
        "schedule": (_TEXT, "JSON"),
        "schedule_key": (_TEXT, ""),
        "predicted_us": (_REAL, "us, 0 unknown"),
        "predictor": (_TEXT, ""),
        "median_us": (_REAL, "us"),
        "ci_low_us": (_REAL, "us"),
        "ci_high_us": (_REAL, "us"),
        "p95_us": (_REAL, "us"),
        "min_us": (_REAL, "us"),
        "count": (_COUNT, "samples"),
        "peak_memory_bytes": (_COUNT, "bytes"),
        **DISTURBANCE,
    },
    "graphs": {
        "key": (_TEXT, ""),
        "family": (_TEXT, ""),
        "model": (_TEXT, ""),
        "operators": (_COUNT, "operators"),
        "graph": (_TEXT, "JSON"),
    },
    "limits": {
        **COMMON,
        "graph": (_TEXT, ""),
        "max_lanes": (_COUNT, "lanes"),
        "widths": (_TEXT, "JSON"),
        "priorities": (_TEXT, "JSON"),
        "lanes_matter": (_COUNT, "0 or 1"),
        "launch_gap_us": (_REAL, "us"),
        "cross_lane_us": (_REAL, "us"),
        "fixed_us": (_REAL, "us"),
    },
}


def arrow_schema(table: str) -> pa.Schema:
    """The Arrow schema of a table, with units and the version in its metadata."""
    import pyarrow as pa

    fields = [
        pa.field(name, pa.type_for_alias(type_name), nullable=False, metadata={"unit": unit} if unit else None)
        for name, (type_name, unit) in COLUMNS[table].items()
    ]
    return pa.schema(fields, metadata={"autosched.table": table, "autosched.schema": str(SCHEMA)})
