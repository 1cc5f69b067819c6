"""Training: the gate, intervals, few rows, one family, another device; and models on disk."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import msgspec
import numpy as np
import pytest

from autosched.core.errors import ArtifactCorrupt, IncompatibleArtifact, UsageError
from autosched.core.records import MAX_SLOWDOWN, Contamination, Engine, SoftwareKey, Source
from autosched.core.variants import Variant, variant_signature
from autosched.costmodel.analytic import AnalyticModel
from autosched.costmodel.baselines import Constant, NoInterference
from autosched.costmodel.conformal import calibrate
from autosched.costmodel.crossval import HeldOut, cross_validate, folds_of
from autosched.costmodel.design import take, take_labels, take_prediction
from autosched.costmodel.evaluate import composition, evaluate
from autosched.costmodel.features import FEATURE_SET
from autosched.costmodel.gate import decide
from autosched.costmodel.graybox import GrayboxModel
from autosched.costmodel.metrics import measure
from autosched.costmodel.model import COST_MODELS, PairLabels, PairQuery, Prediction, point_prediction
from autosched.costmodel.pair_set import PairSet, pair_set
from autosched.costmodel.persist import check_replaceable, load_model, read_card, save_model
from autosched.costmodel.plots import write_plots
from autosched.costmodel.train import Training, train
from autosched.costmodel.trained import TrainedModel
from autosched.datasets.audit import audit
from autosched.datasets.facts import DeviceFacts, KernelFacts
from autosched.datasets.schema import Row
from autosched.datasets.store import Store
from autosched.datasets.synthetic import synthetic_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return synthetic_store(tmp_path_factory.mktemp("store"), families=("alpha", "beta", "gamma"), kernels=10, pairs=60)


@pytest.fixture(scope="module")
def pairs(store: Store) -> PairSet:
    return pair_set(store)


@pytest.fixture(scope="module")
def training(pairs: PairSet) -> Training:
    return train(pairs, seed=0, kinds=("xgboost",))


def some_of(pairs: PairSet, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> PairSet:
    keys = tuple(pairs.keys[row] for row in rows.tolist())
    return dataclasses.replace(pairs, query=take(pairs.query, rows), labels=take_labels(pairs.labels, rows), keys=keys, simulated=len(rows))


def test_the_baselines_always_stand_beside(training: Training) -> None:
    assert {"no interference", "constant", "analytic", "xgboost"} == set(training.held_out)
    assert training.model.card.simulated == training.model.card.pairs
    assert "simulated" in training.model.card.markdown()
    assert training.curve[-1].pairs > training.curve[0].pairs


def test_its_own_intervals_hold_roughly_what_they_promise(training: Training, pairs: PairSet) -> None:
    answer = training.model.predict(pairs.query)
    truth = np.stack([pairs.labels.slowdown_first, pairs.labels.slowdown_last], axis=1)
    assert ((truth >= answer.low) & (truth <= answer.high)).mean() > 0.8
    assert (answer.low < answer.high).all()
    coverage = training.held_out["xgboost"].coverage_pct
    assert coverage is not None
    assert 75.0 < coverage <= 100.0


def test_no_pair_of_kernels_is_on_both_sides(pairs: PairSet) -> None:
    _, folds = folds_of(pairs, np.random.default_rng(0))
    for fold in folds:
        train_keys = {pairs.keys[row] for row in fold.train.tolist()}
        test_keys = {pairs.keys[row] for row in fold.test.tolist()}
        assert not train_keys & test_keys


def test_variants_of_an_operator_are_on_one_side(store: Store, tmp_path: Path) -> None:
    rows: list[Row] = [*store.scopes(), *store.solo(), *store.pairs()]
    for solo in store.solo():
        kernel = dataclasses.replace(solo.kernel, signature=variant_signature(solo.kernel.signature, Variant.COMPILED))
        rows.append(dataclasses.replace(solo, kernel=kernel))
    for pair in store.pairs():
        first = variant_signature(pair.record.first, Variant.COMPILED)
        rows.append(dataclasses.replace(pair, record=dataclasses.replace(pair.record, first=first)))
    both = Store.create(tmp_path)
    both.append(rows)
    made = pair_set(both)
    names = {kernel for key in pair_set(store).keys for kernel in key}
    assert len(made) == 2 * len(store.pairs())
    assert {kernel for key in made.keys for kernel in key} == names


def test_too_few_rows_leave_the_prior_and_say_so(pairs: PairSet) -> None:
    rows = np.arange(12)
    small = some_of(pairs, rows)
    result = train(small, seed=0)
    assert result.model.name == "analytic"
    assert "only 12" in result.decision.reason
    assert result.model.predict(small.query).slowdown_last.max() > 1.0


class Raising(AnalyticModel):
    def predict(self, query: PairQuery) -> Prediction:
        raise ZeroDivisionError("by hand")


class BelowOne(AnalyticModel):
    def predict(self, query: PairQuery) -> Prediction:
        halves = np.full(len(query), 0.5)
        return dataclasses.replace(super().predict(query), slowdown_last=halves)


class NoNumber(AnalyticModel):
    def predict(self, query: PairQuery) -> Prediction:
        return dataclasses.replace(super().predict(query), slowdown_first=np.full(len(query), np.nan))


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        (Raising, "'acme' cannot be fitted and asked: ZeroDivisionError: by hand"),
        (BelowOne, "'acme' answers .* below 1"),
        (NoNumber, "'acme' answers .* not finite"),
    ],
)
def test_a_model_of_another_package_that_fails_is_named(
    plugin: type[AnalyticModel], said: str, pairs: PairSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = COST_MODELS.get
    monkeypatch.setattr(COST_MODELS, "get", lambda name: plugin if name == "acme" else get(name))
    monkeypatch.setattr(COST_MODELS, "plugged", lambda: ["acme"])
    with pytest.raises(UsageError, match=said):
        train(pairs, seed=0, kinds=("acme",), curve=False)


def test_one_family_is_held_out_by_kernel_with_a_warning(pairs: PairSet, caplog: pytest.LogCaptureFixture) -> None:
    rows = np.flatnonzero(np.asarray(pairs.labels.family) == "alpha")
    one = some_of(pairs, rows)
    with caplog.at_level(logging.WARNING):
        result = train(one, seed=0, kinds=("xgboost",), curve=False)
    assert result.decision.folds == "kernel"
    assert "one model family (alpha)" in caplog.text


def test_runs_of_several_devices_are_judged_together_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def runs(*devices: str) -> PairSet:
        folder = tmp_path / "-".join(devices)
        for device in devices:
            store = synthetic_store(folder, families=("alpha", "beta"), kernels=6, pairs=10, device=device)
        return pair_set(store)

    with caplog.at_level(logging.WARNING):
        train(runs("synthetic-a"), seed=0, kinds=("graybox",), curve=False)
        assert "several devices" not in caplog.text
        train(runs("synthetic-a", "synthetic-b"), seed=0, kinds=("graybox",), curve=False)
    assert caplog.text.count("the runs are of several devices (synthetic-") == 1


def test_families_of_the_same_operators_are_no_test_of_each_other(pairs: PairSet, caplog: pytest.LogCaptureFixture) -> None:
    one = some_of(pairs, np.repeat(np.flatnonzero(np.asarray(pairs.labels.family) == "alpha"), 2))
    twice = dataclasses.replace(one, labels=dataclasses.replace(one.labels, family=("alpha", "copy") * (len(one) // 2)))
    with caplog.at_level(logging.WARNING):
        result = train(twice, seed=0, kinds=(), curve=False)
    assert result.decision.folds == "kernel"
    assert "too many operators in common to hold one out (alpha, copy)" in caplog.text
    assert "one model family" not in caplog.text


def test_families_of_few_pairs_are_named_because_they_count_as_much_as_the_others(pairs: PairSet, caplog: pytest.LogCaptureFixture) -> None:
    families = np.asarray(pairs.labels.family)
    rows = np.concatenate([np.flatnonzero(families != "beta"), np.flatnonzero(families == "beta")[:7]])
    with caplog.at_level(logging.WARNING):
        train(some_of(pairs, rows), seed=0, kinds=(), curve=False)
        assert "fewer than 20 pairs: beta (7); collect more of them" in caplog.text
        caplog.clear()
        train(pairs, seed=0, kinds=(), curve=False)
    assert "fewer than" not in caplog.text


def noise_only(pairs: PairSet) -> PairSet:
    rng = np.random.default_rng(5)
    count = len(pairs)
    first, last = np.exp(rng.normal(0.1, 0.1, (2, count)))
    labels = dataclasses.replace(pairs.labels, slowdown_first=first, slowdown_last=last)
    return dataclasses.replace(pairs, labels=labels)


def test_the_gate_refuses_a_model_that_learned_noise(pairs: PairSet) -> None:
    result = train(noise_only(pairs), seed=0, kinds=("xgboost",), curve=False)
    assert result.model.name == "analytic"
    assert "no learned model is good enough" in result.decision.reason


def test_the_gate_wants_half_of_the_families_not_only_the_mean() -> None:
    truth = np.full(90, 2.0)
    labels = PairLabels(truth, truth, truth, tuple("abc"[row // 30] for row in range(90)), truth, truth, truth)
    kernels = (KernelFacts("x", 1, "aten::relu", 1, 1, 1, 1, 1.0), KernelFacts("y", 1, "aten::relu", 1, 1, 1, 1, 1.0))
    query = PairQuery(
        kernels, (DeviceFacts("d", "cpu", 2),), np.zeros(2, dtype=np.int64), np.zeros(90, dtype=np.int64), np.ones(90, dtype=np.int64)
    )

    def held(*guesses: float) -> HeldOut:
        values = np.repeat(guesses, 30)
        return HeldOut(np.arange(90), labels.family, point_prediction(query, values, values), labels)

    rivals = {"analytic": held(2.4, 2.4, 6.0), "constant": held(2.5, 2.5, 2.5)}
    refused = decide({**rivals, "lucky": held(2.6, 2.6, 2.0)}, "model family")
    assert refused.chosen == "analytic"
    # Not that it was worse on the mean, which the table beside would belie.
    assert "lucky is the nearest, but it is better than analytic on 1 of 3 only" in refused.reason
    assert "its mean error is not 2% below that of constant" in decide({**rivals, "poor": held(3.0, 3.0, 3.0)}, "model family").reason
    assert decide({**rivals, "good": held(2.1, 2.1, 2.2)}, "model family").chosen == "good"
    # Where one that lacks something errs less, its number would belie the choice by itself.
    both = decide({**rivals, "lucky": held(2.45, 2.45, 2.0), "good": held(2.3, 2.3, 2.3)}, "model family")
    assert both.chosen == "good"
    assert both.reason.endswith("; lucky errs less, but it is better than analytic on 1 of 3 only")


def test_predicting_no_interference_cannot_look_good(pairs: PairSet) -> None:
    nothing = measure(pairs.labels, NoInterference().predict(pairs.query))
    constant = Constant()
    constant.fit(pairs.query, pairs.labels, rng=np.random.default_rng(0))
    fixed = measure(pairs.labels, constant.predict(pairs.query))
    assert nothing.contended_median_ape_pct is not None
    assert nothing.contended_median_ape_pct > 30.0
    assert nothing.contended_spearman is None
    assert fixed.mean_abs_log <= nothing.mean_abs_log


def test_intervals_made_on_one_half_hold_on_the_other(pairs: PairSet) -> None:
    name, folds = folds_of(pairs, np.random.default_rng(0))
    assert name == "model family"
    held_out = cross_validate(NoInterference, pairs, folds, seed=0)
    rows = np.random.default_rng(0).permutation(len(held_out.rows))
    one, two = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    table = calibrate(take_prediction(held_out.prediction, one), take_labels(held_out.labels, one))
    answer = table.apply(take_prediction(held_out.prediction, two))
    truth = take_labels(held_out.labels, two)
    inside = (truth.slowdown_last >= answer.low[:, 1]) & (truth.slowdown_last <= answer.high[:, 1])
    assert inside.mean() > 0.8


def test_intervals_of_a_fold_owe_nothing_to_its_own_pairs_in_another_one(pairs: PairSet) -> None:
    one = dataclasses.replace(pairs, labels=dataclasses.replace(pairs.labels, family=("only",) * len(pairs)))
    _, folds = folds_of(one, np.random.default_rng(0))
    held_out = cross_validate(NoInterference, one, folds, seed=0)
    mine = np.asarray(held_out.group) == folds[0].name
    twice = ~mine & np.isin(held_out.rows, held_out.rows[mine])
    assert twice.any()
    wild = dataclasses.replace(held_out.labels, slowdown_last=np.where(twice, 20.0, held_out.labels.slowdown_last))
    before, after = held_out.with_intervals(), dataclasses.replace(held_out, labels=wild).with_intervals()
    assert np.array_equal(before.high[mine], after.high[mine])
    assert not np.array_equal(before.high[~mine], after.high[~mine])


def test_retraining_starts_from_another_devices_model(training: Training, tmp_path: Path) -> None:
    elsewhere = pair_set(synthetic_store(tmp_path, families=("delta", "epsilon"), kernels=10, pairs=50, seed=9, device="synthetic-b"))
    result = train(elsewhere, seed=0, kinds=(), start=training.model, curve=False)
    assert {"start", "start+residual"} <= set(result.held_out)
    save_model(result.model, tmp_path / "model")
    again = load_model(tmp_path / "model")
    np.testing.assert_array_equal(again.predict(elsewhere.query).slowdown_last, result.model.predict(elsewhere.query).slowdown_last)


def test_a_start_model_is_not_judged_on_what_it_was_trained_on(training: Training, pairs: PairSet, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"{len(pairs)} of {len(pairs)} pairs .* without --from"):
        train(pairs, seed=0, kinds=(), start=training.model, curve=False)
    few = some_of(pairs, np.arange(12))
    with pytest.raises(UsageError, match="12 of 12 pairs"):
        train(few, seed=0, start=training.model)
    # The same device, and a family that is new beside those that are not.
    more = pair_set(synthetic_store(tmp_path / "more", families=("alpha", "omega"), kernels=10, pairs=60, seed=3))
    assert more.origins.keys() == pairs.origins.keys()
    result = train(more, seed=0, kinds=("xgboost",), start=training.model, curve=False)
    new = sum(family == "omega" for family in more.labels.family)
    assert {metrics.rows for metrics in result.held_out.values()} == {2 * new}


def test_the_card_of_a_model_begun_elsewhere_names_all_that_it_has_seen(training: Training, tmp_path: Path) -> None:
    elsewhere = pair_set(synthetic_store(tmp_path, families=("alpha", "delta"), kernels=10, pairs=50, seed=9, device="synthetic-b"))
    assert elsewhere.origins.keys().isdisjoint(training.model.card.origins)
    result = train(elsewhere, seed=0, kinds=(), start=training.model, curve=False)
    assert result.decision.chosen in ("start", "start+residual")
    card = result.model.card
    assert card.families == ("alpha", "beta", "delta", "gamma")
    assert card.devices == ("synthetic-a", "synthetic-b")
    assert card.origins == {**training.model.card.origins, **elsewhere.origins}
    assert "it had seen alpha on another device" in card.decision.reason
    with pytest.raises(UsageError, match="without --from"):
        train(elsewhere, seed=0, kinds=(), start=result.model, curve=False)


def test_too_few_pairs_leave_a_start_model_and_what_it_says_of_itself_as_they_are(
    training: Training, pairs: PairSet, tmp_path: Path
) -> None:
    inner = GrayboxModel()
    inner.fit(pairs.query, pairs.labels, rng=np.random.default_rng(0))
    start = TrainedModel(inner, training.model.intervals, training.model.card)
    few = pair_set(synthetic_store(tmp_path, families=("delta",), kernels=10, pairs=30, seed=9, device="synthetic-b"))
    answer = inner.predict(few.query)
    labels = dataclasses.replace(few.labels, slowdown_first=answer.slowdown_first, slowdown_last=answer.slowdown_last)
    result = train(dataclasses.replace(few, labels=labels), seed=0, kinds=(), start=start)
    assert result.decision.chosen == "start"
    card = result.model.card
    assert result.model.inner is inner
    assert result.model.intervals == start.intervals is not None
    assert f"only {len(few)} measured pairs" in card.decision.reason
    assert card.decision.folds == start.card.decision.folds == "model family"
    assert msgspec.structs.replace(card, decision=start.card.decision) == start.card


def test_a_start_model_that_does_not_say_of_which_very_device_it_is_competes_with_a_warning(
    training: Training, pairs: PairSet, caplog: pytest.LogCaptureFixture
) -> None:
    card = msgspec.structs.replace(training.model.card, origins={})
    old = TrainedModel(training.model.inner, training.model.intervals, card)
    with caplog.at_level(logging.WARNING):
        train(pairs, seed=0, kinds=(), start=old, curve=False)
    assert "if it was this very device, its errors are too low" in caplog.text
    assert "alpha, beta, gamma" in caplog.text


def test_a_start_model_of_another_kind_of_device_is_refused(training: Training, pairs: PairSet) -> None:
    devices = tuple(DeviceFacts(device.name, "cpu", device.units) for device in pairs.query.devices)
    query = PairQuery(pairs.query.kernels, devices, pairs.query.kernel_device, pairs.query.first, pairs.query.last)
    with pytest.raises(UsageError, match="without --from"):
        train(dataclasses.replace(pairs, query=query), seed=0, kinds=(), start=training.model)


def test_a_kind_of_device_it_never_saw_is_answered_by_the_prior_and_said(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    kernels = (KernelFacts("x", 2, "aten::relu", 1, 1, 1, 1, 1.0), KernelFacts("y", 2, "aten::relu", 1, 1, 1, 1, 1.0))
    query = PairQuery(kernels, (DeviceFacts("d", "cpu", 2),), np.zeros(2, dtype=np.int64), np.array([0]), np.array([1]))
    with caplog.at_level(logging.WARNING):
        answer = training.model.predict(query)
        training.model.predict(query)
    assert answer.slowdown_first[0] == pytest.approx(1.03)
    assert answer.slowdown_last[0] == MAX_SLOWDOWN
    assert len([record for record in caplog.records if "trained on cuda, not on cpu" in record.getMessage()]) == 1


def test_evaluation_has_every_table_and_is_json(training: Training, pairs: PairSet, store: Store) -> None:
    report = evaluate(training.model, pairs, store, seed=0)
    assert {"analytic", "constant", "no interference", training.model.name} == set(report.overall)
    assert set(report.by_family) == {"alpha", "beta", "gamma"}
    assert report.seen_families == ("alpha", "beta", "gamma")
    assert [part.k for part in report.composition] == [3, 4]
    assert all(part.model_mape_pct < part.sequential_mape_pct for part in report.composition)
    decoded = json.loads(report.to_json())
    assert decoded["simulated"] == len(pairs)
    assert sum(item["rows"] for item in decoded["calibration"]) == 2 * len(pairs)


def test_that_a_model_and_runs_are_of_other_lanes_is_said(
    training: Training, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cpu = on_a_cpu(store, tmp_path, Engine.PYTHON)
    card = msgspec.structs.replace(training.model.card, kinds=("cpu",), engine=Engine.PYTHON)
    for engine in (Engine.PYTHON, None, Engine.NATIVE):
        assert "trained on" not in caplog.text
        model = TrainedModel(training.model.inner, training.model.intervals, msgspec.structs.replace(card, engine=engine))
        evaluate(model, pair_set(cpu), cpu, seed=0)
    assert "the cost model was trained on native lanes, and these runs are of python lanes" in caplog.text


def test_plots_are_one_file_that_says_simulated(training: Training, pairs: PairSet, store: Store, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    write_plots(evaluate(training.model, pairs, store, seed=0), training.curve, tmp_path / "plots.html")
    assert "SIMULATED" in (tmp_path / "plots.html").read_text(encoding="utf-8")


def test_saving_over_a_model_replaces_it(training: Training, pairs: PairSet, tmp_path: Path) -> None:
    for _ in range(2):
        save_model(training.model, tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert again.card == training.model.card
    np.testing.assert_array_equal(again.predict(pairs.query).high, training.model.predict(pairs.query).high)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_saving_never_replaces_a_folder_of_other_files(training: Training, tmp_path: Path) -> None:
    precious = tmp_path / "results" / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")
    foreign = tmp_path / "site" / "manifest.json"
    foreign.parent.mkdir()
    foreign.write_text('{"format": "something else", "schema": 1}')
    for occupied in (precious.parent, foreign.parent, precious):
        with pytest.raises(UsageError, match="Name a new folder"):
            save_model(training.model, occupied)
    assert precious.read_text() == "years of work"
    assert foreign.exists()
    (tmp_path / "empty").mkdir()
    save_model(training.model, tmp_path / "empty")
    assert load_model(tmp_path / "empty").card == training.model.card


def test_any_altered_file_is_refused_before_it_is_parsed(training: Training, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(training.model, folder)
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"):
        sound = path.read_bytes()
        for damaged in (sound[:-1], b"", sound[:5] + bytes([sound[5] ^ 4]) + sound[6:]):
            path.write_bytes(damaged)
            with pytest.raises(ArtifactCorrupt, match=path.name):
                load_model(folder)
        path.unlink()
        with pytest.raises(ArtifactCorrupt, match="missing"):
            load_model(folder)
        path.write_bytes(sound)
    load_model(folder)


def change_manifest(folder: Path, **fields: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_other_versions_are_refused_with_what_differs(training: Training, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(training.model, folder)
    change_manifest(folder, feature_set=999)
    with pytest.raises(IncompatibleArtifact, match="feature set: 999 there"):
        load_model(folder)
    change_manifest(folder, feature_set=FEATURE_SET, features=["one"])
    with pytest.raises(IncompatibleArtifact, match="features"):
        load_model(folder)
    change_manifest(folder, schema=99)
    with pytest.raises(IncompatibleArtifact, match="schema: 99"):
        load_model(folder)
    change_manifest(folder, format="other")
    with pytest.raises(ArtifactCorrupt, match="format"):
        load_model(folder)
    (folder / "manifest.json").write_bytes(b"\x80 not json")
    with pytest.raises(ArtifactCorrupt):
        load_model(folder)
    with pytest.raises(UsageError, match="autosched train"):
        load_model(tmp_path / "nowhere")


@pytest.mark.parametrize(("kind", "version", "reads"), [("cuda", 1, True), ("cpu", 1, False), ("cpu", 2, True), ("npu", 2, False)])
def test_features_of_before_are_read_where_they_mean_the_same(
    kind: str, version: int, reads: bool, training: Training, tmp_path: Path
) -> None:
    card = msgspec.structs.replace(training.model.card, kinds=(kind,))
    save_model(TrainedModel(training.model.inner, training.model.intervals, card), tmp_path / "model")
    change_manifest(tmp_path / "model", feature_set=version)
    if reads:
        assert read_card(tmp_path / "model")[1].kinds == (kind,)
    else:
        with pytest.raises(IncompatibleArtifact, match=f"feature set: {version} there"):
            read_card(tmp_path / "model")


def on_a_cpu(store: Store, folder: Path, *engines: Engine) -> Store:
    """The rows of ``store`` as if they were of a CPU, once for each engine, which runs its lanes."""
    made = Store.create(folder)
    for engine in engines:
        software = SoftwareKey((("lanes", engine.value),) if engine is Engine.NATIVE else ())
        scopes = [
            dataclasses.replace(row, scope=engine.value, software=software, facts=dataclasses.replace(row.facts, kind="cpu"))
            for row in store.scopes()
        ]
        rows = [dataclasses.replace(row, scope=engine.value) for row in (*store.solo(), *store.pairs())]
        made.append([*scopes, *rows])
    return made


def test_pairs_on_lanes_of_python_are_left_out_beside_those_on_native_lanes(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    native, python = (pair_set(on_a_cpu(store, tmp_path / engine.value, engine)) for engine in (Engine.NATIVE, Engine.PYTHON))
    assert (native.engine, python.engine, pair_set(store).engine) == (Engine.NATIVE, Engine.PYTHON, None)
    assert "lanes of Python" not in caplog.text
    both = pair_set(on_a_cpu(store, tmp_path / "both", Engine.PYTHON, Engine.NATIVE))
    assert both.engine is Engine.NATIVE
    assert len(both) == len(native) > 0
    assert f"{len(native)} of {2 * len(native)} pairs" in caplog.text
    assert train(both, seed=0, kinds=("xgboost",), curve=False).model.card.engine is Engine.NATIVE


def test_groups_of_operators_that_disturb_nobody_lack_cores_all_the_same(store: Store, tmp_path: Path) -> None:
    groups = [dataclasses.replace(row, scope=Engine.NATIVE.value) for row in store.groups()]
    cpu = on_a_cpu(store, tmp_path, Engine.NATIVE)
    cpu.append(groups)
    pairs = pair_set(cpu)
    two_cores = tuple(dataclasses.replace(device, units=2) for device in pairs.query.devices)
    pairs = dataclasses.replace(pairs, query=dataclasses.replace(pairs.query, devices=two_cores))
    for row in composition(NoInterference(), pairs, groups):
        assert row.no_interference_mape_pct == row.model_mape_pct


def test_devices_of_one_name_keep_their_kernels_apart(tmp_path: Path) -> None:
    """Two machines, or two versions on one, whose equal operators take other times."""
    one = synthetic_store(tmp_path / "one", families=("alpha", "beta"), kernels=6, pairs=30)
    both = Store.create(tmp_path / "both")
    both.merge(one)
    slow = [
        dataclasses.replace(row, scope="zzz", kernel=dataclasses.replace(row.kernel, solo_us=row.kernel.solo_us * 50, flops=1))
        for row in one.solo()
    ]
    [scope] = one.scopes()
    both.append([dataclasses.replace(scope, scope="zzz"), *slow])
    alone, beside = pair_set(one), pair_set(both)
    assert len(beside.scopes) == 2
    prior = AnalyticModel()
    assert composition(prior, beside, both.groups()) == composition(prior, alone, one.groups())
    assert [part.groups for part in composition(prior, alone, one.groups())] == [4, 4]


def test_groups_that_others_disturbed_or_on_other_lanes_are_in_no_table(store: Store, tmp_path: Path) -> None:
    quiet = Store.create(tmp_path / "quiet")
    quiet.append([*store.scopes(), *store.solo(), *store.pairs(), *store.groups()])
    cpu = on_a_cpu(quiet, tmp_path / "cpu", Engine.NATIVE)
    groups = [dataclasses.replace(row, scope=Engine.NATIVE.value) for row in quiet.groups()]
    busy = dataclasses.replace(groups[0], record=dataclasses.replace(groups[0].record, contamination=Contamination(1.0)))
    cpu.append([busy, *groups[1:]])
    pairs = pair_set(cpu)
    assert busy.key in pairs.audit.excluded
    assert sum(part.groups for part in composition(AnalyticModel(), pairs, cpu.groups())) == len(groups) - 1
    both = on_a_cpu(quiet, tmp_path / "both", Engine.NATIVE, Engine.PYTHON)
    both.append([*groups, *(dataclasses.replace(row, scope=Engine.PYTHON.value) for row in quiet.groups())])
    used = pair_set(both)
    assert [scope.scope for scope in used.scopes] == [Engine.NATIVE.value]
    assert sum(part.groups for part in composition(AnalyticModel(), used, both.groups())) == len(groups)


def test_pairs_of_two_operators_only_are_a_clear_error(pairs: PairSet) -> None:
    rows = np.zeros(50, dtype=np.int64)
    query, labels = take(pairs.query, rows), dataclasses.replace(take_labels(pairs.labels, rows), family=("one",) * 50)
    with pytest.raises(UsageError, match="none of 50 pairs can be held out"):
        train(dataclasses.replace(pairs, query=query, labels=labels, keys=(("a", "b"),) * 50), seed=0, kinds=("xgboost",))


def test_an_empty_store_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no usable pair"):
        pair_set(Store.create(tmp_path))


def test_what_is_noisy_alone_is_not_why_a_store_without_pairs_has_none(store: Store, tmp_path: Path) -> None:
    # An interval five times as wide as the median.
    wide = [dataclasses.replace(row.samples, ci_high_us=row.samples.ci_low_us + 5 * row.samples.median_us) for row in store.solo()]
    solo = [dataclasses.replace(row, samples=samples) for row, samples in zip(store.solo(), wide, strict=True)]
    alone = Store.create(tmp_path)
    alone.append([*store.scopes(), *solo])
    assert any(f" {len(solo)} rows noisy: " in line for line in audit(alone).lines())
    with pytest.raises(UsageError, match=r"no usable pair \(it has no pairs\)"):
        pair_set(alone)


def test_a_card_without_held_out_rows_says_so_and_has_no_empty_table(training: Training) -> None:
    card = msgspec.structs.replace(training.model.card, held_out={})
    assert "Nothing was held out" in card.markdown()
    assert "| model |" not in card.markdown()


def test_rows_say_that_they_are_simulated(store: Store) -> None:
    assert {row.record.source for row in store.pairs()} == {Source.SIMULATED}
    assert all(scope.facts.name.startswith("synthetic") for scope in store.scopes())


def test_a_folder_that_cannot_be_made_is_named_before_anything_is_fitted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UsageError, match=r"cannot write a cost model to .*file"):
        check_replaceable(tmp_path / "file" / "model")
    for name in ("x" * 300, "x\0"):
        with pytest.raises(UsageError, match="cannot write a cost model to"):
            check_replaceable(tmp_path / name)
    assert check_replaceable(tmp_path / "new" / "model") == tmp_path / "new" / "model"
    assert list((tmp_path / "new").iterdir()) == []


def test_what_one_graph_reaches_of_a_device_does_not_make_its_operators_look_greedier_than_in_training(
    store: Store, tmp_path: Path
) -> None:
    """A device that states no rates is known by what the operators reach: those of one graph by less than those of all."""
    blind = Store.create(tmp_path)
    facts = [dataclasses.replace(row, facts=dataclasses.replace(row.facts, peak_gflops=0.0, bandwidth_gb_s=0.0)) for row in store.scopes()]
    blind.append([*facts, *store.solo(), *store.pairs()])
    pairs = pair_set(blind)
    model = train(pairs, seed=0, kinds=("xgboost",), curve=False).model
    assert model.card.facts == pairs.query.devices
    [device] = pairs.query.devices
    least = dataclasses.replace(device, peak_gflops=device.peak_gflops / 20, bandwidth_gb_s=device.bandwidth_gb_s / 20)
    of_a_graph = dataclasses.replace(pairs.query, devices=(least,))
    assert not np.array_equal(model.inner.predict(of_a_graph).slowdown_last, model.inner.predict(pairs.query).slowdown_last)
    np.testing.assert_array_equal(model.predict(of_a_graph).slowdown_last, model.predict(pairs.query).slowdown_last)
    # What reaches more says so, and of another device nothing is known.
    most = dataclasses.replace(device, peak_gflops=device.peak_gflops * 2)
    other = dataclasses.replace(least, cache_bytes=1)
    for item in (most, other):
        assert model.as_trained(dataclasses.replace(pairs.query, devices=(item,))).devices == (item,)
    save_model(model, tmp_path / "model")
    assert load_model(tmp_path / "model").card == model.card
