"""How fast the search is: evaluations per second, large graphs, IOS, and the cold start of compiled code.

    python experiments/search/speed.py            about two minutes; run it alone on the machine
    python experiments/search/speed.py --smoke    seconds; figures mean nothing

Seconds are measured here; every makespan is in-model (simulated).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from autosched.core.schedule import Schedule
from autosched.search import fluid, leftover, synthetic
from autosched.search.anneal import Annealer
from autosched.search.policies import Candidate, Decoder, Policy
from autosched.search.problem import Ints, Problem
from autosched.search.problem_file import load_problem
from autosched.search.simulate import Evaluator
from autosched.search.strategy import SearchContext

# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from experiments.search.common import recorded_problems, run, table, write

_COLD = (
    "import time; start = time.perf_counter()\n"
    "import numpy as np\n"
    "from autosched.search import synthetic\n"
    "from autosched.search.strategy import STRATEGIES, SearchContext\n"
    "problem = synthetic.random_problem(0, 30)\n"
    "STRATEGIES.get('portfolio').propose(problem, SearchContext(np.random.default_rng(0), max_evaluations=2000))\n"
    "print(time.perf_counter() - start)\n"
)


def evaluations(*, smoke: bool) -> dict[str, object]:
    """Fluid evaluations per second: with random lanes, in annealing, in plain Python, and where room is short; and the block simulator."""
    rows: list[list[object]] = []
    for count, lanes in ((30, 4),) if smoke else ((100, 2), (100, 4), (100, 8), (300, 4), (1000, 4)):
        problem = synthetic.random_problem(1, count, max_lanes=lanes)
        rng = np.random.default_rng(0)
        order, narrow = np.arange(count, dtype=np.int32), np.zeros(count, dtype=np.int32)
        chosen = [rng.integers(0, lanes, size=count).astype(np.int32) for _ in range(200)]
        alone = _rate(partial(_evaluate_all, Evaluator(problem, lanes), order, chosen, narrow), smoke=smoke)
        start = Decoder(problem, lanes, np.array([0], dtype=np.int32)).decode(Policy())
        annealer = Annealer(problem, lanes, np.array([0], dtype=np.int32))
        steps = max(200, 2_000_000 // count // (10 if smoke else 1))
        annealing = _rate(partial(_anneal, annealer, start, steps), smoke=smoke)
        python = _rate(partial(_simulate_in_python, problem, problem.schedule(order, chosen[0])), smoke=smoke)
        blocks, kernels = synthetic.random_block_problem(1, count, max_lanes=lanes)
        block = _rate(partial(_evaluate_all, leftover.BlockEvaluator(blocks, kernels, lanes), order, chosen, narrow), smoke=smoke)
        crowded = _with_room(problem)
        short = _rate(partial(_evaluate_all, Evaluator(crowded, lanes), order, chosen, narrow), smoke=smoke)
        start = Decoder(crowded, lanes, np.array([0], dtype=np.int32)).decode(Policy())
        queueing = _rate(partial(_anneal, Annealer(crowded, lanes, np.array([0], dtype=np.int32)), start, steps), smoke=smoke)
        figures = [round(alone), round(annealing), round(block), round(python), annealing / python, round(short), round(queueing)]
        rows.append([count, lanes, *figures])
    header = ["operators", "lanes", "random lanes/s", "in annealing/s", "block level/s", "plain Python/s", "annealing / Python"]
    header += ["random lanes, room short/s", "annealing, room short/s"]
    table("Simulated schedules per second, one core", header, rows)
    return {"rows": rows}


def _with_room(problem: Problem) -> Problem:
    """The same where kernels take a share of the device as those of ``synthetic.random_block_kernels`` do: three often lack room."""
    room = np.minimum(1.0, np.random.default_rng(0).lognormal(mean=-0.9, sigma=1.0, size=len(problem.solo_us)))
    return Problem.make(problem.graph, dataclasses.replace(problem.costs, room=room))


def _evaluate_all(evaluator: Evaluator | leftover.BlockEvaluator, order: Ints, chosen: list[Ints], narrow: Ints) -> int:
    for lane in chosen:
        evaluator.makespan_us(order, lane, narrow)
    return len(chosen)


def _anneal(annealer: Annealer, start: Candidate, steps: int) -> int:
    return annealer.run(start, SearchContext(np.random.default_rng(0), max_evaluations=steps), "speed")[1]


def _simulate_in_python(problem: Problem, schedule: Schedule) -> int:
    fluid.simulate(problem, schedule)
    return 1


def _rate(work: Callable[[], int], *, smoke: bool) -> float:
    """Median over repeats of units of work per second; ``work()`` returns how many it did."""
    rates = []
    for _ in range(2 if smoke else 5):
        done, start = 0, time.perf_counter()
        while time.perf_counter() - start < (0.02 if smoke else 0.5):
            done += work()
        rates.append(done / (time.perf_counter() - start))
    return statistics.median(rates)


def large(*, smoke: bool) -> dict[str, object]:
    """The whole default search on a NASNet-like graph, and IOS on an Inception-like one."""
    rows: list[list[object]] = []
    budget = 2_000 if smoke else 100_000
    cells = _real("nasnetalarge", smoke) or {
        "made-up cells": synthetic.random_problem(0, 120 if smoke else 1264, shape="cells", max_lanes=4)
    }
    inception = _real("inception_v3", smoke) or {"made-up Inception": _inception_like(40 if smoke else 119)}
    for strategy, problems, evaluations in (("portfolio", cells, budget), ("ios", inception, 10**9)):
        for label, problem in problems.items():
            sequential, _ = run("sequential", problem, 0)
            heft, _ = run("critical_path", problem, 0)
            found, seconds = run(strategy, problem, evaluations)
            rows.append([strategy, f"{label}, {problem.count} operators", seconds, sequential / found, heft / found])
    table("Whole searches", ["strategy", "graph", "seconds", "sequential / found", "HEFT / found"], rows)
    return {"rows": rows}


def _real(name: str, smoke: bool) -> dict[str, Problem]:
    """Graphs of the model that ship as problem files, by label; none in a smoke run."""
    chosen = [path for path in recorded_problems() if name in path.stem and not smoke]
    return {f"{path.stem} ({path.parent.parent.name})": load_problem(path).problem for path in chosen}


def _inception_like(count: int) -> Problem:
    rng = np.random.default_rng(0)
    predecessors = synthetic.series_parallel(rng, count, branches=6)
    return Problem.from_arrays(predecessors, synthetic.random_costs(rng, count, max_lanes=6))


def cold_start(*, smoke: bool) -> dict[str, object]:
    """Seconds of a new process until the default search has run: with an empty cache of compiled code, then with a full one."""
    if smoke:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        times = [
            float(subprocess.run([sys.executable, "-P", "-c", _COLD], env=environment, check=True, capture_output=True, text=True).stdout)
            for _ in range(3)
        ]
    table("Cold start, seconds", ["empty cache", "cached", "cached again"], [list(times)])
    return {"empty_s": times[0], "cached_s": times[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="seconds; figures mean nothing")
    options = parser.parse_args()
    body: dict[str, object] = {
        "evaluations": evaluations(smoke=options.smoke),
        "large": large(smoke=options.smoke),
        "cold_start": cold_start(smoke=options.smoke),
    }
    write("speed", body, smoke=options.smoke)


if __name__ == "__main__":
    main()
