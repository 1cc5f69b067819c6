"""Files that older versions wrote stay readable: one folder of real files for each schema, for ever."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from autosched.core.records import DeviceKey, Failure, SoftwareKey, SoloRecord
from autosched.costmodel.analytic import AnalyticModel
from autosched.costmodel.pair_set import pair_set
from autosched.costmodel.persist import load_model
from autosched.datasets.journal import Journal, Scope
from autosched.datasets.store import Store

FOLDERS = sorted(path for path in Path(__file__).parent.glob("schema-*") if (path / "predictions.json").is_file())


def test_there_is_a_golden_folder() -> None:
    assert FOLDERS


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy, because opening a journal leaves a lock file beside it."""
    shutil.copytree(request.param, tmp_path / "golden")
    return tmp_path / "golden"


def test_an_old_store_opens(golden: Path) -> None:
    pairs = pair_set(Store.open(golden / "store"))
    assert set(pairs.labels.family) == {"alpha", "beta"}
    groups = Store.open(golden / "store").groups()
    assert len(groups) == 8
    assert all(row.record.together_us >= max(row.record.finish_us) and min(row.record.repeats) >= 1 for row in groups)


def test_schedules_of_schema_2_and_later_open(golden: Path) -> None:
    if not list((golden / "store" / "schedules").glob("*.parquet")):
        pytest.skip("schema 1 had no schedules")
    store = Store.open(golden / "store")
    (schedule,), (graph,), (limits,) = store.schedules(), store.graphs(), store.limits()
    assert schedule.graph == graph.key == limits.graph
    assert schedule.schedule.graph_hash == graph.graph.hash
    assert (schedule.record.samples.median_us, schedule.predicted_us, limits.widths) == (9.0, 8.75, (1, 2))


def test_the_prior_is_that_of_today_whoever_wrote_it(golden: Path) -> None:
    """Its constants are code, and become better."""
    pairs = pair_set(Store.open(golden / "store"))
    model = load_model(golden / "model-analytic")
    assert model.name == "analytic"
    np.testing.assert_array_equal(model.predict(pairs.query).slowdown_last, AnalyticModel().predict(pairs.query).slowdown_last)


@pytest.mark.parametrize("name", ["graybox", "xgboost", "torch", "stacked"])
def test_an_old_model_predicts_what_it_predicted(golden: Path, name: str) -> None:
    expected = msgspec.json.decode((golden / "predictions.json").read_bytes(), type=dict[str, list[float]])
    pairs = pair_set(Store.open(golden / "store"))
    model = load_model(golden / f"model-{name}")
    assert model.name == name
    np.testing.assert_allclose(model.predict(pairs.query).slowdown_last, expected[name], rtol=1e-4)


def test_an_old_journal_answers(golden: Path) -> None:
    journal = Journal.open(golden / "journal.jsonl", Scope(DeviceKey("cpu", "golden", (("cores", "2"),)), SoftwareKey(())))
    solo = journal.solo("a", 1)
    assert isinstance(solo, SoloRecord)
    assert solo.samples.median_us == 5.25
    assert isinstance(journal.pair("a", 1, "b", 2), Failure)
