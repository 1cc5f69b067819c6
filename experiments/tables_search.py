"""Tables of the search experiments, from ``quality.json``, ``speed.json``, ``spare_time.json`` in ``results/sim``. All is simulated."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from experiments.tables_recorded import NOT_YET


def _read(path: Path) -> dict[str, Any] | None:
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _taken(recorded: dict[str, Any]) -> str:
    machine = recorded["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, {machine['date']}"


def quality_table(path: Path) -> str:
    """Every strategy at an equal budget, the default search against HEFT, exactness, proven gap and ablations."""
    recorded = _read(path)
    if recorded is None:
        return NOT_YET
    compared = recorded["strategies"]
    ranked = sorted(compared["ratios"].items(), key=lambda item: statistics.median(item[1]))
    every = _table(
        ["strategy", "median ratio to the best known", "worst", "seconds"],
        [
            [f"`{name}`", f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}", f"{compared['seconds'][name] / len(ratios):.2f}"]
            for name, ratios in ranked
        ],
    )
    heft = _table(
        ["graph", "operators", "HEFT over found", "found over best known", "HEFT over best known", "HEFT over lower bound"],
        [[str(row[0]), str(row[1]), *(f"{100 * value:.1f} %" for value in row[2:])] for row in recorded["against_heft"]["rows"]],
    )
    ablated = _table(
        ["search with", "median ratio to the best known", "worst"],
        [[name, f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}"] for name, ratios in recorded["ablations"]["ratios"].items()],
    )
    loop = recorded["device_loop"]["rows"]
    looped = _table(
        ["device loop, median over made-up devices", "time over the best baseline measured"],
        [
            ["the model's best, not measured", f"{statistics.median(row[1] for row in loop):.3f}"],
            ["measured, no correction", f"{statistics.median(row[3] for row in loop):.3f}"],
            ["measured, model corrected", f"{statistics.median(row[4] for row in loop):.3f}"],
        ],
    )
    force, gap = recorded["brute_force"], recorded["proven_gap"]["median_gap"]
    said = (
        f"In-model (simulated), {compared['evaluations']} evaluations each. Brute force equalled on {force['equalled']} of {force['of']} "
        f"small graphs; proven gap at 24 operators: median {100 * gap:.0f} %. {_taken(recorded)}."
    )
    return "\n\n".join([every, heft, ablated, looped, said])


def speed_table(path: Path) -> str:
    """Simulated schedules per second, whole searches, cold start."""
    recorded = _read(path)
    if recorded is None:
        return NOT_YET
    rows = recorded["evaluations"]["rows"]
    # Older files do not say what it costs to look at room.
    short = ["random lanes, room short/s", "annealing, room short/s"] if all(len(row) > 7 for row in rows) else []
    rates = _table(
        ["operators", "lanes", "random lanes/s", "in annealing/s", "block level/s", "plain Python/s", *short],
        [[f"{value:,}" for value in (*row[:6], *row[7:])] for row in rows],
    )
    whole = _table(
        ["strategy", "graph", "seconds", "sequential / found", "HEFT / found"],
        [[f"`{row[0]}`", row[1], *(f"{value:.2f}" for value in row[2:])] for row in recorded["large"]["rows"]],
    )
    cold = recorded["cold_start"]
    said = f"Cold start of compiled code {cold['empty_s']:.1f} s, cached {min(cold['cached_s']):.1f} s. " if cold else ""
    return "\n\n".join([rates, whole, f"{said}Seconds are measured, makespans simulated. {_taken(recorded)}."])


def spare_time_table(path: Path) -> str:
    """What time that the device loop leaves is worth in each way to spend it, by kind of device and noise."""
    recorded = _read(path)
    if recorded is None:
        return NOT_YET
    kinds: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for row in recorded["rows"]:
        kinds.setdefault((row["noise"], row["device"]), []).append(row["ways"])
    ways = list(recorded["rows"][0]["ways"])
    table = _table(
        ["simulated device", "noise of a run", "seeds", *ways],
        [
            [name, f"{100 * noise:.1f} %", str(len(found)), *(_over([each[way] for each in found]) for way in ways)]
            for (noise, name), found in kinds.items()
        ],
    )
    said = (
        "Simulated. True time over that of the best baseline measured, median of seeds (least to most), and how many schedules were "
        f"captured. {_taken(recorded)}."
    )
    return "\n\n".join([table, said])


def _over(found: list[dict[str, float]]) -> str:
    over = [each["over_baseline"] for each in found]
    captures = statistics.median(each["captures"] for each in found)
    return f"{statistics.median(over):.3f} ({min(over):.3f} to {max(over):.3f}), {captures:.0f}"
