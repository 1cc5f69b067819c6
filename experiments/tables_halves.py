"""The table of products and attention in sixteen bits, and of products in eight, from a device's ``halves.json``."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.attention import CAUSAL
from experiments.halves import DTYPES
from experiments.kernels import PYTORCH
from experiments.tables_convolutions import compared_cells
from experiments.tables_recorded import NOT_YET, where
from experiments.tables_winograd import apart


def halves_table(folder: Path) -> str:
    """Times of both, on one thread / on all, how many times as fast the kernel is, and errors on all threads."""
    path = folder / "halves.json"
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    lines = ["| dtype | what | PyTorch | own | speed-up | PyTorch, error | own, error |", f"|---|---|{'---:|' * 5}"]
    for own in ("own_product", "own_attention"):
        those = {**recorded, "rows": [row for row in recorded["rows"] if own in row["us"]]}
        for shape, cells in compared_cells(those, PYTORCH, own, digits=0):
            lines.append(f"| {str(DTYPES[shape[0]]).removeprefix('torch.')} | {_what(*shape[1:])} | {cells} |")
    said = "Microseconds, the call from Python included: on one thread / on all. Errors against float64, over the largest result."
    return "\n".join(
        [*lines, "", f"{said} Medians of {recorded['rounds']} interleaved rounds. {apart(recorded, PYTORCH)} {where(recorded)}"]
    )


def _what(*shape: int) -> str:
    if len(shape) == 3:
        return "product of {} x {} x {}".format(*shape)
    _, heads, shared, queries, keys, width, sees = shape
    few = f" ({shared} of keys)" if shared != heads else ""
    return f"attention of {heads} heads{few}, {queries} x {keys}, {width} wide{', causal' if sees == CAUSAL else ''}"
