"""P16: what the device's changes of pace come with: the memory that a graph was captured into, the time, or the pause before it.

Comparisons on an H200 found the device in one of two states about ten percent apart, with the multiprocessors' clock at its highest in
both (``experiments/README.md``). Several captures of one schedule, each with memory of its own, are replayed in turn for some seconds, and
what NVML says stands beside each block.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from probe_bench import Answer, Bench, spread

from autosched.core.schedule import sequential
from autosched.runtime.cuda.key import pci_bus_id
from autosched.runtime.cuda.runner import GraphRunner

_CAPTURES, _SECONDS, _REPLAYS = 6, 6.0, 10
_PAUSES_S = (0.0, 0.001, 0.01, 0.1, 1.0)
_PAUSED_ROUNDS = 12


def p16(bench: Bench) -> Answer:
    measurer = bench.program()
    runners = [measurer.capture(sequential(measurer.graph), private=True) for _ in range(2 if bench.smoke else _CAPTURES)]
    graphs = []
    for runner in runners:
        assert isinstance(runner, GraphRunner), runner
        graphs.append(runner._graph)
    tell = (lambda: {}) if bench.smoke else _teller()
    rows = _in_turn(bench, graphs, 0.2 if bench.smoke else _SECONDS, tell)
    paused = _paused(bench, graphs[0], 1 if bench.smoke else _PAUSED_ROUNDS)
    for runner in runners:
        runner.close()
    columns = [[row["us"] for row in rows if row["capture"] == place] for place in range(len(graphs))]
    medians = [median(column) for column in columns]
    # Each capture's own median taken out, what is left is what changes with time.
    left = sorted(row["us"] / medians[row["capture"]] for row in rows)
    low, high = left[len(left) // 20], left[-1 - len(left) // 20]
    idle = {label: round(median(column) / median(paused["0.0"]), 3) for label, column in paused.items()}
    blocks = {name: [row.get(name) for row in rows] for name in rows[0]}
    data = {"blocks": blocks, "captures": [spread(column) for column in columns], "paused_us": paused}
    return (
        f"{len(rows)} blocks of {len(graphs)} captures of one schedule: their medians are {_apart(medians)} % apart; within one, nine "
        f"tenths of the blocks {100.0 * (high / low - 1.0):.1f} %; in its slower and faster half, {_beside(rows, medians)}; after so many "
        f"seconds of pause a block takes {idle} of what it does without"
    ), data


def _in_turn(bench: Bench, graphs: Sequence[Any], seconds: float, tell: Callable[[], dict[str, float]]) -> list[dict[str, Any]]:
    rng, rows = random.Random(1), []
    begin = time.monotonic()
    while (at_s := time.monotonic() - begin) < seconds or not rows:
        for place in rng.sample(range(len(graphs)), len(graphs)):
            taken_us = bench.replay_us(graphs[place], _REPLAYS, 1)[0]
            rows.append({"at_s": round(at_s, 4), "capture": place, "us": round(taken_us, 3), **tell()})
    return rows


def _paused(bench: Bench, graph: Any, rounds: int) -> dict[str, list[float]]:
    """Times of one block, microseconds, by the pause (seconds) before it."""
    found: dict[str, list[float]] = {str(pause_s): [] for pause_s in _PAUSES_S}
    for _ in range(rounds):
        for pause_s in _PAUSES_S:
            bench.replay_us(graph, _REPLAYS, 2)
            time.sleep(pause_s)
            found[str(pause_s)] += bench.replay_us(graph, 1, 1)
    return found


def _apart(values: Sequence[float]) -> float:
    return round(100.0 * (max(values) / min(values) - 1.0), 2)


def _beside(rows: Sequence[dict[str, Any]], medians: Sequence[float]) -> dict[str, list[float]]:
    """Medians of what NVML said beside the slower and the faster half of all blocks."""
    ordered = sorted(rows, key=lambda row: -row["us"] / medians[row["capture"]])
    halves = ordered[: len(ordered) // 2 or 1], ordered[len(ordered) // 2 :]
    names = [name for name in ordered[0] if name not in ("at_s", "capture", "us") and all(name in row for row in rows)]
    return {name: [median(row[name] for row in half) for half in halves] for name in names}


def _teller() -> Callable[[], dict[str, float]]:
    """Clocks, power, temperature and the reasons for slower clocks, now; of each what NVML tells. Nothing without nvidia-ml-py."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id(0))
    except Exception:  # NVML raises errors of its own for every way a machine can lack it
        return dict
    asked: dict[str, Callable[[], float]] = {
        "sm_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "memory_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "video_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_VIDEO),
        "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
        "celsius": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "reasons": lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    }

    def tell() -> dict[str, float]:
        found = {}
        for name, ask in asked.items():
            with contextlib.suppress(Exception):
                found[name] = float(ask())
        return found

    # One that cannot be answered now never is.
    known = tell()
    asked = {name: ask for name, ask in asked.items() if name in known}
    return tell
