"""Rows as cells of a table, and back. Only this file and the store handle rows in this form."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from autosched.core.decoding import decode_json
from autosched.core.graph import OpGraph
from autosched.core.records import Contamination, DeviceKey, GroupRecord, PairRecord, Samples, ScheduleRecord, SoftwareKey, Source
from autosched.core.schedule import Schedule
from autosched.datasets.facts import DeviceFacts, KernelFacts, LaunchFacts
from autosched.datasets.schema import (
    COLUMNS,
    COMMON,
    DISTURBANCE,
    GraphRow,
    GroupRow,
    LimitsRow,
    PairRow,
    Row,
    ScheduleRow,
    ScopeRow,
    SoloRow,
)

_PAIR = [name for name in COLUMNS["pairs"] if name not in COMMON and name not in DISTURBANCE and name != "repeat"]
_SAMPLES = ("ci_low_us", "ci_high_us", "p95_us", "min_us", "count")


def flat(row: Row) -> dict[str, Any]:
    """The cells of a row, by column."""
    match row:
        case ScopeRow():
            facts = row.facts
            return {
                "key": row.scope, "device_name": facts.name, "device_kind": facts.kind, "device_key": _json(row.device),
                "software_key": _json(row.software), "units": facts.units, "peak_gflops": facts.peak_gflops,
                "bandwidth_gb_s": facts.bandwidth_gb_s, "cache_bytes": facts.cache_bytes, "threads_per_unit": facts.threads_per_unit,
            }  # fmt: skip
        case GraphRow():
            bare = dataclasses.replace(row.graph, operators=tuple(dataclasses.replace(item, source="") for item in row.graph.operators))
            return {"key": row.key, "family": row.family, "model": row.model, "operators": len(bare), "graph": _json(bare)}
    common = {"key": row.key, "scope": row.scope, "family": row.family, "model": row.model}
    match row:
        case SoloRow():
            return common | _of_solo(row)
        case PairRow():
            cells = {name: getattr(row.record, name) for name in _PAIR}
            return common | {"repeat": row.repeat} | cells | _disturbed(row.record.contamination, row.record.source)
        case GroupRow():
            record = row.record
            lists = {name: _json(getattr(record, name)) for name in ("signatures", "widths", "solo_us", "repeats", "finish_us")}
            rest = {"together_us": record.together_us, "count": record.count}
            return common | lists | rest | _disturbed(record.contamination, record.source)
        case ScheduleRow():
            return common | _of_schedule(row)
        case LimitsRow():
            return common | {
                "graph": row.graph, "max_lanes": row.max_lanes, "widths": _json(row.widths), "priorities": _json(row.priorities),
                "lanes_matter": int(row.lanes_matter), "launch_gap_us": row.launch_gap_us, "cross_lane_us": row.cross_lane_us,
                "fixed_us": row.fixed_us,
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
        device = decode_json(cells["device_key"], DeviceKey)
        return ScopeRow(cells["key"], device, decode_json(cells["software_key"], SoftwareKey), facts)
    if table == "graphs":
        return GraphRow(cells["family"], cells["model"], decode_json(cells["graph"], OpGraph))
    common = (cells["scope"], cells["family"], cells["model"])
    if table == "limits":
        return LimitsRow(
            *common, cells["graph"], cells["max_lanes"], _ints(cells["widths"]), _ints(cells["priorities"]), bool(cells["lanes_matter"]),
            cells["launch_gap_us"], cells["cross_lane_us"], cells["fixed_us"],
        )  # fmt: skip
    contamination, source = Contamination(cells["foreign_load"], cells["clock_mhz"]), Source(cells["source"])
    if table == "solo":
        kernel = _kernel(cells)
        return SoloRow(*common, kernel, _samples(kernel.solo_us, cells), contamination, source)
    if table == "pairs":
        pair = PairRecord(**{name: cells[name] for name in _PAIR}, contamination=contamination, source=source)
        return PairRow(*common, pair, cells["repeat"])
    if table == "schedules":
        schedule = decode_json(cells["schedule"], Schedule)
        samples = _samples(cells["median_us"], cells)
        timed = ScheduleRecord(cells["schedule_key"], samples, cells["peak_memory_bytes"], contamination, source=source)
        return ScheduleRow(
            *common,
            cells["graph"],
            cells["strategy"],
            bool(cells["is_baseline"]),
            schedule,
            cells["predicted_us"],
            cells["predictor"],
            timed,
        )
    group = GroupRecord(
        decode_json(cells["signatures"], tuple[str, ...]),
        _ints(cells["widths"]),
        _reals(cells["solo_us"]),
        _ints(cells["repeats"]),
        _reals(cells["finish_us"]),
        cells["together_us"],
        cells["count"],
        contamination,
        source,
    )
    return GroupRow(*common, group)


def _of_solo(row: SoloRow) -> dict[str, Any]:
    kernel, launch, samples = row.kernel, row.kernel.launch or LaunchFacts(0, 0, kernels=0), row.samples
    return {
        "signature": kernel.signature, "width": kernel.width, "kind": kernel.kind, "flops": kernel.flops,
        "bytes_read": kernel.bytes_read, "bytes_written": kernel.bytes_written, "elements": kernel.elements, "calls": kernel.calls,
        "blocks": launch.blocks, "threads_per_block": launch.threads_per_block, "registers_per_thread": launch.registers_per_thread,
        "shared_bytes": launch.shared_bytes, "blocks_per_sm": launch.blocks_per_sm, "device_kernels": launch.kernels,
        "solo_us": kernel.solo_us, **_spread(samples), **_disturbed(row.contamination, row.source),
    }  # fmt: skip


def _of_schedule(row: ScheduleRow) -> dict[str, Any]:
    record = row.record
    return {
        "graph": row.graph, "strategy": row.strategy, "is_baseline": int(row.is_baseline), "lanes": row.schedule.lanes,
        "schedule": _json(row.schedule), "schedule_key": record.key, "predicted_us": row.predicted_us, "predictor": row.predictor,
        "median_us": record.samples.median_us, **_spread(record.samples), "peak_memory_bytes": record.peak_memory_bytes,
        **_disturbed(record.contamination, record.source),
    }  # fmt: skip


def _kernel(cells: dict[str, Any]) -> KernelFacts:
    launch = None
    if cells["device_kernels"]:
        launch = LaunchFacts(
            cells["blocks"], cells["threads_per_block"], cells["registers_per_thread"], cells["shared_bytes"], cells["blocks_per_sm"],
            cells["device_kernels"],
        )  # fmt: skip
    return KernelFacts(
        cells["signature"], cells["width"], cells["kind"], cells["flops"], cells["bytes_read"], cells["bytes_written"],
        cells["elements"], cells["solo_us"], cells["calls"], launch,
    )  # fmt: skip


def _samples(median_us: float, cells: dict[str, Any]) -> Samples:
    return Samples(median_us, *(cells[name] for name in _SAMPLES))


def _spread(samples: Samples) -> dict[str, Any]:
    return {name: getattr(samples, name) for name in _SAMPLES}


def _ints(text: str) -> tuple[int, ...]:
    return decode_json(text, tuple[int, ...])


def _reals(text: str) -> tuple[float, ...]:
    return decode_json(text, tuple[float, ...])


def _json(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def _disturbed(contamination: Contamination, source: Source) -> dict[str, Any]:
    return {"foreign_load": contamination.foreign_load, "clock_mhz": contamination.clock_mhz, "source": source.value}
