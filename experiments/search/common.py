"""What both search experiments share: instances, the machine's description, tables and result files.

Everything these experiments compute is in-model (simulated). No figure here is a measurement of a model on a device.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from autosched.core.schedule import Schedule
from autosched.search import synthetic
from autosched.search.problem import Problem
from autosched.search.problem_file import load_problem
from autosched.search.simulate import makespan_us
from autosched.search.strategy import STRATEGIES, SearchContext

RESULTS = Path(__file__).resolve().parent.parent / "results" / "sim"
RECORDED = Path(__file__).resolve().parent.parent / "results"
LABEL = "in-model (simulated)"


def machine() -> dict[str, Any]:
    """Where and with what a result was computed."""
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "numba", "networkx", "optuna")}
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "system": platform.system(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def write(name: str, body: dict[str, Any], *, smoke: bool) -> None:
    """Write a result; a smoke run never overwrites a real one."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}{'-smoke' if smoke else ''}.json"
    path.write_text(json.dumps({"label": LABEL, "smoke": smoke, "machine": machine(), **body}, indent=1) + "\n")
    print(f"\nwritten: {path.name} ({LABEL}{', smoke: figures mean nothing' if smoke else ''})")


def table(title: str, header: list[str], rows: list[list[object]]) -> None:
    """Print an aligned table."""
    cells = [header, *[[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    print(f"\n{title} [{LABEL}]")
    for row in cells:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    sys.stdout.flush()


def recorded_problems() -> list[Path]:
    """Problem files that ship with the results: ``results/<device>/problems/*.npz``, written by ``record.py``."""
    return sorted(RECORDED.glob("*/problems/*.npz"))


def instances(recorded: list[Path], *, seeds: int, smoke: bool) -> dict[str, Problem]:
    """Recorded problems first, then random ones of the sizes that the design names."""
    found = {f"{path.stem} ({path.parent.parent.name})": load_problem(path).problem for path in recorded}
    count = 40 if smoke else 100
    for seed in range(1 if smoke else seeds):
        found[f"layered-{count}-4lanes-{seed}"] = synthetic.random_problem(seed, count, max_lanes=4)
        found[f"inception-like-{count}-4lanes-{seed}"] = synthetic.random_problem(seed, count, shape="series_parallel", max_lanes=4)
        found[f"wide-{count}-8lanes-{seed}"] = synthetic.random_problem(seed, count, shape="wide", max_lanes=8)
        found[f"cells-{count}-2lanes-2widths-{seed}"] = synthetic.random_problem(seed, count, shape="cells", max_lanes=2, widths=(1, 2))
    return found


def best_of(problem: Problem, schedules: list[Schedule]) -> float:
    """The least predicted makespan, microseconds."""
    return min(makespan_us(problem, schedule) for schedule in schedules)


def run(name: str, problem: Problem, evaluations: int, seed: int = 0) -> tuple[float, float]:
    """Best predicted makespan in microseconds of a registered strategy, and its seconds."""
    context = SearchContext(np.random.default_rng(seed), max_evaluations=evaluations)
    start = time.perf_counter()
    schedules = STRATEGIES.get(name).propose(problem, context)
    return best_of(problem, schedules), time.perf_counter() - start
