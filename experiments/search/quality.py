"""How good the search is under its own model, and what each part of it is worth. Everything is in-model (simulated).

python experiments/search/quality.py            about ten minutes on two cores; writes experiments/results/sim/quality.json
python experiments/search/quality.py --smoke    seconds; figures mean nothing
python experiments/search/quality.py --recorded googlenet.npz ...   graphs with recorded costs (``record.py``); default: all that ship
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autosched.core.records import Failure
from autosched.core.schedule import Schedule
from autosched.search import exact, leftover, synthetic
from autosched.search.anneal import Annealer, MoveWeights
from autosched.search.bounds import configuration_bound_us, critical_path_bound_us, decomposed_bound_us
from autosched.search.correction import Trace
from autosched.search.leftover import BlockKernels
from autosched.search.loop import LoopSettings, search_on_device
from autosched.search.policies import Decoder, best_policies
from autosched.search.portfolio import Portfolio
from autosched.search.problem import Problem
from autosched.search.simulate import makespan_us
from autosched.search.strategy import STRATEGIES, SearchContext

# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from experiments.search.common import best_of, instances, recorded_problems, run, table, write

_MOST_OPERATORS = 400
_NO_MOVES = MoveWeights(lane=0.0, order=0.0, lane_and_order=0.0, width=0.0, width_run=0.0, wait=0.0, exchange=0.0, tails=0.0)


def brute_force(*, smoke: bool) -> dict[str, object]:
    """Is the optimum found where it can be known? Graphs of 9 operators, 3 lanes, 20,000 evaluations."""
    rows: list[list[object]] = []
    for seed in range(2 if smoke else 5):
        rng = np.random.default_rng(seed)
        count = 7 if smoke else 9
        predecessors = synthetic.layered(rng, count, width=3, edge_share=0.5)
        problem = Problem.from_arrays(predecessors, synthetic.random_costs(rng, count, max_lanes=3))
        solved = exact.brute_force(problem, 3, max_evaluations=100_000_000)
        found, _ = run("portfolio", problem, 20_000)
        heft, _ = run("critical_path", problem, 0)
        optimum = solved.best.makespan_us
        rows.append([seed, solved.evaluations, solved.complete, optimum, found / optimum, heft / optimum, found <= optimum * (1 + 1e-9)])
    table("Brute force", ["seed", "schedules", "complete", "optimum_us", "portfolio", "heft", "equal or better"], rows)
    return {"equalled": sum(bool(row[-1]) for row in rows), "of": len(rows), "rows": rows}


def best_known(problem: Problem, *, smoke: bool) -> float:
    """The best of several long annealing runs from different seeds, microseconds."""
    evaluations = 3_000 if smoke else min(600_000, 60_000_000 // problem.count)
    return min(run("anneal", problem, evaluations, seed)[0] for seed in (101, 102))


def strategies(problems: dict[str, Problem], known: dict[str, float], *, smoke: bool) -> dict[str, object]:
    """Every strategy's ratio to the best known at an equal budget; ``known`` is lowered to what any of them found."""
    evaluations = 1_000 if smoke else 100_000
    seconds: dict[str, float] = dict.fromkeys(STRATEGIES.names(), 0.0)
    makespans: dict[str, list[float]] = {name: [] for name in seconds}
    for label, problem in problems.items():
        for name in seconds:
            found, took = run(name, problem, evaluations)
            makespans[name].append(found)
            known[label] = min(known[label], found)
            seconds[name] += took
    ratios = {name: [found / known[label] for found, label in zip(values, problems, strict=True)] for name, values in makespans.items()}
    rows: list[list[object]] = [
        [name, statistics.median(values), min(values), max(values), seconds[name] / len(values)]
        for name, values in sorted(ratios.items(), key=lambda item: statistics.median(item[1]))
    ]
    title = f"Every strategy at {evaluations} evaluations, ratio to the best known"
    table(title, ["strategy", "median", "best", "worst", "seconds"], rows)
    heft = [heft / found for heft, found in zip(ratios["critical_path"], ratios["portfolio"], strict=True)]
    gap = [max(0.0, value - 1.0) for value in ratios["portfolio"]]
    print(f"  gap of portfolio to the best known: median {statistics.median(gap):.2%}, worst {max(gap):.2%}")
    print(f"  HEFT over portfolio: median {statistics.median(heft) - 1:.1%}, least {min(heft) - 1:.1%}")
    return {
        "evaluations": evaluations,
        "seconds": seconds,
        "ratios": ratios,
        "instances": list(problems),
        "heft_over_portfolio": heft,
    }


