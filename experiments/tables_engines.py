"""The table of other engines beside a schedule, from a device's ``engines.json``."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.engines import AUTOSCHED, ENGINES
from experiments.tables_recorded import NOT_YET, where

_MISSING = "--"


def engines_table(folder: Path) -> str:
    """Times of all engines, and that of the fastest other one over the schedule's, with the reasons of those that are missing."""
    path = folder / "engines.json"
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    lines = [f"| model | {' | '.join(ENGINES)} | fastest other / autosched |", f"|---|{'---:|' * (len(ENGINES) + 1)}"]
    reasons: list[str] = []
    for row in recorded["rows"]:
        us = row["us"]
        times = [f"{us[engine] / 1e3:.2f}" if engine in us else _MISSING for engine in ENGINES]
        others = [us[engine] for engine in us if engine != AUTOSCHED]
        gain = f"{min(others) / us[AUTOSCHED]:.2f}x" if others and AUTOSCHED in us else _MISSING
        lines.append(f"| `{row['model']}` | {' | '.join([*times, gain])} |")
        reasons += [f"`{row['model']}` with {engine}: {why[:120]}." for engine, why in row["missing"].items()]
    versions = ", ".join(f"{package} {version}" for package, version in recorded["versions"].items())
    said = "Measured milliseconds, batch 1, float32, medians over turns; each engine in a process of its own, all of them in turns."
    return "\n".join([*lines, "", " ".join([f"{said} {recorded['turns']} turns. {versions}. {where(recorded)}", *reasons])])
