"""How many pairs a new device needs: a model trained on another device, as it is and with runs of the new one, beside one trained here.

    python experiments/costmodel/transfer.py cpu_amd_epyc_avx512_48k_2 cpu_intel_xeon_processor_avx512_48k_2    # both in datasets/data/
    python experiments/costmodel/transfer.py cuda h100 --sizes 0 50 500
    python experiments/costmodel/transfer.py --smoke                                         # two simulated devices; figures mean nothing

Errors on pairs of the second device whose model family neither device's training rows had, so that what is carried over is the
device's part alone. Writes ``results/<second device>/transfer.json``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from autosched.costmodel.analytic import AnalyticModel  # noqa: E402
from autosched.costmodel.design import take, take_labels  # noqa: E402
from autosched.costmodel.metrics import Metrics, measure  # noqa: E402
from autosched.costmodel.model import COST_MODELS, PairModel, Prediction  # noqa: E402
from autosched.costmodel.pair_set import PairSet, pair_set  # noqa: E402
from autosched.costmodel.stacked import StackedModel  # noqa: E402
from autosched.datasets.splits import Fold, leave_one_out  # noqa: E402
from autosched.datasets.store import Store, union  # noqa: E402
from autosched.datasets.synthetic import synthetic_store  # noqa: E402
from experiments.calls import write_json  # noqa: E402
from experiments.costmodel.stores import recorded_store  # noqa: E402
from experiments.devices import RESULTS, commit  # noqa: E402

Rows = NDArray[np.int64]
SIZES = (0, 25, 50, 100, 200, 400, 800)


@dataclass(frozen=True, slots=True)
class Point:
    """Errors with ``pairs`` of the new device's own, all held-out families and draws together."""

    model: str
    pairs: int
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Sides:
    """Rows of a set of pairs by the device that they were measured on."""

    pairs: PairSet
    elsewhere: Rows
    here: Rows


def sides(folder: Path, elsewhere: Path, here: Path) -> Sides:
    """Both stores as one set of pairs, in ``folder``."""
    union([elsewhere, here], folder)
    pairs = pair_set(Store.open(folder))
    scopes = {row.scope: row.facts.name for row in Store.open(here).scopes()}
    names = np.asarray([pairs.query.devices[place].name for place in pairs.query.kernel_device[pairs.query.first].tolist()])
    mine = np.isin(names, sorted(set(scopes.values())))
    if mine.all():
        sys.exit(f"both stores are of {', '.join(sorted(set(scopes.values())))}; expected two devices")
    return Sides(pairs, np.flatnonzero(~mine), np.flatnonzero(mine))


def candidates(given: Sides, fold: Fold, drawn: Rows, kind: str, base: PairModel, seed: int) -> dict[str, PairModel]:
    """Every way to get a model for the new device from ``drawn`` rows of it, those of the other device, or both; fitted."""
    query, labels = given.pairs.query, given.pairs.labels
    found: dict[str, PairModel] = {"analytic": AnalyticModel(), "of the other device": base}
    if not len(drawn):
        return found
    others = np.intersect1d(fold.train, given.elsewhere)
    fitted = {
        "of the other device, residual": (StackedModel(base), drawn),
        "trained here": (COST_MODELS.get(kind)(), drawn),
        "trained on both": (COST_MODELS.get(kind)(), np.sort(np.concatenate([others, drawn]))),
    }
    for name, (model, rows) in fitted.items():
        model.fit(take(query, rows), take_labels(labels, rows), rng=np.random.default_rng(seed))
        found[name] = model
    return found


