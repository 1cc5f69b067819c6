"""Write real models' graphs with their recorded costs as problem files, for ``quality.py --recorded`` and ``speed.py``.

    python experiments/search/record.py --device cpu torchvision:googlenet autosched:randwire    seconds a model after `autosched compare`
    python experiments/search/record.py --no-measure --no-rewrite timm:nasnetalarge              graph only; costs are a made-up roofline
    python experiments/search/record.py --smoke                                                  one tiny model, into a temporary folder

Operators and pairs come from the journal of measurements where an earlier ``tune``, ``compare`` or ``collect`` left them; what is missing
is measured now, pairs for at most ``--budget`` seconds. Default folder: ``experiments/results/<device>/problems``, or ``sim`` for costs
that nobody measured.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

import numpy as np

from autosched import zoo
from autosched.capture.export import Captured, capture
from autosched.config import parse_seconds
from autosched.core.costs import CostTable
from autosched.core.progress import Silent
from autosched.core.scratch import Scratch
from autosched.datasets.facts import device_facts
from autosched.device.base import Device
from autosched.device.registry import device_named
from autosched.pipeline.budget import budget_for
from autosched.pipeline.graph_proofs import launch_facts
from autosched.pipeline.measuring import Ledger, cost_table, measure_pairs, measure_solo
from autosched.pipeline.memory import open_journal
from autosched.pipeline.scope import scope_of
from autosched.search.problem import Problem
from autosched.search.problem_file import load_problem, save_problem

HERE = Path(__file__).resolve().parent
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(HERE.parents[1]))

from experiments.devices import results_of  # noqa: E402
from experiments.suite import stem_of  # noqa: E402

# Made-up machine of ``--no-measure``: 4 lanes, and an operator that starts beside others loses in proportion to the work of both.
_GFLOPS, _GB_S, _OVERHEAD_US = 10_000.0, 1_000.0, 3.0


def measured(captured: Captured, device: Device, budget_s: float) -> tuple[Problem, str]:
    """The graph with costs of this device, and their provenance."""
    graph = captured.program.graph
    session = device.open(captured.program, captured.constants, timeout_s=120.0)
    try:
        with open_journal(scope_of(device, session.limits), private=False) as journal:
            ledger = Ledger()
            solo = measure_solo(session, graph, device_facts(device.key), journal, budget_for("quick").solo_rounds, ledger)
            pairs = measure_pairs(session, graph, device_facts(device.key), solo, journal, budget_s, ledger, Silent())
            table = cost_table(session, graph, device.key, solo, pairs, launch_facts(session, graph))
    finally:
        session.close()
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    share = f"{100 * table.measured_pairs:.0f} % of the pairs that can meet measured, the rest predicted"
    return Problem.make(graph, table), f"costs measured on {device.key.name}, {day}; {share}"


def roofline(captured: Captured) -> tuple[Problem, str]:
    """The graph with made-up costs: nothing is measured."""
    graph = captured.program.graph
    rng = np.random.default_rng(0)
    signatures = sorted({operator.signature for operator in graph.operators})
    row = {signature: place for place, signature in enumerate(signatures)}
    by_signature = {operator.signature: operator for operator in graph.operators}
    chosen = [by_signature[signature] for signature in signatures]
    arithmetic_us = np.array([operator.flops / (1e3 * _GFLOPS) for operator in chosen])
    memory_us = np.array([(operator.bytes_read + operator.bytes_written) / (1e3 * _GB_S) for operator in chosen])
    load = np.minimum(1.0, np.maximum(arithmetic_us, memory_us) / _OVERHEAD_US) * rng.uniform(0.5, 1.0, len(chosen))
    pressure = np.outer(load, load)
    kernel = np.array([[row[operator.signature]] for operator in graph.operators], dtype=np.int32)
    table = CostTable(
        (1,), kernel, np.maximum(arithmetic_us, memory_us) + _OVERHEAD_US, 1.0 + 0.3 * pressure, 1.0 + 1.5 * pressure, 0.0, 1.0, 5.0, 4
    )
    return Problem.make(graph, table), "costs made up from FLOPs and bytes, nothing measured"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--budget", default="20s", help="for pairs that are not recorded yet, for each model")
    parser.add_argument("--measure", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rewrite", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    models, budget_s = options.models, parse_seconds(options.budget)
    folder: Path = options.out or (results_of(options.device) if options.measure else HERE.parent / "results" / "sim") / "problems"
    if options.smoke:
        scratch = Scratch()
        models, budget_s, folder = ["autosched:toy"], 1.0, scratch.path
    device = device_named(options.device)
    for name in models:
        subject = zoo.load(name)
        captured = capture(subject.model, subject.args, subject.kwargs, rewrite=options.rewrite, target=device.key.kind)
        problem, provenance = measured(captured, device, budget_s) if options.measure else roofline(captured)
        path = folder / f"{stem_of(name)}.npz"
        save_problem(problem, path, provenance=f"{name}: {provenance}")
        kept = load_problem(path)
        print(f"{path.name}: {kept.problem.count} operators, {path.stat().st_size / 1000:.0f} kB, {kept.provenance}", flush=True)


if __name__ == "__main__":
    main()
