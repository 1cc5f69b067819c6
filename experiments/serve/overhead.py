"""What a loaded model costs beside its operators: per call over the raw executor, and per operator inside the CPU executor.

    python experiments/serve/overhead.py

writes ``results/<device>/overhead.json``. Raw executor (A), loaded model (B) and the raw executor again (A') are timed in rounds, in
random order within each; B - A is the guard's cost, A' - A the noise it must be read against. Beside a long run that noise is large, so
calls are also divided: what of a call's time was outside of the run in it. The parts of the guard are timed twice: again and again, and
once after each of some runs, as a call finds them, when a large model has taken the caches. The executor's own cost is the time of a plan
whose operators do nothing. ``--smoke`` runs a small model for a few rounds and writes nothing unless told where.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from experiments.serve.common import bundle_bytes, interval, keep, parser_of, tower  # noqa: E402
from experiments.serve.load import build  # noqa: E402

MODELS = ("tower:3", "tower:30", "tower:300", "torchvision:googlenet")
_BLOCK_US = 40_000.0  # a timed block is at least this long: its first call finds the caches as another contestant left them
_PLANS = ((300, 1), (300, 2))


def per_call_us(run: Callable[[], Any], calls: int) -> float:
    began = time.perf_counter_ns()
    for _ in range(calls):
        run()
    return (time.perf_counter_ns() - began) / 1e3 / calls


def interleaved(runs: dict[str, Callable[[], Any]], rounds: int, seed: int) -> dict[str, list[float]]:
    """Microseconds of one call, for every round."""
    rng = random.Random(seed)
    for run in runs.values():
        for _ in range(3):
            run()
    calls = max(1, int(_BLOCK_US / max(per_call_us(next(iter(runs.values())), 3), 0.1)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        order = list(runs)
        rng.shuffle(order)
        for name in order:
            times[name].append(per_call_us(runs[name], calls))
    return times


def after_runs_us(run: Callable[[], Any], stage: Callable[[], Any], rounds: int) -> float:
    """Median microseconds of ``stage`` where ``run`` was what ran before it."""
    times: list[int] = []
    for _ in range(rounds):
        run()
        began = time.perf_counter_ns()
        stage()
        times.append(time.perf_counter_ns() - began)
    return statistics.median(times) / 1e3


class _Timed:
    """A runner, and how long it ran last."""

    def __init__(self, runner: Callable[[Any], Any]) -> None:
        self._runner = runner
        self.took_ns = 0

    def __call__(self, inputs: Any) -> Any:
        began = time.perf_counter_ns()
        outputs = self._runner(inputs)
        self.took_ns = time.perf_counter_ns() - began
        return outputs


def outside_us(calls: Sequence[tuple[Callable[[], Any], Any]], rounds: int) -> list[list[float]]:
    """Microseconds of each call that were outside of its run, about 0.1 of them for reading the clock.

    Args:
        calls: with the prepared schedule that each runs; they take turns.
    """
    found: list[list[float]] = [[] for _ in calls]
    runners = [prepared.runner for _, prepared in calls]
    for (_, prepared), runner in zip(calls, runners, strict=True):
        prepared.runner = _Timed(runner)
    for _ in range(rounds):
        for (call, prepared), times in zip(calls, found, strict=True):
            began = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - began - prepared.runner.took_ns) / 1e3)
    for (_, prepared), runner in zip(calls, runners, strict=True):
        prepared.runner = runner
    return found


def _prepared(loaded: Any) -> Any:
    prepared = loaded._table.slots[0].prepared
    assert prepared is not None
    return prepared


def compare(name: str, lanes: int, rounds: int) -> dict[str, Any]:
    """The guard's cost for one model."""
    from autosched.runtime.foreign_modes import foreign_mode
    from autosched.runtime.load import load
    from autosched.runtime.write_back import normal

    model, args, kwargs = build(name)
    data, operators = bundle_bytes(model, args, kwargs, lanes=lanes)
    loaded = load(data, model, strict=True)
    frozen = load(data, model, strict=True, frozen=True)
    table = loaded._table
    assert table is not None
    found = table.find(loaded._signature, args, kwargs)
    slot, tensors = found.slot, found.tensors
    prepared = _prepared(loaded)
    with torch.no_grad():
        times = interleaved(
            {
                "raw": lambda: prepared.runner(tensors),
                "loaded": lambda: loaded(*args, **kwargs),
                "frozen": lambda: frozen(*args, **kwargs),
                "again": lambda: prepared.runner(tensors),
            },
            rounds,
            seed=0,
        )
        outside, frozen_outside = outside_us(
            [(lambda: loaded(*args, **kwargs), prepared), (lambda: frozen(*args, **kwargs), _prepared(frozen))], 3 * rounds
        )
        outputs = prepared.runner(tensors)
        stages = {
            "mode": lambda: foreign_mode(table.kind),
            "find": lambda: table.find(loaded._signature, args, kwargs),
            "watch": prepared.watch.change,
            "answer": lambda: slot.answer([normal(tensor) for tensor in outputs]),
        }
        stage_us = {stage: statistics.median(per_call_us(run, 200) for _ in range(9)) for stage, run in stages.items()}
        cold_us = {stage: after_runs_us(lambda: prepared.runner(tensors), run, rounds) for stage, run in stages.items()}
    added = [after - before for before, after in zip(times["raw"], times["loaded"], strict=True)]
    vouched = [after - before for before, after in zip(times["raw"], times["frozen"], strict=True)]
    noise = [after - before for before, after in zip(times["raw"], times["again"], strict=True)]
    ratios = [after / before for before, after in zip(times["raw"], times["loaded"], strict=True)]
    return {
        "model": name,
        "operators": operators,
        "lanes": lanes,
        "modules": sum(1 for _ in model.modules()),
        "parameters": sum(1 for _ in model.parameters()) + sum(1 for _ in model.buffers()),
        "rounds": rounds,
        "raw_us": statistics.median(times["raw"]),
        "loaded_us": statistics.median(times["loaded"]),
        "added_us": statistics.median(added),
        "added_ci_us": interval(added),
        "frozen_us": statistics.median(vouched),
        "frozen_ci_us": interval(vouched),
        "aa_us": statistics.median(noise),
        "aa_ci_us": interval(noise),
        "outside_us": statistics.median(outside),
        "outside_ci_us": interval(outside),
        "outside_frozen_us": statistics.median(frozen_outside),
        "outside_frozen_ci_us": interval(frozen_outside),
        "ratio": statistics.median(ratios),
        "ratio_ci": interval(ratios),
        "stages_us": stage_us,
        "stages_after_run_us": cold_us,
    }