def against_heft(problems: dict[str, Problem], known: dict[str, float], *, smoke: bool) -> dict[str, object]:
    """HEFT over the default search, instance by instance and over three seeds; and how much better than HEFT anything could be."""
    evaluations = 1_000 if smoke else 100_000
    rows: list[list[object]] = []
    for label, problem in problems.items():
        heft = run("critical_path", problem, 0)[0]
        found = [run("portfolio", problem, evaluations, seed)[0] for seed in range(1 if smoke else 3)]
        bound = decomposed_bound_us(problem, problem.costs.max_lanes)
        median = statistics.median(found)
        rows.append([label, problem.count, heft / median - 1, median / known[label] - 1, heft / known[label] - 1, heft / bound - 1])
    header = ["graph", "operators", "HEFT over found", "found over best known", "HEFT over best known", "HEFT over lower bound"]
    table(f"The default search at {evaluations} evaluations (median of seeds) against HEFT", header, rows)
    return {"header": header, "rows": rows}


def proven_gap(*, smoke: bool) -> dict[str, object]:
    """How far from the optimum the search can be at most: configuration bound at 24 operators, 4 lanes."""
    rows: list[list[object]] = []
    for seed in range(1 if smoke else 6):
        problem = synthetic.random_problem(seed, 12 if smoke else 24, max_lanes=4)
        found, _ = run("portfolio", problem, 2_000 if smoke else 100_000)
        bound = configuration_bound_us(problem, 4)
        rows.append([seed, found, critical_path_bound_us(problem) / found, bound / found, found / bound - 1.0])
    table("Proven gap", ["seed", "found_us", "critical path / found", "configuration / found", "proven gap"], rows)
    return {"median_gap": statistics.median(float(str(row[4])) for row in rows), "rows": rows}


def ablations(problems: dict[str, Problem], known: dict[str, float], *, smoke: bool) -> dict[str, object]:
    """What is lost without each part: search blind to it, then judge under the full model."""
    evaluations = 1_000 if smoke else 50_000
    lost: dict[str, list[float]] = {}
    for label, problem in problems.items():
        context = SearchContext(np.random.default_rng(0), max_evaluations=evaluations)
        full = Portfolio().propose(problem, context)[0]
        found = {
            "full": makespan_us(problem, full),
            "no pair term": _judged(problem, _with_slowdowns(problem, None), evaluations),
            "no learned model (one mean slowdown)": _judged(problem, _with_slowdowns(problem, "mean"), evaluations),
            "order-averaged pairs": _judged(problem, _with_slowdowns(problem, "averaged"), evaluations),
            "order only (HEFT's lanes)": _partial(problem, dataclasses.replace(_NO_MOVES, order=1.0), evaluations),
            "extra edges only (HEFT's order and lanes)": _partial(problem, dataclasses.replace(_NO_MOVES, wait=1.0), evaluations),
            "random": run("random", problem, evaluations)[0],
        }
        for name, value in found.items():
            lost.setdefault(name, []).append(value / known[label])
    rows: list[list[object]] = [[name, statistics.median(values), max(values)] for name, values in lost.items()]
    table(f"Ablations at {evaluations} evaluations, ratio to the best known", ["search with", "median", "worst"], rows)
    return {"evaluations": evaluations, "ratios": lost}


def _with_slowdowns(problem: Problem, how: str | None) -> Problem:
    costs = problem.costs
    first, last = np.ones_like(costs.slowdown_first), np.ones_like(costs.slowdown_last)
    if how == "mean":
        first *= costs.slowdown_first.mean()
        last *= costs.slowdown_last.mean()
    elif how == "averaged":
        first = last = 0.5 * (costs.slowdown_first + costs.slowdown_last)
    return Problem.make(problem.graph, dataclasses.replace(costs, slowdown_first=first, slowdown_last=last))


def _judged(truth: Problem, believed: Problem, evaluations: int) -> float:
    context = SearchContext(np.random.default_rng(0), max_evaluations=evaluations)
    return makespan_us(truth, Portfolio().propose(believed, context)[0])


def _partial(problem: Problem, moves: MoveWeights, evaluations: int) -> float:
    context = SearchContext(np.random.default_rng(0), max_evaluations=evaluations)
    lanes, widths = context.lanes(problem), context.width_indices(problem)
    schedule = STRATEGIES.get("critical_path").propose(problem, context)[0]
    start = dataclasses.replace(
        best_policies(problem, context, Decoder(problem, lanes, widths))[0][0],
        makespan_us=makespan_us(problem, schedule),
        order=np.array(schedule.order, dtype=np.int32),
        lane=np.array(schedule.lane, dtype=np.int32),
        width_index=problem.width_indices(schedule),
        wait=np.full(problem.count, -1, dtype=np.int32),
    )
    found, _ = Annealer(problem, lanes, widths, moves=moves).run(start, context, "partial")
    return found[0].makespan_us


