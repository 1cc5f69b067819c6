"""What runs the lanes of a plan: threads of Python, threads without the interpreter, or the caller's OpenMP team.

    python experiments/serve/lanes.py [MODEL...]

writes ``results/<device>/lanes.json``. For each model: the operators in order on one lane, in order and as wide as the cores allow, and on
one lane for each core (HEFT with the operators' times alone, measured just before), on either engine, native lanes on threads of their own
and as a team, in interleaved rounds; Python's single lane stands twice, and what the two differ by is the noise. Then the native ones
again: single calls, each after a pause in which all threads but the caller's fall asleep; and while another process computes on one core.
Answers are compared to the bit. ``--smoke`` runs a small model for a few rounds and writes nothing unless told where.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from experiments.serve.common import interval, keep, parser_of  # noqa: E402
from experiments.serve.load import build  # noqa: E402
from experiments.serve.overhead import per_call_us  # noqa: E402

if TYPE_CHECKING:
    from autosched.core.schedule import Schedule
    from autosched.runtime.kernels import BoundProgram
    from autosched.runtime.lanes import LaneExecutor
    from autosched.runtime.widths import WidePrograms

MODELS = ("autosched:lstm", "autosched:randwire", "autosched:moe", "autosched:deepfm", "torchvision:googlenet")
BASE = "python, one lane"
NATIVE_BASE = "native, one lane"
PAUSE_S = 0.02
_BLOCK_US = 20_000.0
# What another process does meanwhile.
_ALWAYS = "while True: pass"
_IN_BURSTS = """
import time
while True:
    begin = time.perf_counter()
    while time.perf_counter() < begin + 0.003:
        pass
    time.sleep(0.097)
