"""The columns of stored runs: types, units, keys, and the version of it all.

Three tables of measurements (``solo``, ``pairs``, ``groups``) and one that says of what (``scopes``). Times are microseconds, sizes
bytes, slowdowns and ratios have no unit; the unit of each column is also in its Parquet metadata.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from autosched.core.records import Contamination, DeviceKey, PairRecord, Samples, SoftwareKey, Source
from autosched.datasets.facts import DeviceFacts, KernelFacts, LaunchFacts

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = 1
"""Raised when a column is added, dropped, or changes its meaning."""


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
    """Three or four kernels started together, in order; ``finish_us`` is when each was done, from the common start."""

    scope: str
    family: str
    model: str
    signatures: tuple[str, ...]
    widths: tuple[int, ...]
    solo_us: tuple[float, ...]
    finish_us: tuple[float, ...]
    count: int
    contamination: Contamination
    source: Source = Source.MEASURED

    @property
    def key(self) -> str:
        """Content key."""
        return group_key(self.scope, self.signatures, self.widths)


Row: TypeAlias = ScopeRow | SoloRow | PairRow | GroupRow

TABLES: dict[str, type[Row]] = {"scopes": ScopeRow, "solo": SoloRow, "pairs": PairRow, "groups": GroupRow}


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
_COMMON = {"key": (_TEXT, ""), "scope": (_TEXT, ""), "family": (_TEXT, ""), "model": (_TEXT, "")}
_DISTURBED = {"foreign_load": (_REAL, "share of all cores, -1 unknown"), "clock_mhz": (_REAL, "MHz, 0 unknown"), "source": (_TEXT, "")}

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
        **_COMMON,
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
        **_DISTURBED,
    },
    "pairs": {
        **_COMMON,
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
        **_DISTURBED,
    },
    "groups": {
        **_COMMON,
        "signatures": (_TEXT, "JSON"),
        "widths": (_TEXT, "JSON"),
        "solo_us": (_TEXT, "JSON, us"),
        "finish_us": (_TEXT, "JSON, us"),
        "count": (_COUNT, "samples"),
        **_DISTURBED,
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


def flat(row: Row) -> dict[str, Any]:
    """The cells of a row, by column; only the store and this file handle rows in this form."""
    if isinstance(row, ScopeRow):
        facts = row.facts
        return {
            "key": row.scope, "device_name": facts.name, "device_kind": facts.kind, "device_key": _json(row.device),
            "software_key": _json(row.software), "units": facts.units, "peak_gflops": facts.peak_gflops,
            "bandwidth_gb_s": facts.bandwidth_gb_s, "cache_bytes": facts.cache_bytes, "threads_per_unit": facts.threads_per_unit,
        }  # fmt: skip
    common = {"key": row.key, "scope": row.scope, "family": row.family, "model": row.model}
    if isinstance(row, SoloRow):
        kernel, launch, samples = row.kernel, row.kernel.launch or LaunchFacts(0, 0, kernels=0), row.samples
        return common | {
            "signature": kernel.signature, "width": kernel.width, "kind": kernel.kind, "flops": kernel.flops,
            "bytes_read": kernel.bytes_read, "bytes_written": kernel.bytes_written, "elements": kernel.elements, "calls": kernel.calls,
            "blocks": launch.blocks, "threads_per_block": launch.threads_per_block, "registers_per_thread": launch.registers_per_thread,
            "shared_bytes": launch.shared_bytes, "blocks_per_sm": launch.blocks_per_sm, "device_kernels": launch.kernels,
            "solo_us": samples.median_us, "ci_low_us": samples.ci_low_us, "ci_high_us": samples.ci_high_us, "p95_us": samples.p95_us,
            "min_us": samples.min_us, "count": samples.count, **_disturbed(row.contamination, row.source),
        }  # fmt: skip
    if isinstance(row, PairRow):
        record = row.record
        names = [name for name in COLUMNS["pairs"] if name not in _COMMON and name not in _DISTURBED and name != "repeat"]
        cells = {name: getattr(record, name) for name in names}
        return common | {"repeat": row.repeat} | cells | _disturbed(record.contamination, record.source)
    return common | {
        "signatures": _json(row.signatures), "widths": _json(row.widths), "solo_us": _json(row.solo_us),
        "finish_us": _json(row.finish_us), "count": row.count, **_disturbed(row.contamination, row.source),
    }  # fmt: skip


def row_of(table: str, cells: dict[str, Any]) -> Row:
    """The inverse of :func:`flat`.

    Raises:
        ValueError: cells that no writer would write (msgspec's errors are of this class).
    """
    if table == "scopes":
        facts = DeviceFacts(
            cells["device_name"], cells["device_kind"], cells["units"], cells["peak_gflops"], cells["bandwidth_gb_s"], cells["cache_bytes"],
            cells["threads_per_unit"],
        )  # fmt: skip
        device = msgspec.json.decode(cells["device_key"], type=DeviceKey)
        return ScopeRow(cells["key"], device, msgspec.json.decode(cells["software_key"], type=SoftwareKey), facts)
    contamination, source = Contamination(cells["foreign_load"], cells["clock_mhz"]), Source(cells["source"])
    common = (cells["scope"], cells["family"], cells["model"])
    if table == "solo":
        launch = None
        if cells["device_kernels"]:
            launch = LaunchFacts(
                cells["blocks"], cells["threads_per_block"], cells["registers_per_thread"], cells["shared_bytes"], cells["blocks_per_sm"],
                cells["device_kernels"],
            )  # fmt: skip
        kernel = KernelFacts(
            cells["signature"], cells["width"], cells["kind"], cells["flops"], cells["bytes_read"], cells["bytes_written"],
            cells["elements"], cells["solo_us"], cells["calls"], launch,
        )  # fmt: skip
        samples = Samples(cells["solo_us"], cells["ci_low_us"], cells["ci_high_us"], cells["p95_us"], cells["min_us"], cells["count"])
        return SoloRow(*common, kernel, samples, contamination, source)
    if table == "pairs":
        names = [name for name in COLUMNS["pairs"] if name not in _COMMON and name not in _DISTURBED and name != "repeat"]
        record = PairRecord(**{name: cells[name] for name in names}, contamination=contamination, source=source)
        return PairRow(*common, record, cells["repeat"])
    return GroupRow(
        *common,
        msgspec.json.decode(cells["signatures"], type=tuple[str, ...]),
        msgspec.json.decode(cells["widths"], type=tuple[int, ...]),
        msgspec.json.decode(cells["solo_us"], type=tuple[float, ...]),
        msgspec.json.decode(cells["finish_us"], type=tuple[float, ...]),
        cells["count"],
        contamination,
        source,
    )


def _json(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def _disturbed(contamination: Contamination, source: Source) -> dict[str, Any]:
    return {"foreign_load": contamination.foreign_load, "clock_mhz": contamination.clock_mhz, "source": source.value}