def curve(given: Sides, kind: str, sizes: Sequence[int], draws: int, seed: int) -> list[Point]:
    """Errors by how many of the new device's own pairs were known."""
    query, labels = given.pairs.query, given.pairs.labels
    folds = [fold for fold in leave_one_out(labels.family, given.pairs.keys) if len(np.intersect1d(fold.test, given.here))]
    answers: dict[tuple[str, int], list[tuple[Rows, Prediction]]] = {}
    for number, fold in enumerate(folds):
        others, own = np.intersect1d(fold.train, given.elsewhere), np.intersect1d(fold.train, given.here)
        test = np.intersect1d(fold.test, given.here)
        base = COST_MODELS.get(kind)()
        base.fit(take(query, others), take_labels(labels, others), rng=np.random.default_rng((seed, number)))
        for size in [size for size in sizes if size <= len(own)]:
            for draw in range(draws if size else 1):
                rng = np.random.default_rng((seed, number, size, draw))
                drawn = np.sort(rng.choice(own, size, replace=False))
                for name, model in candidates(given, fold, drawn, kind, base, seed).items():
                    answers.setdefault((name, size), []).append((test, model.predict(take(query, test))))
        sys.stderr.write(f"{fold.name}: {len(test)} pairs\n")
    return [Point(name, size, joined(given, parts)) for (name, size), parts in answers.items()]


def joined(given: Sides, parts: Sequence[tuple[Rows, Prediction]]) -> Metrics:
    """Errors of all folds and draws as one set of rows."""
    rows = np.concatenate([test for test, _ in parts])
    names = ("slowdown_first", "slowdown_last", "makespan_ratio", "low", "high")
    whole = Prediction(**{name: np.concatenate([getattr(answer, name) for _, answer in parts]) for name in names})
    return measure(take_labels(given.pairs.labels, rows), whole)


def named(place: str) -> Path:
    """A store of ``datasets/data`` by its folder's name, or any by its path."""
    found = recorded_store(place) or Path(place)
    if not (found / "pairs").is_dir():
        sys.exit(f"{place} is no store of runs; expected a folder of datasets/data/, or one that 'autosched collect' wrote")
    return found


def as_text(result: dict[str, Any]) -> str:
    """The points, one line for each size."""
    models = list(dict.fromkeys(point.model for point in result["points"]))
    lines = [f"{result['label']}; {result['elsewhere']} -> {result['here']}; mean absolute log error", "pairs  " + "  ".join(models)]
    for size in sorted({point.pairs for point in result["points"]}):
        of = {point.model: point.metrics for point in result["points"] if point.pairs == size}
        cells = (f"{of[name].mean_abs_log:.4f}" if name in of else "" for name in models)
        lines.append(f"{size:5}  " + "  ".join(f"{text:>{len(name)}}" for name, text in zip(models, cells, strict=True)))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("elsewhere", nargs="?", help="the device whose runs are there already")
    parser.add_argument("here", nargs="?", help="the new one")
    parser.add_argument("--kind", default="xgboost")
    parser.add_argument("--sizes", nargs="*", type=int, default=list(SIZES))
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        if options.smoke:
            options.sizes, options.draws = [0, 10], 1
            made = [synthetic_store(place / name, kernels=8, pairs=30, seed=seed, device=name) for seed, name in enumerate(("a", "b"))]
            elsewhere, here = (store.folder for store in made)
        elif options.elsewhere is None or options.here is None:
            parser.error("name the device whose runs are there, and the new one")
        else:
            elsewhere, here = named(options.elsewhere), named(options.here)
        given = sides(place / "both", elsewhere, here)
        points = curve(given, options.kind, options.sizes, options.draws, options.seed)
    result = {
        "label": "SIMULATED rows, not measured" if given.pairs.simulated else "measured rows",
        "elsewhere": elsewhere.name,
        "here": here.name,
        "pairs": {"elsewhere": len(given.elsewhere), "here": len(given.here)},
        "kind": options.kind,
        "draws": options.draws,
        "seed": options.seed,
        "commit": commit(),
        "points": points,
    }
    out = options.out or (None if options.smoke else RESULTS / here.name)
    if out is not None:
        write_json(out / "transfer.json", msgspec.to_builtins(result))
    sys.stdout.write(as_text(result))


if __name__ == "__main__":
    main()
