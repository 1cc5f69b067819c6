"""The cost model's error on model families it was not trained on, from a store of runs; with baselines and the noise floor beside.

    python experiments/costmodel/held_out.py STORE -o RESULTS.json [--models ...] [--probes 6] [--seed 0]
    python experiments/costmodel/held_out.py --smoke

``--smoke`` makes a small *simulated* store and says so in everything it writes. Only runs of a real device are quotable.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np

from autosched.costmodel.analytic import AnalyticModel
from autosched.costmodel.baselines import Constant
from autosched.costmodel.crossval import Factory, HeldOut, cross_validate, folds_of
from autosched.costmodel.design import take, take_labels
from autosched.costmodel.graybox import GrayboxModel
from autosched.costmodel.metrics import Metrics, measure
from autosched.costmodel.model import COST_MODELS
from autosched.costmodel.pair_set import PairSet, pair_set
from autosched.costmodel.train import DEFAULT_KINDS, train
from autosched.datasets.splits import Fold, by_operator_family, leave_one_out
from autosched.datasets.store import Store
from autosched.datasets.synthetic import synthetic_store

HEADER = "| model | MAPE % | contended median APE % | contended Spearman | told right % | makespan MAPE % | interval holds % |"


def probed(pairs: PairSet, folds: list[Fold], probes: int, seed: int) -> dict[str, Metrics]:
    """The grey box on held-out families, before and after at most ``probes`` runs of each of their kernels, on the same remaining rows."""
    before, after, labels = [], [], []
    for number, fold in enumerate(folds):
        rng = np.random.default_rng((seed, number))
        model = GrayboxModel()
        model.fit(take(pairs.query, fold.train), take_labels(pairs.labels, fold.train), rng=rng)
        used: dict[int, int] = {}
        chosen = []
        for row in rng.permutation(fold.test).tolist():
            a, b = int(pairs.query.first[row]), int(pairs.query.last[row])
            if used.get(a, 0) < probes and used.get(b, 0) < probes:
                used[a], used[b] = used.get(a, 0) + 1, used.get(b, 0) + 1
                chosen.append(row)
        rest = np.asarray(sorted(set(fold.test.tolist()) - set(chosen)), dtype=np.int64)
        if not len(rest) or not chosen:
            continue
        before.append(model.predict(take(pairs.query, rest)))
        rows = np.asarray(sorted(chosen), dtype=np.int64)
        model.adapt(take(pairs.query, rows), take_labels(pairs.labels, rows))
        after.append(model.predict(take(pairs.query, rest)))
        labels.append(rest)
    if not labels:
        return {}
    truth = take_labels(pairs.labels, np.concatenate(labels))
    names = ("slowdown_first", "slowdown_last", "makespan_ratio", "low", "high")
    result = {}
    for name, parts in (("graybox, unseen kernels", before), (f"graybox, {probes} probes a kernel", after)):
        joined = type(parts[0])(**{part: np.concatenate([getattr(item, part) for item in parts]) for part in names})
        result[name] = measure(truth, joined)
    return result


def other_splits(pairs: PairSet, models: list[str], seed: int) -> dict[str, dict[str, Metrics]]:
    """Errors on kinds of operator that were not trained on and, where the store has several, on other devices."""
    query = pairs.query
    kinds = [(query.kernels[a].kind, query.kernels[b].kind) for a, b in zip(query.first.tolist(), query.last.tolist(), strict=True)]
    splits = {"operator family": by_operator_family(kinds)}
    devices = [query.devices[place].name for place in query.kernel_device[query.first].tolist()]
    if len(set(devices)) > 1:
        # A pair of kernels may be on both sides here: what is asked is another device, not another pair.
        splits["device"] = leave_one_out(devices, list(range(len(devices))))
    factories: dict[str, Factory] = {"constant": Constant, "analytic": AnalyticModel, **{name: COST_MODELS.get(name) for name in models}}
    return {
        split: {name: cross_validate(factory, pairs, folds, seed=seed).metrics() for name, factory in factories.items()}
        for split, folds in splits.items()
        if folds
    }


def row(name: str, metrics: Metrics) -> str:
    values = (
        metrics.mape_pct,
        metrics.contended_median_ape_pct,
        metrics.contended_spearman,
        metrics.contended_accuracy_pct,
        metrics.makespan_mape_pct,
        metrics.coverage_pct,
    )
    return f"| {name} | " + " | ".join("-" if value is None else f"{value:.2f}" for value in values) + " |"


def by_direction(held_out: HeldOut) -> dict[str, float]:
    """Mean absolute log error of the kernels that started first, and of those that started last."""
    pairs = (("first", held_out.prediction.slowdown_first, held_out.labels.slowdown_first),
             ("last", held_out.prediction.slowdown_last, held_out.labels.slowdown_last))  # fmt: skip
    return {name: float(np.abs(np.log(guess / truth)).mean()) for name, guess, truth in pairs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=None)
    parser.add_argument("--models", nargs="*", default=list(DEFAULT_KINDS))
    parser.add_argument("--probes", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.store is None and not options.smoke:
        parser.error("a store of runs is needed (made by 'autosched collect'), or --smoke")
    with tempfile.TemporaryDirectory() as scratch:
        rehearsal = Path(scratch) / "simulated"
        store = Store.open(options.store) if options.store is not None else synthetic_store(rehearsal, kernels=10, pairs=40)
        pairs = pair_set(store)
        training = train(pairs, seed=options.seed, kinds=options.models, report=lambda line: sys.stderr.write(line + "\n"))
        folds_name, folds = folds_of(pairs, np.random.default_rng(options.seed))
        probes = probed(pairs, folds, options.probes, options.seed)
        others = other_splits(pairs, options.models, options.seed)
        prior = cross_validate(AnalyticModel, pairs, folds, seed=options.seed)
        floor = pairs.audit.noise_floor_pct
        result = {
            "label": "SIMULATED rows, not measured" if pairs.simulated else "measured rows",
            "store": {"pairs": len(pairs), "simulated": pairs.simulated, "families": pairs.audit.families, "devices": pairs.audit.devices},
            "noise_floor_pct": None if math.isnan(floor) else floor,
            "held_out_by": folds_name,
            "held_out": training.held_out,
            "decision": training.decision,
            "probes": probes,
            "other_splits": others,
            "analytic_by_direction": by_direction(prior),
            "learning_curve": training.curve,
            "seed": options.seed,
        }
    if options.output is not None:
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    title = f"{result['label']}; held out by {folds_name}; noise floor {json.dumps(result['noise_floor_pct'])} %"
    lines = [title, "", HEADER, "|" + "---|" * 7]
    lines += [row(name, metrics) for name, metrics in {**training.held_out, **probes}.items()]
    for split, table in others.items():
        lines += ["", f"held out by {split}", "", HEADER, "|" + "---|" * 7, *(row(name, metrics) for name, metrics in table.items())]
    lines += ["", f"chosen: {training.decision.chosen} ({training.decision.reason})", ""]
    lines += ["learning curve: model, pairs, mean absolute log error"]
    lines += [f"  {point.model} {point.pairs} {point.metrics.mean_abs_log:.4f}" for point in training.curve]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
