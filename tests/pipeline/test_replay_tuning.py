"""Tuning on recorded runs: collected from a real CPU, tuned without one, and labelled as replayed everywhere."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from autosched import pipeline, zoo
from autosched.cli import main
from autosched.config import runs_dir, schedules_dir
from autosched.core.records import Contamination, Source
from autosched.core.variants import Variant, variant_signature
from autosched.datasets.store import Store
from autosched.pipeline.collecting import Aims, Subject, collect
from autosched.pipeline.schedule_errors import schedule_errors
from tests.conformance.caches import own_cache


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "store"
    toy = zoo.load("autosched:toy")
    result = collect(
        [Subject(toy.name, toy.model, toy.args, toy.kwargs)], folder, device="cpu", budget_s=12.0, aims=Aims(4, 2, 3), keep_disturbed=True
    )
    assert result.solo_rows > 0
    assert result.left_out == ()
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path / "cache"))


def test_collecting_keeps_everything_a_replay_needs(recorded: Path) -> None:
    store = Store.open(recorded)
    (graph,) = store.graphs()
    assert all(not operator.source for operator in graph.graph.operators)
    assert {row.graph for row in store.schedules()} == {row.graph for row in store.limits()} == {graph.key}
    assert {"sequential"} <= {row.strategy for row in store.schedules()}
    assert all(row.predictor == "analytic" and row.predicted_us > 0 for row in store.schedules())
    assert {len(row.record.signatures) for row in store.groups()} <= {3, 4}


def test_tuning_on_a_replay_measures_nothing_and_says_so(recorded: Path) -> None:
    toy = zoo.load("autosched:toy")
    tuned = pipeline.tune(toy.model, toy.args, toy.kwargs, device=f"replay:{recorded}", effort="quick", budget_s=4.0, name=toy.name)
    report = tuned.report
    assert report.source is Source.REPLAYED
    assert report.measurements == 0
    assert report.verdict.startswith("Replayed, nothing was measured")
    assert any(note.startswith("replayed, not measured") for note in report.notes)
    # On a busy machine there may be no time left for candidates, which are simulated.
    assert {row.source for row in report.strategies} in ({Source.REPLAYED, Source.SIMULATED}, {Source.REPLAYED})
    sequential = next(row for row in report.strategies if row.name == "sequential")
    told = next(row for row in Store.open(recorded).schedules() if row.strategy == "sequential")
    assert sequential.source is Source.REPLAYED
    assert sequential.measured_us == told.record.samples.median_us
    assert not any(row.name.startswith("eager") for row in report.strategies)
    # Nothing of a replay may be found later by whoever looks for what was measured.
    assert not schedules_dir().exists()
    assert not runs_dir().exists()


def test_the_command_says_replayed(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tune", "autosched:toy", "--device", f"replay:{recorded}", "--effort", "quick", "--budget", "2s"]
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--json"])
    assert stopped.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["source"] == "replayed"
    with pytest.raises(SystemExit):
        main(command)
    printed = capsys.readouterr().out
    assert "; replayed" in printed
    assert "measured us" not in printed


def test_a_tuning_job_leaves_its_runs_for_training() -> None:
    toy = zoo.load("autosched:toy")
    report = pipeline.tune(
        toy.model, toy.args, toy.kwargs, device="cpu", effort="quick", budget_s=1.0, lowering="rewritten", name="autosched:toy"
    ).report
    # The analytic prior, or on a machine like the one whose runs ship, the model trained on those.
    assert any(note.startswith("cost model ") and " predicts " in note for note in report.notes)
    (folder,) = runs_dir().iterdir()
    store = Store.open(folder)
    assert [row.model for row in store.graphs()] == ["autosched:toy"]
    disturbed = report.unstable or any(note.startswith("other processes had") for note in report.notes)
    assert bool(store.schedules()) is not disturbed
    assert all(row.record.source is Source.MEASURED for row in store.schedules())


def test_schedule_errors_are_told_beside_baselines_for_what_nobody_disturbed(recorded: Path, tmp_path: Path) -> None:
    given = Store.open(recorded)

    def with_loads(name: str, *loads: float) -> Store:
        """The recorded runs, the schedules as if others had taken these shares of the cores."""
        store = Store.create(tmp_path / name)
        rows = given.schedules()
        assert len(rows) == len(loads)
        timed = [
            dataclasses.replace(row, record=dataclasses.replace(row.record, contamination=Contamination(load)))
            for row, load in zip(rows, loads, strict=True)
        ]
        store.append([*given.scopes(), *given.graphs(), *given.limits(), *given.solo(), *timed])
        return store

    assert schedule_errors(with_loads("busy", 0.0, 0.0, 1.0), {}) == ()
    found = schedule_errors(with_loads("quiet", 0.0, -1.0, 0.0), {})
    assert {row.model for row in found} == {"analytic", "no interference"}
    assert schedule_errors(with_loads("other", 0.0, 0.0, 0.0), {}, scopes=["another"]) == ()
    for row in found:
        assert row.graphs == 1
        assert row.schedules == 3
        assert np.isfinite([row.mape_pct, row.bias_pct, row.regret_pct]).all()
        assert row.regret_pct >= 0.0


def test_schedules_in_variants_without_costs_are_in_no_table_of_errors(recorded: Path, tmp_path: Path) -> None:
    given, store = Store.open(recorded), Store.create(tmp_path / "variants")
    quiet = [
        dataclasses.replace(row, record=dataclasses.replace(row.record, contamination=Contamination(0.0))) for row in given.schedules()
    ]
    store.append([*given.scopes(), *given.graphs(), *given.limits(), *given.solo(), *quiet])
    assert schedule_errors(store, {}) != ()
    for row in given.solo():
        name = variant_signature(row.kernel.signature, Variant.COMPILED)
        time_us = row.samples.median_us * 0.1
        kernel, samples = (
            dataclasses.replace(row.kernel, signature=name, solo_us=time_us),
            dataclasses.replace(row.samples, median_us=time_us),
        )
        store.append([dataclasses.replace(row, kernel=kernel, samples=samples)])
    assert schedule_errors(store, {}) == ()


def test_a_model_that_is_not_the_recorded_one_is_refused_clearly(recorded: Path) -> None:
    from autosched.core.errors import NoFeasibleCandidate

    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU()).eval()
    with pytest.raises(NoFeasibleCandidate, match="not recorded"):
        pipeline.tune(model, (torch.zeros(1, 7),), device=f"replay:{recorded}", effort="quick", budget_s=1.0)
