"""The tables of packed linear layers and of weights in fewer bits, from a device's ``packing.json`` and ``narrow.json``."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from autosched.capture.passes.cpu_linear import large_enough
from autosched.capture.passes.narrow_weights import NARROW
from experiments.tables_recorded import NOT_YET, where

_HEADS = {True: "weights in a cache", False: "weights from memory"}


def packing_table(folder: Path) -> str:
    """How many times as long the unpacked product takes: on one thread / on all, with what the rule packs in bold."""
    path = folder / "packing.json"
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    lines: list[str] = []
    for from_cache, head in _HEADS.items():
        cases = [case for case in recorded["cases"] if case["from_cache"] is from_cache]
        rows = sorted({case["rows"] for case in cases})
        if cases:
            lines += [f"| {head} | {' | '.join(_rows(count) for count in rows)} |", f"|---|{'---:|' * len(rows)}"]
        for shape in dict.fromkeys(tuple(case["shape"]) for case in cases):
            cells = [_cell([case for case in cases if tuple(case["shape"]) == shape and case["rows"] == count]) for count in rows]
            lines.append(f"| {shape[0]} x {shape[1]} | {' | '.join(cells)} |")
        lines.append("")
    one_row = _one_row(recorded["cases"])
    apart = [abs(case["again_us"] / case["unpacked_us"] - 1) for case in recorded["cases"]]
    noise = f"A/A: {statistics.median(apart):.1%} apart in the median, {max(apart):.0%} at most."
    said = "Time of PyTorch's own product relative to the packed one, in float32 with a bias: on one thread / on all."
    if one_row:
        said += " Last table: both relative to the compiled one, which is called through Python."
    measured = f"Medians of {recorded['rounds']} interleaved rounds. {noise} {where(recorded)}"
    return "\n".join([*lines, *one_row, f"{said} Bold: packed by autosched in the lowering `rewritten`. {measured}"])


def _one_row(cases: list[dict[str, Any]]) -> list[str]:
    """What a product of one row takes unpacked and packed, relative to the compiled one."""
    timed = [case for case in cases if "compiled_us" in case]
    if not timed:
        return []
    heads = [f"{name}, {_HEADS[from_cache]}" for from_cache in _HEADS for name in ("PyTorch's own", "packed")]
    lines = [f"| 1 row | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for shape in dict.fromkeys(tuple(case["shape"]) for case in timed):
        cells = []
        for from_cache in _HEADS:
            found = [case for case in timed if tuple(case["shape"]) == shape and case["from_cache"] is from_cache]
            found.sort(key=lambda case: int(case["threads"]))
            cells += [" / ".join(f"{case[key] / case['compiled_us']:.2f}" for case in found) for key in ("unpacked_us", "packed_us")]
        lines.append(f"| {shape[0]} x {shape[1]} | {' | '.join(cells)} |")
    return [*lines, ""]


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _cell(cases: list[dict[str, Any]]) -> str:
    ratios = " / ".join(f"{case['unpacked_us'] / case['packed_us']:.2f}" for case in sorted(cases, key=lambda case: int(case["threads"])))
    inputs, outputs = cases[0]["shape"]
    packed = large_enough(cases[0]["rows"], inputs * outputs, "float32", from_cache=cases[0]["from_cache"])
    return f"**{ratios}**" if packed else ratios


def narrow_table(folder: Path) -> str:
    """Products of one row with weights in fewer bits, relative to float32: on one thread / on all, with what stays narrow in bold."""
    path = folder / "narrow.json"
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    by_threads = {count: {row["dtype"]: row["us"] for row in recorded["rows"] if row["threads"] == count} for count in _threads(recorded)}
    lines = ["| weights in | time of a product | relative to float32 |", "|---|---:|---:|"]
    for name in next(iter(by_threads.values())):
        times = [rows[name] for rows in by_threads.values()]
        ratios = " / ".join(f"{rows[name] / rows['float32']:.2f}" for rows in by_threads.values())
        shown = "float32 again (A/A)" if name == "again" else f"**{name}**" if name in NARROW else name
        lines.append(f"| {shown} | {' / '.join(f'{time_us:.0f}' for time_us in times)} us | {ratios} |")
    inputs, outputs = recorded["shape"]
    said = f"One row times {inputs} x {outputs} weights from memory, in float32: on one thread / on all. Bold: left narrow by autosched."
    return "\n".join([*lines, "", f"{said} Medians of {recorded['rounds']} interleaved rounds. {where(recorded)}"])


def _threads(recorded: dict[str, Any]) -> list[int]:
    return sorted({row["threads"] for row in recorded["rows"]})