def executor(operators: int, lanes: int, rounds: int) -> dict[str, Any]:
    """Microseconds per operator of a plan whose operators do nothing."""
    from autosched.runtime.bundle.format import read_bundle
    from autosched.runtime.instructions import carrying
    from autosched.runtime.kernels import bind, gather_constants, random_inputs
    from autosched.runtime.lane_pool import LanePool
    from autosched.runtime.lanes import LaneExecutor
    from autosched.runtime.plan import make_plan

    model, args = tower(operators)
    data, count = bundle_bytes(model, args, {}, lanes=lanes)
    bundle = read_bundle(data)
    bound = bind(bundle.program, gather_constants(bundle.program, model, bundle.literals))
    plan = make_plan(bundle.program.graph, bundle.schedule)
    idle = dataclasses.replace(bound, kernels=(carrying(_nothing, ()),) * count)
    inputs = random_inputs(bundle.program, 0)
    made = LaneExecutor(idle, plan, LanePool())
    run = made.run
    times = interleaved({"first": lambda: run(inputs), "again": lambda: run(inputs)}, rounds, seed=1)
    each = [item / count for item in times["first"]]
    noise = [(after - before) / count for before, after in zip(times["first"], times["again"], strict=True)]
    return {
        "operators": count,
        "lanes": bundle.schedule.lanes,
        "engine": str(made.engine),
        "waits": sum(len(step.waits) for step in plan.steps),
        "rounds": rounds,
        "per_operator_us": statistics.median(each),
        "per_operator_ci_us": interval(each),
        "aa_us": statistics.median(noise),
        "aa_ci_us": interval(noise),
    }


def _nothing(slots: list[Any]) -> None:
    return None


def main() -> None:
    from autosched.runtime.native.build import build_native

    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--lanes", type=int, default=1)
    arguments = parser.parse_args()
    models, rounds, plans = arguments.models or list(MODELS), arguments.rounds, _PLANS
    if arguments.smoke:
        models, rounds, plans = ["tower:30"], 5, ((30, 1), (30, 2))
    torch.set_num_threads(1)
    # Else it would depend on who ran before whether lanes are threads of Python.
    build_native()
    cases = [compare(name, arguments.lanes, rounds) for name in models]
    for case in cases:
        low, high = case["added_ci_us"]
        print(
            f"{case['model']}: {case['added_us']:.1f} us a call over the raw executor ({low:.1f} to {high:.1f}); A/A {case['aa_us']:+.1f}"
        )
    walks = [executor(operators, lanes, rounds) for operators, lanes in plans]
    for walk in walks:
        print(f"{walk['operators']} operators, {walk['lanes']} lanes: {walk['per_operator_us']:.2f} us per operator")
    keep(arguments, "overhead.json", {"calls": cases, "executor": walks})


if __name__ == "__main__":
    main()
