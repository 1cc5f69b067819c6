"""The table of attention by the kernel of our own, from a device's ``attention.json``."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.attention import BIAS, CAUSAL
from experiments.kernels import PYTORCH
from experiments.tables_convolutions import compared_cells
from experiments.tables_recorded import NOT_YET, where
from experiments.tables_winograd import apart

_OWN = "own_attention"
_SEES = {CAUSAL: ", causal", BIAS: ", with a bias"}


def attention_table(folder: Path) -> str:
    """Times of both, on one thread / on all, how many times as fast the kernel is, and errors on all threads."""
    path = folder / "attention.json"
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    lines = ["| batch, heads, queries x keys, width | PyTorch | own | speed-up | PyTorch, error | own, error |", f"|---|{'---:|' * 5}"]
    for shape, cells in compared_cells(recorded, PYTORCH, _OWN, digits=0):
        batch, heads, shared, queries, keys, width, sees = shape
        what = f"{batch}, {heads}{f' ({shared} of keys)' if shared != heads else ''}, {queries} x {keys}, {width}{_SEES.get(sees, '')}"
        lines.append(f"| {what} | {cells} |")
    said = "Microseconds, float32, the call from Python included: on one thread / on all. Errors against float64, over the largest result."
    return "\n".join(
        [*lines, "", f"{said} Medians of {recorded['rounds']} interleaved rounds. {apart(recorded, PYTORCH)} {where(recorded)}"]
    )