class SimulatedBench:
    """A device that is the block-level simulator with one per cent of noise."""

    def __init__(self, problem: Problem, kernels: BlockKernels, seed: int) -> None:
        self.problem, self.kernels, self.rng = problem, kernels, np.random.default_rng(seed)

    def measure(self, schedules: Sequence[Schedule], rounds: int) -> list[list[float] | Failure]:
        answers: list[list[float] | Failure] = []
        for schedule in schedules:
            truth = leftover.simulate_compiled(self.problem, self.kernels, schedule).makespan_us
            answers.append([truth * float(factor) for factor in np.exp(0.01 * self.rng.standard_normal(rounds))])
        return answers

    def trace(self, schedules: Sequence[Schedule]) -> list[Trace | Failure]:
        runs = [leftover.simulate_compiled(self.problem, self.kernels, schedule) for schedule in schedules]
        return [Trace(run_.start_us, run_.end_us) for run_ in runs]


def device_loop(*, smoke: bool) -> dict[str, object]:
    """What verification and correction are worth when the device is not what the model says (block-level truth)."""
    count, evaluations = (30, 1_000) if smoke else (80, 30_000)
    rows: list[list[object]] = []
    for seed in range(1 if smoke else 5):
        problem, kernels = synthetic.random_block_problem(seed, count)

        def truth(schedule: Schedule, problem: Problem = problem, kernels: BlockKernels = kernels) -> float:
            return leftover.simulate_compiled(problem, kernels, schedule).makespan_us

        context = SearchContext(np.random.default_rng(seed), max_evaluations=evaluations)
        predicted_best = Portfolio().propose(problem, context)[0]
        results = {}
        for correct in (False, True):
            settings = LoopSettings(lanes_matter=False, rounds=2 if smoke else 4, candidates=32, correct=correct)
            bench = SimulatedBench(problem, kernels, seed)
            budget = SearchContext(np.random.default_rng(seed), max_evaluations=evaluations)
            results[correct] = search_on_device(problem, bench, budget, settings)
        baseline = results[True].baseline
        reference = truth(baseline.schedule) if baseline is not None else float("nan")
        rows.append([
            seed,
            truth(predicted_best) / reference,
            makespan_us(problem, predicted_best) / truth(predicted_best) - 1.0,
            truth(results[False].best.schedule) / reference,
            truth(results[True].best.schedule) / reference,
            results[True].ledger.measured,
        ])  # fmt: skip
    header = ["seed", "model's best, not measured", "its prediction error", "measured, no correction", "measured, corrected", "runs"]
    table("Device loop against a block-level device, ratio to the best baseline measured", header, rows)
    return {"rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--recorded", type=Path, nargs="*", default=None, help="problem files; default all that ship with the results")
    parser.add_argument("--seeds", type=int, default=2, help="random problems of each shape")
    options = parser.parse_args()
    recorded = recorded_problems() if options.recorded is None else options.recorded
    problems = instances([] if options.smoke and options.recorded is None else recorded, seeds=options.seeds, smoke=options.smoke)
    # The largest graphs take a strategy minutes each; ``speed.py`` has them.
    problems = {label: problem for label, problem in problems.items() if problem.count <= _MOST_OPERATORS}
    body: dict[str, object] = {"brute_force": brute_force(smoke=options.smoke)}
    known = {label: best_known(problem, smoke=options.smoke) for label, problem in problems.items()}
    for label, problem in problems.items():
        known[label] = min(known[label], best_of(problem, STRATEGIES.get("portfolio").propose(problem, _budget(options.smoke))))
    body["strategies"] = strategies(problems, known, smoke=options.smoke)
    body["best_known_us"] = known
    body["against_heft"] = against_heft(problems, known, smoke=options.smoke)
    body["proven_gap"] = proven_gap(smoke=options.smoke)
    body["ablations"] = ablations(problems, known, smoke=options.smoke)
    body["device_loop"] = device_loop(smoke=options.smoke)
    write("quality", body, smoke=options.smoke)


def _budget(smoke: bool) -> SearchContext:
    return SearchContext(np.random.default_rng(9), max_evaluations=3_000 if smoke else 600_000)


if __name__ == "__main__":
    main()
