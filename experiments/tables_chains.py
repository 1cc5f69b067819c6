"""The table of convolutions and the depthwise ones behind them by one kernel, from a device's ``chains.json``."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.kernels import PLAIN
from experiments.tables_recorded import NOT_YET, by_shape, where
from experiments.tables_winograd import apart

_EACH, _BOTH = "own_convolution", "own_chain"


def chains_table(folder: Path) -> str:
    """Times on one thread / on all, how many times as fast one kernel is as the fastest two, and its errors on all threads."""
    path = folder / "chains.json"
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    lines = [
        "| channels, features, picture | first | second | oneDNN, two | own, two | own, one | speed-up | error |",
        f"|---|---|---|{'---:|' * 5}",
    ]
    for shape, rows in by_shape(recorded):
        times = [" / ".join(f"{row['us'][name]:,.0f}" for row in rows) for name in (PLAIN, _EACH, _BOTH)]
        gain = " / ".join(f"{min(row['us'][PLAIN], row['us'][_EACH]) / row['us'][_BOTH]:.2f}x" for row in rows)
        channels, features, size, *weights = shape
        first, second = (f"{taps} x {taps}{f', stride {step}' if step > 1 else ''}" for taps, step in (weights[:2], weights[2:]))
        cells = [f"{channels}, {features}, {size} x {size}", first, second, *times, gain, f"{rows[-1]['errors'][_BOTH]:.0e}"]
        lines.append(f"| {' | '.join(cells)} |")
    said = "Microseconds with bias and SiLU, batch 1, float32, the call from Python included: on one thread / on all."
    more = f"Errors against float64, over the largest result. Medians of {recorded['rounds']} interleaved rounds."
    return "\n".join([*lines, "", f"{said} {more} {apart(recorded)} {where(recorded)}"])
