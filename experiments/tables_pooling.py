"""The table of pooling by the kernel of our own, from a device's ``pooling.json``."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.kernels import PYTORCH
from experiments.pooling import LARGEST, MEAN_OF_ALL
from experiments.tables_convolutions import compared_cells
from experiments.tables_recorded import NOT_YET, where
from experiments.tables_winograd import apart

_OWN = "own_pooling"


def pooling_table(folder: Path) -> str:
    """Times of both, on one thread / on all, how many times as fast the kernel is, and errors on all threads."""
    path = folder / "pooling.json"
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    lines = ["| channels, picture | taken | PyTorch | own | speed-up | PyTorch, error | own, error |", f"|---|---|{'---:|' * 5}"]
    for shape, cells in compared_cells(recorded, PYTORCH, _OWN, digits=1):
        taken, channels, size, taps, stride, _ = shape
        window = f"of {taps} x {taps}{f', stride {stride}' if stride > 1 else ''}"
        what = "the mean of all" if taken == MEAN_OF_ALL else f"the {'largest' if taken == LARGEST else 'mean'} {window}"
        lines.append(f"| {channels}, {size} x {size} | {what} | {cells} |")
    said = "Microseconds, channels last, batch 1, float32, the call from Python included: on one thread / on all."
    said += " Errors against float64, over the largest result."
    return "\n".join(
        [*lines, "", f"{said} Medians of {recorded['rounds']} interleaved rounds. {apart(recorded, PYTORCH)} {where(recorded)}"]
    )
