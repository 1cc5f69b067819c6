"""The cost model's error on model families it was not trained on, from a store of runs; with baselines and the noise floor beside.

    python experiments/costmodel/held_out.py             # this machine's runs in datasets/data/, into results/<device>/
    python experiments/costmodel/held_out.py STORE --out FOLDER [--models ...] [--probes 6] [--seed 0] [--keep]
    python experiments/costmodel/held_out.py --smoke

Writes ``train.txt`` (what ``docs/retrain.md`` shows, see ``experiments/tables.py``) and ``costmodel.json`` (everything). ``--keep`` puts
the trained model beside the store, where it ships.

``--smoke`` makes a small *simulated* store and says so in everything it writes. Only runs of a real device are quotable.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from autosched.core.records import MAX_SLOWDOWN  # noqa: E402
from autosched.costmodel.analytic import AnalyticModel  # noqa: E402
from autosched.costmodel.baselines import Constant, NoInterference  # noqa: E402
from autosched.costmodel.crossval import Factory, HeldOut, cross_validate, folds_of  # noqa: E402
from autosched.costmodel.design import take, take_labels, take_prediction  # noqa: E402
from autosched.costmodel.graybox import GrayboxModel  # noqa: E402
from autosched.costmodel.metrics import Metrics, measure  # noqa: E402
from autosched.costmodel.model import COST_MODELS  # noqa: E402
from autosched.costmodel.pair_set import PairSet, pair_set  # noqa: E402
from autosched.costmodel.persist import save_model  # noqa: E402
from autosched.costmodel.train import DEFAULT_KINDS, train  # noqa: E402
from autosched.datasets.splits import Fold, by_operator_family, leave_one_out  # noqa: E402
from autosched.datasets.store import Store  # noqa: E402
from experiments.costmodel import stores, wholes  # noqa: E402

HEADER = "| model | MAPE % | contended median APE % | contended Spearman | told right % | makespan MAPE % | 90 % interval holds % |"


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


def not_waiting(pairs: PairSet, folds: list[Fold], kind: str, seed: int) -> dict[str, Metrics]:
    """Errors on held-out families where neither of a pair just waited for the other, which is easily told and most of what is contended."""
    factories: dict[str, Factory] = {"no interference": NoInterference, "constant": Constant, "analytic": AnalyticModel}
    found = {}
    for name, factory in {**factories, kind: COST_MODELS.get(kind)}.items():
        held_out = cross_validate(factory, pairs, folds, seed=seed)
        truth = held_out.labels
        rows = np.flatnonzero(np.maximum(truth.slowdown_first, truth.slowdown_last) < MAX_SLOWDOWN)
        if len(rows):
            found[name] = measure(take_labels(truth, rows), take_prediction(held_out.with_intervals(), rows))
    return found


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


def examine(store: Store, models: list[str], probe_runs: int, seed: int, keep: Path | None) -> dict[str, Any]:
    """Everything that is told of a store."""
    pairs = pair_set(store)
    training = train(pairs, seed=seed, kinds=models, report=lambda line: sys.stderr.write(line + "\n"))
    if keep is not None and not pairs.simulated:
        save_model(training.model, keep)
    folds_name, folds = folds_of(pairs, np.random.default_rng(seed))
    learned = {name: metrics.mean_abs_log for name, metrics in training.held_out.items() if name in models}
    kind = training.decision.chosen
    if kind not in learned:
        kind = min(learned, key=lambda name: learned[name]) if learned else "analytic"
    by_family = wholes.without_each_family(pairs, kind, seed)
    floor = pairs.audit.noise_floor_pct
    return {
        "label": "SIMULATED rows, not measured" if pairs.simulated else "measured rows",
        "store": {"pairs": len(pairs), "simulated": pairs.simulated, "families": pairs.audit.families, "devices": pairs.audit.devices},
        "software": [dict(scope.software.versions) for scope in store.scopes()],
        "noise_floor_pct": None if math.isnan(floor) else floor,
        "held_out_by": folds_name,
        "held_out": training.held_out,
        "decision": training.decision,
        "probes": probed(pairs, folds, probe_runs, seed),
        "not_waiting": not_waiting(pairs, folds, kind, seed),
        "other_splits": other_splits(pairs, models, seed),
        "analytic_by_direction": by_direction(cross_validate(AnalyticModel, pairs, folds, seed=seed)),
        "composition": wholes.composed(pairs, store, by_family, kind),
        "schedules": wholes.scheduled(store, by_family, kind),
        "schedules_by_what_is_known": wholes.ablated(store, by_family, kind),
        "learning_curve": training.curve,
        "seed": seed,
    }


def as_text(result: dict[str, Any]) -> str:
    """The tables, as Markdown."""
    store, floor = result["store"], result["noise_floor_pct"]
    lines = [
        f"{result['label']}; {store['pairs']} pairs of {len(store['families'])} model families on {', '.join(store['devices'])}; "
        f"held out by {result['held_out_by']}; noise floor of repeats {'unknown' if floor is None else f'{floor:.1f} %'}",
        "",
        HEADER,
        "|" + "---|" * 7,
    ]
    lines += [row(name, metrics) for name, metrics in {**result["held_out"], **result["probes"]}.items()]
    tables = {f"held out by {result['held_out_by']}, pairs of which neither waits until the other is done": result["not_waiting"]}
    for title, table in (tables | {f"held out by {split}": table for split, table in result["other_splits"].items()}).items():
        lines += ["", title, "", HEADER, "|" + "---|" * 7, *(row(name, metrics) for name, metrics in table.items())]
    lines += wholes.lines(result["composition"], result["schedules"], result["schedules_by_what_is_known"])
    lines += ["", f"chosen: {result['decision'].chosen} ({result['decision'].reason})", ""]
    lines += ["learning curve: model, pairs, mean absolute log error"]
    lines += [f"  {point.model} {point.pairs} {point.metrics.mean_abs_log:.4f}" for point in result["learning_curve"]]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = stores.parser_of(__doc__, "train.txt and costmodel.json")
    parser.add_argument("--models", nargs="*", default=list(DEFAULT_KINDS))
    parser.add_argument("--probes", type=int, default=6)
    parser.add_argument("--keep", action="store_true", help="save the trained model as STORE/model")
    options = parser.parse_args(arguments)
    with stores.chosen(parser, options) as given:
        keep = given.place / "model" if options.keep and given.place else None
        result = examine(given.store, options.models, options.probes, options.seed, keep)
    text = as_text(result)
    if given.out is not None:
        (given.out / "costmodel.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)))
        (given.out / "train.txt").write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