"""
_SOLO_RUNS = 15


def _solo_us(bound: BoundProgram, inputs: list[torch.Tensor]) -> np.ndarray:
    """The time of each operator, in order on one lane without the interpreter: the median of some runs."""
    from autosched.core.schedule import sequential
    from autosched.runtime.lanes import LaneExecutor, Trace
    from autosched.runtime.plan import make_plan

    graph = bound.program.graph
    executor = LaneExecutor(bound, make_plan(graph, sequential(graph)))
    runs = []
    for _ in range(_SOLO_RUNS):
        trace = Trace(len(graph))
        executor.run(inputs, trace)
        runs.append(np.subtract(trace.end_ns, trace.start_ns) / 1000.0)
    return np.maximum(np.median(runs, axis=0), 0.01)


def _on_lanes(bound: BoundProgram, solo_us: np.ndarray, lanes: int) -> Schedule:
    from autosched.core.costs import CostTable
    from autosched.search.heuristics.critical_path import CRITICAL_PATH
    from autosched.search.problem import Problem
    from autosched.search.strategy import SearchContext

    count = len(solo_us)
    alone, each = np.ones((count, count)), np.arange(count, dtype=np.int32)[:, None]
    table = CostTable((1,), each, solo_us, alone, alone, 0.2, 3.0, 10.0, lanes)
    return CRITICAL_PATH.propose(Problem.make(bound.program.graph, table), SearchContext(np.random.default_rng(0)))[0]


def contestants(programs: WidePrograms, inputs: list[torch.Tensor], cores: int) -> dict[str, LaneExecutor]:
    """Each plan on each engine, by name."""
    from autosched.core.records import Engine
    from autosched.core.schedule import sequential
    from autosched.runtime.lane_pool import LanePool
    from autosched.runtime.lanes import LaneExecutor
    from autosched.runtime.plan import make_plan

    graph, pool, bound = programs.program.graph, LanePool(), programs.at(1)
    one, wide = make_plan(graph, sequential(graph)), make_plan(graph, sequential(graph, width=cores))
    lanes = make_plan(graph, _on_lanes(bound, _solo_us(bound, inputs), cores))
    return {
        BASE: LaneExecutor(bound, one, pool, Engine.PYTHON),
        f"{BASE} again": LaneExecutor(bound, one, pool, Engine.PYTHON),
        "python, wide": LaneExecutor(programs.for_plan(wide), wide, pool, Engine.PYTHON),
        "python, lanes": LaneExecutor(bound, lanes, pool, Engine.PYTHON),
        NATIVE_BASE: LaneExecutor(bound, one, pool),
        "native, wide": LaneExecutor(programs.for_plan(wide), wide, pool),
        "native, lanes": LaneExecutor(bound, lanes, pool, as_team=False),
        "native, one team": LaneExecutor(bound, lanes, pool),
    }


def measure(name: str, rounds: int) -> dict[str, Any]:
    """All contestants on one model."""
    from autosched.capture.export import capture
    from autosched.runtime.cores import usable_cores
    from autosched.runtime.trees import flatten_inputs
    from autosched.runtime.widths import WidePrograms

    model, args, kwargs = build(name)
    captured = capture(model, args, kwargs, rewrite=True, target="cpu")
    inputs = flatten_inputs(captured.program, args, kwargs)
    programs = WidePrograms(captured.program, captured.constants)
    found = contestants(programs, inputs, usable_cores())
    # At another width the last bits differ, as they do in PyTorch.
    expected = {wide: found["python, wide" if wide else BASE].run(inputs) for wide in (False, True)}
    answers = [(run.run(inputs), expected["wide" in name]) for name, run in found.items()]
    same = all(torch.equal(one, other) for ours, theirs in answers for one, other in zip(ours, theirs, strict=True))
    calls = {name: max(1, int(_BLOCK_US / per_call_us(lambda run=run: run.run(inputs), 2))) for name, run in found.items()}
    times: dict[str, list[float]] = {name: [] for name in found}
    rng = random.Random(0)
    for _ in range(rounds):
        for contestant in rng.sample(list(found), len(found)):
            run = found[contestant]
            run.run(inputs)  # what ran before left its own data in the caches
            times[contestant].append(per_call_us(lambda run=run: run.run(inputs), calls[contestant]))
    return {
        "model": name,
        "operators": len(captured.program.graph),
        "lanes": found["native, lanes"].lanes,
        "one_team": found["native, one team"].one_team,
        "rounds": rounds,
        "bitwise": same,
        "rows": {contestant: _row(found[contestant], values, times[BASE]) for contestant, values in times.items()},
        "after_a_pause": _native_only(found, inputs, rounds, calls=dict.fromkeys(found, 1), pause_s=PAUSE_S),
        "beside_bursts": _beside_a_process(found, inputs, rounds, calls, _IN_BURSTS),
        # Last: a team that was always late is left alone for a while.
        "beside_a_process": _beside_a_process(found, inputs, rounds, calls, _ALWAYS),
    }


def _native_only(
    found: dict[str, LaneExecutor], inputs: list[torch.Tensor], rounds: int, calls: dict[str, int], pause_s: float
) -> dict[str, Any]:
    """Blocks of calls, each after a pause."""
    times: dict[str, list[float]] = {name: [] for name in found if name.startswith("native")}
    rng = random.Random(1)
    for _ in range(rounds):
        for name in rng.sample(list(times), len(times)):
            time.sleep(pause_s)
            times[name].append(per_call_us(lambda run=found[name]: run.run(inputs), calls[name]))
    return {name: _row(found[name], values, times[NATIVE_BASE]) for name, values in times.items()}


def _beside_a_process(
    found: dict[str, LaneExecutor], inputs: list[torch.Tensor], rounds: int, calls: dict[str, int], code: str
) -> dict[str, Any]:
    """As a server on a machine that is not its own."""
    with subprocess.Popen([sys.executable, "-S", "-c", code]) as process:
        try:
            return _native_only(found, inputs, rounds, calls, 0.0)
        finally:
            process.kill()


def _row(run: LaneExecutor, values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    ratios = [before / now for before, now in zip(base, values, strict=True)]
    return {
        "engine": str(run.engine),
        "median_us": statistics.median(values),
        "speedup": statistics.median(ratios),
        "speedup_ci": interval(ratios),
    }


def main() -> None:
    from autosched.runtime.native.build import build_native

    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    models, rounds = arguments.models or list(MODELS), arguments.rounds
    if arguments.smoke:
        models, rounds = ["tower:30"], 3
    if reason := build_native():
        print(f"no native lanes here: {reason}")
    cases = [measure(name, rounds) for name in models]
    for case in cases:
        for name, row in case["rows"].items():
            low, high = row["speedup_ci"]
            print(f"{case['model']}: {name} ({row['engine']}) {row['median_us']:,.0f} us, {row['speedup']:.3f}x ({low:.3f} to {high:.3f})")
        for condition in ("after_a_pause", "beside_a_process", "beside_bursts"):
            for name, row in case[condition].items():
                print(f"{case['model']}: {name}, {condition.replace('_', ' ')}, {row['median_us']:,.0f} us, {row['speedup']:.3f}x")
    keep(arguments, "lanes.json", {"cases": cases})


if __name__ == "__main__":
    main()
