"""Which cost model a job uses, what it says about it, and what it leaves to the next training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from autosched.config import cost_models_dir
from autosched.core.errors import ArtifactCorrupt
from autosched.core.graph import OpGraph
from autosched.core.records import Contamination, DeviceKey, PairRecord, Samples, SoftwareKey, SoloRecord
from autosched.costmodel.gate import GateDecision
from autosched.costmodel.model import COST_MODELS, PairModel
from autosched.costmodel.pair_set import pair_set
from autosched.costmodel.persist import save_model
from autosched.costmodel.table import make_cost_table
from autosched.costmodel.trained import Card, TrainedModel
from autosched.datasets.facts import DeviceFacts
from autosched.datasets.journal import Scope
from autosched.datasets.schema import ScopeRow
from autosched.datasets.store import Store
from autosched.datasets.synthetic import synthetic_store
from autosched.device.base import Limits
from autosched.pipeline.memory import ChosenModel, Measured, choose_model, device_digest, prediction_note, remember_runs
from tests.conformance.programs import branches_program

KEY = DeviceKey("cuda", "a device", (("sm_count", "32"),))
LIMITS = Limits(2, (1,), (0,), True, 1.0, 5.0, 10.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "cache"))


def write_model(folder: Path, scratch: Path, *, kind: str = "xgboost", simulated: int = 0) -> None:
    """A model fitted on simulated runs; what its card claims is up to the test."""
    pairs = pair_set(synthetic_store(scratch, families=("alpha", "beta"), kernels=6, pairs=20))
    model: PairModel = COST_MODELS.get(kind)()
    model.fit(pairs.query, pairs.labels, rng=np.random.default_rng(0))
    decision = GateDecision(kind, "made by a test", "nothing")
    card = Card((KEY.name,), ("cuda",), ("alpha", "beta"), len(pairs), simulated, None, decision, {}, 0)
    save_model(TrainedModel(model, None, card), folder)


def test_without_a_model_the_prior_answers_and_says_so() -> None:
    chosen = choose_model(KEY)
    assert chosen.model is None
    assert chosen.name == "analytic"
    assert "autosched train" in chosen.why


def test_the_model_trained_on_this_machine_is_found(tmp_path: Path) -> None:
    write_model(cost_models_dir() / device_digest(KEY), tmp_path / "runs")
    chosen = choose_model(KEY)
    assert chosen.model is not None
    assert chosen.name == "xgboost"
    assert "this device" in chosen.why
    assert choose_model(dataclasses.replace(KEY, name="another")).model is None
    # Processors of several generations have one name.
    alike = dataclasses.replace(KEY, details=(("vector", "narrow"),))
    assert "of a device of this name" in choose_model(alike, cost_models_dir() / device_digest(KEY)).why


@pytest.mark.parametrize(("kind", "simulated", "words"), [("analytic", 0, "gate"), ("xgboost", 5, "simulated")])
def test_a_model_that_must_not_be_used_is_not(tmp_path: Path, kind: str, simulated: int, words: str) -> None:
    write_model(cost_models_dir() / device_digest(KEY), tmp_path / "runs", kind=kind, simulated=simulated)
    chosen = choose_model(KEY)
    assert chosen.model is None
    assert words in chosen.why


def test_a_model_of_another_kind_of_device_is_not_used(tmp_path: Path) -> None:
    write_model(tmp_path / "model", tmp_path / "runs")
    chosen = choose_model(DeviceKey("cpu", "a processor", ()), tmp_path / "model")
    assert chosen.model is None
    assert "not on cpu" in chosen.why


def test_a_damaged_cached_model_is_passed_over_and_a_named_one_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = cost_models_dir() / device_digest(KEY)
    write_model(folder, tmp_path / "runs")
    (folder / "card.json").write_bytes(b"{")
    assert choose_model(KEY).model is None
    assert "is not used" in caplog.text
    with pytest.raises(ArtifactCorrupt):
        choose_model(KEY, folder)


def samples(time_us: float) -> Samples:
    return Samples(time_us, time_us, time_us, time_us, time_us, 9)


def test_the_note_says_what_share_is_predicted() -> None:
    graph = branches_program(branches=2, depth=1)[0].graph
    solo = [[SoloRecord(operator.signature, 1, samples(10.0), Contamination(0.0))] for operator in graph.operators]
    first, last = graph.operators[0].signature, graph.operators[2].signature
    pair = PairRecord(first, 1, last, 1, 10.0, 10.0, 12.0, 1.1, 1.3, 0.6, 1, 1, 9, Contamination(0.0))
    table = make_cost_table(
        graph, solo, [pair], widths=(1,), launch_gap_us=1.0, cross_lane_us=1.0, fixed_us=0.0, max_lanes=2, device=DeviceFacts("d", "cpu", 2)
    )
    none = prediction_note(ChosenModel(None, "analytic", "why"), graph, table, [])
    some = prediction_note(ChosenModel(None, "analytic", "why"), graph, table, [pair])
    assert "predicts 100%" in none
    assert "predicts 100%" not in some
    assert "(why)" in some


def test_only_undisturbed_runs_of_this_graph_are_left_for_training() -> None:
    graph = branches_program(branches=2, depth=1)[0].graph
    facts = DeviceFacts("a processor", "cpu", 2)
    key, software = DeviceKey("cpu", "a processor", (("cores", "2"),)), SoftwareKey(())
    scope = ScopeRow(Scope(key, software).digest, key, software, facts)
    loads = [0.0, 0.9, 0.0, 0.0, 0.0]
    solo = [[SoloRecord(operator.signature, 1, samples(10.0), Contamination(loads[operator.index]))] for operator in graph.operators]
    names = [graph.operators[0].signature, graph.operators[1].signature]
    good = PairRecord(names[0], 1, names[1], 1, 10.0, 10.0, 12.0, 1.1, 1.3, 0.6, 1, 1, 9, Contamination(0.0))
    pairs = [good, dataclasses.replace(good, last="of another model"), dataclasses.replace(good, first=names[1], last=names[0])]
    pairs[2] = dataclasses.replace(pairs[2], contamination=Contamination(0.9))
    folder = remember_runs(scope, graph, "zoo:net1", LIMITS, Measured(solo, pairs, {}), [])
    assert folder is not None
    store = Store.open(folder)
    assert [row.record for row in store.pairs()] == [good]
    assert {row.kernel.solo_us for row in store.solo()} == {10.0}
    assert all(row.contamination.foreign_load == 0.0 for row in store.solo())
    assert [row.graph for row in store.limits()] == [graph.hash]
    assert remember_runs(scope, graph, "zoo:net1", LIMITS, Measured(solo, pairs, {}), []) == folder
    assert len(Store.open(folder).pairs()) == 1


def test_a_cache_that_cannot_be_written_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "file"))
    graph = OpGraph((), (), (), ())
    key = DeviceKey("cpu", "a processor", ())
    scope = ScopeRow("x", key, SoftwareKey(()), DeviceFacts("a processor", "cpu", 2))
    assert remember_runs(scope, graph, "zoo:net1", LIMITS, Measured([], [], {}), []) is None
    assert "not kept" in caplog.text
