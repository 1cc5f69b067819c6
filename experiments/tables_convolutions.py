"""The table of single convolutions by the kernel of our own, from a device's ``convolutions.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.kernels import PLAIN
from experiments.tables_recorded import NOT_YET, by_shape, where
from experiments.tables_winograd import apart

_OWN = "own_convolution"


def convolutions_table(folder: Path) -> str:
    """Times of both, on one thread / on all, how many times as fast the kernel is, and errors on all threads."""
    path = folder / "convolutions.json"
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    lines = ["| channels, features, picture | weights | oneDNN | own | speed-up | oneDNN, error | own, error |", f"|---|---|{'---:|' * 5}"]
    for shape, cells in compared_cells(recorded, PLAIN, _OWN, digits=1):
        channels, features, size, taps, stride, groups = shape
        grouped = "" if groups == 1 else ", each channel" if groups == channels else f", {groups} groups"
        weights = f"{taps} x {taps}{f', stride {stride}' if stride > 1 else ''}{grouped}"
        lines.append(f"| {channels}, {features}, {size} x {size} | {weights} | {cells} |")
    said = "Microseconds with bias and relu, batch 1, float32, the call from Python included: on one thread / on all."
    said += " A picture of three channels comes, and its result goes, channels first: copying that is part of the time."
    more = f"Errors against float64, over the largest result. Medians of {recorded['rounds']} interleaved rounds."
    return "\n".join([*lines, "", f"{said} {more} {apart(recorded)} {where(recorded)}"])


def compared_cells(recorded: dict[str, Any], plain: str, own: str, *, digits: int) -> Iterator[tuple[tuple[int, ...], str]]:
    """Of each shape: both times on one thread / on all, how many times as fast ``own`` is as ``plain``, and both errors on all threads."""
    for shape, rows in by_shape(recorded):
        times = [" / ".join(f"{row['us'][name]:,.{digits}f}" for row in rows) for name in (plain, own)]
        gain = " / ".join(f"{row['us'][plain] / row['us'][own]:.2f}x" for row in rows)
        errors = [f"{rows[-1]['errors'][name]:.0e}" for name in (plain, own)]
        yield shape, " | ".join([*times, gain, *errors])
