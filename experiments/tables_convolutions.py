"""The table of single convolutions by the kernel of our own, from a device's ``convolutions.json``."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.kernels import PLAIN
from experiments.tables_recorded import NOT_YET, where
from experiments.tables_winograd import apart

_OWN = "own_convolution"


def convolutions_table(folder: Path) -> str:
    """Times of both, on one thread / on all, how many times as fast the kernel is, and errors on all threads."""
    path = folder / "convolutions.json"
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    lines = ["| channels, features, picture | weights | oneDNN | own | speed-up | oneDNN, error | own, error |", f"|---|---|{'---:|' * 5}"]
    for shape in dict.fromkeys(tuple(row["shape"]) for row in recorded["rows"]):
        rows = sorted((row for row in recorded["rows"] if tuple(row["shape"]) == shape), key=lambda row: row["threads"])
        channels, features, size, taps, stride, groups = shape
        weights = f"{taps} x {taps}{f', stride {stride}' if stride > 1 else ''}{', each channel' if groups > 1 else ''}"
        times = [" / ".join(f"{row['us'][name]:,.1f}" for row in rows) for name in (PLAIN, _OWN)]
        gain = " / ".join(f"{row['us'][PLAIN] / row['us'][_OWN]:.2f}x" for row in rows)
        errors = [f"{rows[-1]['errors'][name]:.0e}" for name in (PLAIN, _OWN)]
        lines.append(f"| {channels}, {features}, {size} x {size} | {weights} | {' | '.join([*times, gain, *errors])} |")
    said = "Microseconds with bias and relu, batch 1, float32, the call from Python included: on one thread / on all."
    said += " A picture of three channels comes, and its result goes, channels first: copying that is part of the time."
    more = f"Errors against float64, over the largest result. Medians of {recorded['rounds']} interleaved rounds."
    return "\n".join([*lines, "", f"{said} {more} {apart(recorded)} {where(recorded)}"])
