"""What to do with time that the device loop leaves: more of its rounds, or hill climbing from where it ends. Everything is simulated.

python experiments/search/spare_time.py            three minutes on two idle cores; writes experiments/results/sim/spare_time.json
python experiments/search/spare_time.py --smoke    seconds; figures mean nothing

Rows that the file has are kept: what was stopped goes on, and to begin anew, remove it.

A device here is a simulator whose truth the model does not know. ``block``: random graphs on a made-up GPU at block level; the model has
perfect measurements of its pairs. ``recorded``: graphs, times and pairs recorded on an H200, with hidden errors: times alone are off by up
to 5 %, every slowdown's excess by a random factor, and every pair has an excess of 10 % on average that the model does not know.
``recorded blocks``: the same graphs on a block-level GPU made of the recorded launches and made-up demands. Every round has a drift of
1 % that all schedules share, and each run a noise of its own.

``loop`` is ``balanced`` without climbing: three rounds, and Optuna's trials. ``more rounds``: nine, whatever they bring; no trials.
Figures are true times over that of the best baseline measured, which nobody on a device sees.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from autosched.core.records import Failure
from autosched.core.schedule import Schedule
from autosched.datasets.store import Store
from autosched.pipeline.replaying import StoreRecording
from autosched.search import leftover, synthetic
from autosched.search.climb import ClimbSettings, climb
from autosched.search.correction import Trace
from autosched.search.device_study import study_on_device
from autosched.search.effort import PROFILES, Effort
from autosched.search.fluid import Simulation
from autosched.search.halving import Ledger, halve
from autosched.search.leftover import BlockKernels
from autosched.search.loop import LoopResult, search_on_device
from autosched.search.portfolio import Proposal
from autosched.search.problem import Floats, Problem
from autosched.search.simulate import simulate
from autosched.search.strategy import SearchContext

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from experiments.search.common import RESULTS, table, write  # noqa: E402

_DRIFT = 0.01
_ROUNDS = 9  # of the longer loop, three times those of ``balanced``
WAYS = ("loop", "climb", "more rounds", "more rounds, climb")
_SMS = 132


@dataclass
class Bench:
    """A simulated device; counts what it is asked for."""

    model: Problem
    run: Callable[[Schedule], Simulation]
    noise: float
    rng: np.random.Generator
    runs: int = 0
    known: dict[Schedule, Simulation] = field(default_factory=dict)
    captured: set[Schedule] = field(default_factory=set)

    def measure(self, schedules: Sequence[Schedule], rounds: int) -> list[list[float] | Failure]:
        drift = _DRIFT * self.rng.standard_normal(rounds)
        self.captured |= set(schedules)
        self.runs += rounds * len(schedules)
        return [[self.truth_us(item) * float(np.exp(a + self.noise * self.rng.standard_normal())) for a in drift] for item in schedules]

    def trace(self, schedules: Sequence[Schedule]) -> list[Trace | Failure]:
        return [Trace(found.start_us, found.end_us) for found in map(self._run, schedules)]

    def truth_us(self, schedule: Schedule) -> float:
        return self._run(schedule).makespan_us

    def _run(self, schedule: Schedule) -> Simulation:
        if schedule not in self.known:
            self.known[schedule] = self.run(schedule)
        return self.known[schedule]


def _block(seed: int, shape: str) -> tuple[Problem, Callable[[Schedule], Simulation]]:
    problem, kernels = synthetic.random_block_problem(seed, 80, shape=shape)
    return problem, lambda schedule: leftover.simulate_compiled(problem, kernels, schedule)


def _recorded(model: str) -> tuple[Problem, StoreRecording]:
    store = Store.open(ROOT / "datasets" / "data" / "h200")
    recording = StoreRecording(store)
    graph = next(row.graph for row in store.graphs() if row.model == model)
    return recording.problem(graph), recording


def _hidden(seed: int, model: str) -> tuple[Problem, Callable[[Schedule], Simulation]]:
    problem, _ = _recorded(model)
    rng, costs = np.random.default_rng(seed), problem.costs
    shape = costs.slowdown_first.shape

    def off(slowdowns: Floats) -> Floats:
        excess = (slowdowns - 1.0) * np.exp(0.7 * rng.standard_normal(shape)) + 0.1 * rng.exponential(size=shape)
        found: Floats = np.maximum(0.5, 1.0 + excess)
        return found

    true = dataclasses.replace(
        costs, solo_us=costs.solo_us * rng.uniform(0.95, 1.05, len(costs.solo_us)), slowdown_first=off(costs.slowdown_first),
        slowdown_last=off(costs.slowdown_last),
    )  # fmt: skip
    truth = Problem.make(problem.graph, true)
    return problem, lambda schedule: simulate(truth, schedule)


def _hidden_blocks(seed: int, model: str) -> tuple[Problem, Callable[[Schedule], Simulation]]:
    problem, recording = _recorded(model)
    rng, count = np.random.default_rng(seed), len(problem.solo_us)
    blocks, capacity = np.ones(count, dtype=np.int32), np.full(count, _SMS, dtype=np.int32)
    busy = rng.uniform(0.1, 0.6, (2, count))
    for operator, row in zip(problem.graph.operators, problem.kernel[:, 0].tolist(), strict=True):
        launch, solo_us = recording.launches[operator.signature], float(problem.solo_us[row])
        blocks[row], capacity[row] = max(1, launch.blocks), _SMS * max(1, launch.blocks_per_sm)
        busy[0, row] += operator.flops / (20e6 * solo_us)
        busy[1, row] += (operator.bytes_read + operator.bytes_written) / (2e6 * solo_us)
    compute, bandwidth = np.minimum(1.0, busy) / np.minimum(blocks, capacity)
    block_us = problem.solo_us / np.ceil(blocks / capacity)
    kernels = BlockKernels(blocks, capacity, block_us, compute, bandwidth, rng.uniform(0.4, 1.0, count), rng.uniform(0.4, 1.0, count))
    return problem, lambda schedule: leftover.simulate_compiled(problem, kernels, schedule)


DEVICES: dict[str, Callable[[int], tuple[Problem, Callable[[Schedule], Simulation]]]] = {
    "block, layered": lambda seed: _block(seed, "layered"),
    "block, cells": lambda seed: _block(seed, "cells"),
    "block, inception-like": lambda seed: _block(seed, "series_parallel"),
    "recorded, googlenet": lambda seed: _hidden(seed, "torchvision:googlenet"),
    "recorded, moe": lambda seed: _hidden(seed, "autosched:moe"),
    "recorded blocks, googlenet": lambda seed: _hidden_blocks(seed, "torchvision:googlenet"),
    "recorded blocks, moe": lambda seed: _hidden_blocks(seed, "autosched:moe"),
}


@dataclass
class Ended:
    """Where the loop ended, and what it may be gone on from."""

    bench: Bench
    found: LoopResult
    best: Proposal
    corrected: Problem

    def again(self) -> tuple[Bench, Ledger]:
        """A device of its own for each way to go on, with the same luck ahead."""
        bench = dataclasses.replace(self.bench, rng=copy.deepcopy(self.bench.rng), captured=set(self.bench.captured))
        return bench, copy.deepcopy(self.found.ledger)


def loop_as_it_is(bench: Bench, seed: int, evaluations: int) -> Ended:
    profile, problem = PROFILES[Effort.BALANCED], bench.model
    context = SearchContext(np.random.default_rng(seed), evaluations)
    found = search_on_device(problem, bench, context, dataclasses.replace(profile.loop(lanes_matter=False), rounds=3))
    corrected = problem.with_costs(found.costs)
    study = study_on_device(
        corrected, bench, context.share(0), found.ledger, incumbent=found.best, lanes_matter=False, trials=profile.trials
    )
    best = found.best
    if study.best is not None and study.best.key != best.key:
        best = halve([best, study.best], bench.measure, found.ledger, first_rounds=8, finalists=2)[0].proposal
    return Ended(bench, found, best, corrected)


@dataclass(frozen=True)
class Way:
    """What one way came to: true microseconds, schedules captured, runs."""

    time_us: float
    captures: int
    runs: int


def _way(bench: Bench, best: Proposal) -> Way:
    return Way(bench.truth_us(best.schedule), len(bench.captured), bench.runs)


def by_climbing(ended: Ended, seed: int, settings: ClimbSettings) -> Way:
    bench, ledger = ended.again()
    context = SearchContext(np.random.default_rng(seed))
    found = climb(ended.corrected, bench, context, ledger, incumbent=ended.best, lanes_matter=False, settings=settings)
    return _way(bench, found.best)


def loop_of(rounds: int, bench: Bench, seed: int, evaluations: int) -> Ended:
    """The loop with so many rounds, from its beginning."""
    settings = dataclasses.replace(PROFILES[Effort.BALANCED].loop(lanes_matter=False), rounds=rounds, idle=rounds)
    found = search_on_device(bench.model, bench, SearchContext(np.random.default_rng(seed), evaluations), settings)
    return Ended(bench, found, found.best, bench.model.with_costs(found.costs))


def one(task: tuple[str, int, float, bool]) -> dict[str, object]:
    """All ways on one device."""
    name, seed, noise, smoke = task
    evaluations = 1_000 if smoke else 20_000
    problem, run = DEVICES[name](seed)
    settings = ClimbSettings(idle=1) if smoke else ClimbSettings()
    ended = loop_as_it_is(Bench(problem, run, noise, np.random.default_rng(seed)), seed, evaluations)
    fresh = Bench(problem, run, noise, np.random.default_rng(seed), known=ended.bench.known)
    longer = loop_of(_ROUNDS, fresh, seed, evaluations)
    baseline = ended.found.baseline
    base_us = ended.bench.truth_us(baseline.schedule) if baseline is not None else float("nan")
    ways = {
        "loop": _way(ended.bench, ended.best),
        "climb": by_climbing(ended, seed, settings),
        "more rounds": _way(longer.bench, longer.best),
        "more rounds, climb": by_climbing(longer, seed, settings),
    }
    rows = {way: dataclasses.asdict(found) | {"over_baseline": found.time_us / base_us} for way, found in ways.items()}
    return {
        "device": name, "seed": seed, "noise": noise, "operators": problem.count, "rounds": len(longer.found.rounds), "ways": rows
    }  # fmt: skip


def show(rows: Sequence[dict[str, object]]) -> None:
    """Medians and ranges over the seeds of each kind of device."""
    lines: list[list[object]] = []
    for noise in sorted({float(str(row["noise"])) for row in rows}):
        for name in DEVICES:
            mine = [row for row in rows if row["device"] == name and row["noise"] == noise]
            if mine:
                cells = [_spread([_of(row, way)["over_baseline"] for row in mine]) for way in WAYS]
                captures = [str(statistics.median(int(_of(row, way)["captures"]) for row in mine)) for way in WAYS]
                lines.append([f"{noise:.1%}", name, len(mine), *cells, "/".join(captures)])
    header = ["noise", "device", "seeds", *WAYS, "captures"]
    table("True time over that of the best baseline measured: median (least to most)", header, lines)


def _of(row: dict[str, object], way: str) -> dict[str, float]:
    ways = row["ways"]
    assert isinstance(ways, dict)
    found: dict[str, float] = ways[way]
    return found


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--seeds", type=int, default=3, help="of each kind of device")
    parser.add_argument("--noise", type=float, nargs="*", default=[0.002, 0.01], help="of each run, as a share")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    names, seeds, noises = (list(DEVICES)[::3], 1, [0.002]) if options.smoke else (list(DEVICES), options.seeds, options.noise)
    path = RESULTS / "spare_time.json"
    rows: list[dict[str, object]] = json.loads(path.read_text())["rows"] if path.exists() and not options.smoke else []
    known = {(row["device"], row["seed"], row["noise"]) for row in rows}
    tasks = [(name, seed, noise, options.smoke) for noise in noises for seed in range(seeds) for name in names]
    begin_s = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for row in pool.imap_unordered(one, [task for task in tasks if task[:3] not in known]):
            rows.append(row)
            rows.sort(key=lambda row: (float(str(row["noise"])), str(row["device"]), int(str(row["seed"]))))
            figures = ", ".join(f"{way} {_of(row, way)['over_baseline']:.4f} ({_of(row, way)['captures']})" for way in WAYS)
            seconds = time.perf_counter() - begin_s
            print(f"{seconds:6.0f} s  {row['device']}, seed {row['seed']}, noise {row['noise']}: {figures}", end="", flush=True)
            write("spare_time", {"rows": rows}, smoke=options.smoke)
    show(rows)


if __name__ == "__main__":
    main()
