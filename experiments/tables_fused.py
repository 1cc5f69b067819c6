"""The tables of operator granularity and of what compiling costs, from ``results/<device>/fused`` and ``results/<device>/compile_cost``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.tables_gpu import milliseconds
from experiments.tables_recorded import NOT_YET

_READY = "compiled regions were ready after "
_COMPILED = ("torch_compile", "max_autotune_combo", "max_autotune", "compiled")


def fused_table(folder: Path) -> str:
    """One line for each model and lowering; ``torch.compile`` and everything else on a line come from one interleaved run."""
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not paths:
        return NOT_YET
    lines = [
        "| model | lowering | operators | eager | sequential | kept | torch.compile | torch.compile / kept | noise | regions ready after |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    where: set[str] = set()
    for path in paths:
        document = json.loads(path.read_text())
        for name, run in document["runs"].items():
            lines.append(_line(document["model"], name, run["summary"], run["report"]))
        found = document["environment"]
        where.add(f"{found['cores']} cores, torch {found['torch']}, commit {found['commit'][:9]}, {found['taken'][:10]}")
    footer = (
        "Measured median milliseconds; everything in a row was interleaved in one run. *fused_again* is a second run with all regions "
        f"in the cache. {'; '.join(sorted(where))}."
    )
    return "\n".join([*lines, "", footer])


def _line(model: str, name: str, found: dict[str, Any], report: dict[str, Any]) -> str:
    if "error" in found:
        return f"| `{model}` | {name} | | failed: {found['error'].splitlines()[0][:80]} | | | | | | |"
    eager = [row["measured_us"] for row in report["strategies"] if row["name"].startswith("eager") and row["measured_us"] is not None]
    eager_us = min(eager, default=None)
    rival_us = min((time_us for key, time_us in found["torch_compile_us"].items() if key in _COMPILED), default=None)
    ratio = f"{rival_us / found['kept_us']:.2f}x" if rival_us is not None and found["kept_us"] else ""
    # A lowering that fell back to another one says so beside its name.
    shown = name if found["lowering"] == name.removesuffix("_again") else f"{name} (as {found['lowering']})"
    ready = next((note.removeprefix(_READY) for note in found["notes"] if note.startswith(_READY)), "")
    return (
        f"| `{model}` | {shown} | {found['operators']} | {milliseconds(eager_us)} | {milliseconds(found['sequential_us'])} "
        f"| {milliseconds(found['kept_us'])} ({found['kept']}) | {milliseconds(rival_us)} "
        f"| {ratio} | {found['noise_floor_pct']:.1f} % | {ready} |"
    )


def compile_cost_table(folder: Path) -> str:
    """One line for each model and lowering: seconds until everything compiled is ready, first and in a new process."""
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not paths:
        return NOT_YET
    lines = [
        "| model | lowering | operators | distinct regions | processes | first | again | one process |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    where: set[str] = set()
    for path in paths:
        document = json.loads(path.read_text(encoding="utf-8"))
        turns = [document.get(turn, {}) for turn in ("first", "second", "serial")]
        cells = [str(turns[0].get(name, "")) for name in ("operators", "distinct", "processes")]
        cells += [_turn(turn) for turn in turns]
        lines.append(f"| `{document['model']}` | {document['lowering']} | " + " | ".join(cells) + " |")
        found = document["environment"]
        device = found["gpu"] or f"{found['cores']} cores"
        where.add(f"{device}, torch {found['torch']}, commit {found['commit'][:9]}, {found['taken'][:10]}")
    footer = (
        "Measured seconds. *Fused*: every variant of every region, at each width. *Inductor*: the whole model, until it is ready to run."
    )
    return "\n".join([*lines, "", f"{footer} {'; '.join(sorted(where))}."])


def _turn(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"failed: {found['error'].splitlines()[0][:80]}"
    if "ready_s" in found:
        return f"{found['ready_s']:.1f}"
    return f"refused: {found['refused'][0].splitlines()[0][:80]}" if found.get("refused") else ""
