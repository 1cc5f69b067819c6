"""The table of recurrent layers taken apart, from a device's ``recurrent.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.recurrent import AGAIN, EAGER, IN_ORDER, ONE_THREAD, TUNED
from experiments.tables_recorded import NOT_YET, where

_COLUMNS = (AGAIN, ONE_THREAD, IN_ORDER, TUNED)


def recurrent_table(folder: Path) -> str:
    """Every layer: its time as it comes, and how many times as fast the others are."""
    path = folder / "recurrent.json"
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    lines = [
        f"| layer | {EAGER} | A/A | {' | '.join(_COLUMNS[1:])} | lanes | max error |",
        "|---|" + "---:|" * (len(_COLUMNS) + 3),
    ]
    for case in recorded["cases"]:
        rows = {row["name"]: row for row in case["rows"]}
        cells = [_ratio(rows[name]) for name in _COLUMNS]
        worst = max(row["max_difference"] for row in case["rows"])
        lines.append(f"| {_layer(case)} | {rows[EAGER]['median_us']:,.0f} us | {' | '.join(cells)} | {case['lanes']} | {worst:.0e} |")
    said = (
        f"Speed-up over the layer *{EAGER}* on {recorded['threads']} threads, with its 95 % interval. Float32, batch first. "
        f"*{IN_ORDER}*: the parts one after another, each on all threads. *{TUNED}*: the schedule that ten seconds of tuning keep, and its "
        f"lanes. Medians of {recorded['rounds']} interleaved rounds."
    )
    return "\n".join([*lines, "", f"{said} {where(recorded)}"])


def _ratio(row: dict[str, Any]) -> str:
    low, high = row["speedup_ci"]
    return f"{row['speedup']:.2f}x ({low:.2f} to {high:.2f})"


def _layer(case: dict[str, Any]) -> str:
    depth = f"{case['layers']} layers" if case["layers"] > 1 else "1 layer"
    way = ", both directions" if case["both"] else ""
    steps = f"{case['steps']} steps" if case["steps"] > 1 else "1 step"
    batch = f", batch {case['batch']}" if case["batch"] > 1 else ""
    return f"{case['kind']} {case['inputs']} to {case['hidden']}, {depth}{way}; {steps}{batch}"
