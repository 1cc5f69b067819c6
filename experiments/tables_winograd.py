"""The table of single convolutions by Winograd's algorithm, from a device's ``winograd.json``."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from experiments.kernels import AGAIN, PLAIN
from experiments.tables_recorded import NOT_YET, by_shape, where

_TILES = {"winograd_2": "2x2 tiles", "winograd_4": "4x4 tiles"}


def winograd_table(folder: Path) -> str:
    """How many times as fast as oneDNN's each way is: on one thread / on all; and the errors of all ways on all threads."""
    path = folder / "winograd.json"
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    heads = [*(f"{name}, speed-up" for name in _TILES.values()), *(f"{name}, error" for name in ("oneDNN", *_TILES.values()))]
    lines = [f"| channels, features, picture | oneDNN | {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) + 1)}"]
    for shape, rows in by_shape(recorded):
        channels, features, size = shape
        times = " / ".join(f"{row['us'][PLAIN]:,.0f}" for row in rows)
        cells = [" / ".join(f"{row['us'][PLAIN] / row['us'][name]:.2f}x" for row in rows) for name in _TILES]
        errors = [f"{rows[-1]['errors'][name]:.0e}" for name in (PLAIN, *_TILES)]
        lines.append(f"| {channels}, {features}, {size} x {size} | {times} us | {' | '.join([*cells, *errors])} |")
    said = "3x3 convolutions with relu, batch 1, float32: on one thread / on all. Errors against float64, over the largest result."
    return "\n".join([*lines, "", f"{said} Medians of {recorded['rounds']} interleaved rounds. {apart(recorded)} {where(recorded)}"])


def apart(recorded: dict[str, Any], plain: str = PLAIN) -> str:
    """How far the second measurements of the library, ``plain``, are from the first."""
    shares = [abs(row["us"][AGAIN] / row["us"][plain] - 1) for row in recorded["rows"]]
    return f"A/A: {statistics.median(shares):.1%} apart in the median, {max(shares):.0%} at most."
