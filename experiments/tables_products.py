"""The table of single products of a few rows on a CPU, from a device's ``products.json``."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.products import MKL, ONEDNN, OWN
from experiments.tables_recorded import NOT_YET, by_shape, where
from experiments.tables_winograd import apart


def products_table(folder: Path) -> str:
    """Times of each way and how many times as fast as the faster library the kernel is, on one thread / on all; errors on all threads."""
    path = folder / "products.json"
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    libraries = [name for name in (ONEDNN, MKL) if name in recorded["rows"][0]["us"]]
    names = [*libraries, OWN]
    heads = [*names, "speed-up", "the same, weights from memory", *(f"{name}, error" for name in names)]
    lines = [f"| rows, inputs, outputs | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for shape, rows in by_shape(recorded):
        cells = [" / ".join(f"{row['us'][name]:,.1f}" for row in rows) for name in names]
        for kind in ("us", "from_memory_us"):
            times = [row[kind] for row in rows if kind in row]
            cells.append(" / ".join(f"{min(taken[name] for name in libraries) / taken[OWN]:.2f}x" for taken in times))
        cells += [f"{rows[-1]['errors'][name]:.0e}" for name in names]
        lines.append(f"| {', '.join(map(str, shape))} | {' | '.join(cells)} |")
    said = "Microseconds with bias, float32, the call from Python included: on one thread / on all. Speed-up: over the faster library."
    more = "Errors against float64, over the largest result."
    return "\n".join([*lines, "", f"{said} {more} Medians of {recorded['rounds']} interleaved rounds. {apart(recorded)} {where(recorded)}"])
