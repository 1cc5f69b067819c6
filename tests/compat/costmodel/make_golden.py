"""Write the golden files of today's schemas; run once when a schema is raised, never to make a failing test pass.

    python -m tests.compat.costmodel.make_golden tests/compat/costmodel/schema-2

Everything in them is simulated.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec
import numpy as np

from autosched.core.records import Contamination, DeviceKey, Failure, FailureKind, Samples, SoftwareKey, SoloRecord
from autosched.costmodel.conformal import Conformal
from autosched.costmodel.gate import GateDecision
from autosched.costmodel.model import COST_MODELS
from autosched.costmodel.pair_set import pair_set
from autosched.costmodel.persist import save_model
from autosched.costmodel.trained import Card, TrainedModel
from autosched.datasets.journal import Journal, Scope
from autosched.datasets.synthetic import synthetic_store
from tests.conformance.store_suite import schedule_rows


def main(folder: Path) -> None:
    shutil.rmtree(folder / "store", ignore_errors=True)
    store = synthetic_store(folder / "store", families=("alpha", "beta"), kernels=5, pairs=30, seed=42)
    store.append(schedule_rows("ab", Contamination(0.01, 2400.0)))
    pairs = pair_set(store)
    card = Card(
        ("synthetic-a",), ("cuda",), ("alpha", "beta"), len(pairs), len(pairs), None, GateDecision("x", "a golden file", "nothing"), {}, 0
    )
    expected = {}
    for name in ("analytic", "graybox", "xgboost", "torch", "stacked"):
        model = COST_MODELS.get(name)()
        model.fit(pairs.query, pairs.labels, rng=np.random.default_rng(0))
        trained = TrainedModel(model, Conformal(((-0.1,) * 3,) * 2, ((0.2,) * 3,) * 2, 60), card)
        save_model(trained, folder / f"model-{name}")
        expected[name] = trained.predict(pairs.query).slowdown_last.tolist()
    (folder / "predictions.json").write_bytes(msgspec.json.encode(expected))
    (folder / "journal.jsonl").unlink(missing_ok=True)
    with Journal.open(folder / "journal.jsonl", Scope(DeviceKey("cpu", "golden", (("cores", "2"),)), SoftwareKey(()))) as journal:
        journal.add(SoloRecord("a", 1, Samples(5.25, 5.0, 5.5, 6.0, 4.75, 9), Contamination(0.5, 2400.0)))
        journal.add_pair("a", 1, "b", 2, Failure(FailureKind.TIMEOUT, "golden"))
    (folder / "journal.jsonl.lock").unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
