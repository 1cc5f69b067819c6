"""Which cost model a job predicts with, and what it says about it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from autosched import doctor
from autosched.config import cost_models_dir
from autosched.core.errors import ArtifactCorrupt
from autosched.core.records import Contamination, DeviceKey, Engine, PairRecord, Samples, SoftwareKey, SoloRecord
from autosched.costmodel.gate import GateDecision
from autosched.costmodel.metrics import measure
from autosched.costmodel.model import COST_MODELS, PairModel
from autosched.costmodel.pair_set import pair_set
from autosched.costmodel.persist import read_card, save_model
from autosched.costmodel.table import OTHER, make_cost_table
from autosched.costmodel.trained import Card, TrainedModel
from autosched.datasets.facts import DeviceFacts
from autosched.datasets.synthetic import synthetic_store
from autosched.device import registry
from autosched.pipeline import model_choice
from autosched.pipeline.model_choice import ChosenModel, choose_model, judged_at, model_in_use, prediction_note
from tests.conformance.programs import branches_program

KEY = DeviceKey("cuda", "a device", (("sm_count", "32"),))
CPU = DeviceKey("cpu", "a processor", (("cores", "2"),))
DATA = Path(model_choice.__file__).parents[2] / "datasets" / "data"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "cache"))


def write_model(
    folder: Path,
    scratch: Path,
    *,
    kind: str = "xgboost",
    simulated: int = 0,
    device: DeviceKey = KEY,
    engine: Engine | None = None,
    judged: bool = True,
    origins: tuple[DeviceKey, ...] = (),
) -> None:
    """A model fitted on simulated runs; what its card claims is up to the test."""
    pairs = pair_set(synthetic_store(scratch, families=("alpha", "beta"), kernels=6, pairs=20))
    model: PairModel = COST_MODELS.get(kind)()
    model.fit(pairs.query, pairs.labels, rng=np.random.default_rng(0))
    decision = GateDecision(kind, "made by a test", "nothing")
    held_out = {"constant": measure(pairs.labels, model.predict(pairs.query))} if judged else {}
    families = ("alpha", "beta")
    learned = {key.digest: families for key in origins}
    card = Card(
        (device.name,), (device.kind,), families, len(pairs), simulated, None, decision, held_out, 0, engine=engine, origins=learned
    )
    save_model(TrainedModel(model, None, card), folder)


def test_without_a_model_the_prior_answers_and_says_so() -> None:
    chosen = choose_model(KEY, None)
    assert chosen.model is None
    assert chosen.name == "analytic"
    assert "autosched train" in chosen.why


def test_the_model_trained_on_this_machine_is_found(tmp_path: Path) -> None:
    write_model(cost_models_dir() / KEY.digest, tmp_path / "runs")
    chosen = choose_model(KEY, None)
    assert chosen.model is not None
    assert chosen.name == "xgboost"
    assert "this device" in chosen.why
    assert choose_model(dataclasses.replace(KEY, name="another"), None).model is None
    # Processors of several generations have one name.
    alike = dataclasses.replace(KEY, details=(("vector", "narrow"),))
    assert "of a device of this name" in choose_model(alike, None, cost_models_dir() / KEY.digest).why


def test_a_model_is_of_the_devices_whose_runs_it_learned_from_wherever_it_was_installed(tmp_path: Path) -> None:
    alike = dataclasses.replace(CPU, details=(("cores", "64"),))
    installed = cost_models_dir() / CPU.digest
    for kind in ("xgboost", "analytic"):
        for origins, words, settled in (
            ((CPU,), "pairs of this device", True),
            ((alike,), "pairs of a device of this name", False),
            ((CPU, alike), "pairs of this device and others", False),
        ):
            write_model(installed, tmp_path / kind / words, kind=kind, device=CPU, origins=origins)
            found = model_in_use(CPU, Engine.NATIVE) if kind == "xgboost" else judged_at(installed, CPU, Engine.NATIVE)
            assert words in found.why
            # That nothing learned is good enough on another device says nothing of this one.
            assert found.settled == (settled and kind == "analytic")


def test_models_that_failed_the_gate_alike_are_told_in_one_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alike = dataclasses.replace(CPU, details=(("cores", "64"),))
    shipped = [tmp_path / name / "model" for name in ("one", "two")]
    for folder in shipped:
        write_model(folder, folder.parent / "runs", kind="analytic", device=CPU, origins=(alike,))
    monkeypatch.setattr(model_choice, "_shipped", lambda key, engine: shipped)
    pairs = read_card(shipped[0])[1].pairs
    why = f"no model learned from {pairs} or {pairs} pairs of a device of this name has passed the gate"
    assert model_in_use(CPU, None).why == why
    monkeypatch.setattr(registry, "device_named", lambda name: SimpleNamespace(key=CPU))
    monkeypatch.setattr(model_choice, "engine_of", lambda device: None)
    found = doctor._cost_model("cpu")
    assert (found.state, found.detail) == (doctor.State.MISSING, f"the analytic prior: {why}")
    monkeypatch.setattr(model_choice, "_shipped", lambda key, engine: [])
    assert doctor._cost_model("cpu").detail == "the analytic prior"


@pytest.mark.parametrize(("kind", "simulated", "words"), [("analytic", 0, "gate"), ("xgboost", 5, "simulated")])
def test_a_model_that_must_not_be_used_is_not(tmp_path: Path, kind: str, simulated: int, words: str) -> None:
    installed = cost_models_dir() / KEY.digest
    write_model(installed, tmp_path / "runs", kind=kind, simulated=simulated)
    chosen = choose_model(KEY, None)
    assert chosen.model is None
    assert words in chosen.why
    # Nobody could find it by the digest that its folder is called.
    assert not simulated or str(installed) in chosen.why


def test_a_model_of_another_kind_of_device_is_not_used(tmp_path: Path) -> None:
    write_model(tmp_path / "model", tmp_path / "runs")
    chosen = choose_model(DeviceKey("cpu", "a processor", ()), None, tmp_path / "model")
    assert chosen.model is None
    assert "not on cpu" in chosen.why


def test_a_damaged_cached_model_is_passed_over_and_a_named_one_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = cost_models_dir() / KEY.digest
    write_model(folder, tmp_path / "runs")
    (folder / "card.json").write_bytes(b"{")
    assert choose_model(KEY, None).model is None
    assert "is not used" in caplog.text
    with pytest.raises(ArtifactCorrupt):
        choose_model(KEY, None, folder)


def test_a_cached_model_that_this_user_may_not_read_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cost_models_dir() / KEY.digest
    write_model(folder, tmp_path / "runs")
    stat = os.stat

    def refuse(path: os.PathLike[str], **given: bool) -> os.stat_result:
        # As the system does where another user's folder is this one's alone.
        if Path(path).parent == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **given)

    monkeypatch.setattr(os, "stat", refuse)
    assert choose_model(KEY, None).model is None
    assert "is not used: cannot read the cost model" in caplog.text


@pytest.mark.parametrize("installed", [True, False])
def test_runs_on_lanes_of_another_kind_say_nothing_of_these(tmp_path: Path, installed: bool) -> None:
    folder = cost_models_dir() / CPU.digest if installed else tmp_path / "model"
    write_model(folder, tmp_path / "runs", device=CPU, engine=Engine.PYTHON)
    explicit = None if installed else folder
    refused = choose_model(CPU, Engine.NATIVE, explicit)
    assert refused.model is None
    assert "python lanes" in refused.why
    assert "native" in refused.why
    assert choose_model(CPU, Engine.PYTHON, explicit).name == "xgboost"


def test_a_model_that_does_not_say_what_ran_its_lanes_is_used(tmp_path: Path) -> None:
    write_model(cost_models_dir() / CPU.digest, tmp_path / "runs", device=CPU)
    assert choose_model(CPU, Engine.NATIVE).name == "xgboost"


def test_a_device_of_which_too_little_is_known_is_not_settled(tmp_path: Path) -> None:
    folder = cost_models_dir() / CPU.digest
    write_model(folder, tmp_path / "runs", kind="analytic", device=CPU, judged=False)
    assert not model_in_use(CPU, Engine.NATIVE).settled
    write_model(folder, tmp_path / "more", kind="analytic", device=CPU)
    assert model_in_use(CPU, Engine.NATIVE).settled


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands where models ship."""
    monkeypatch.setattr(model_choice.resources, "files", lambda package: tmp_path / "shipped")
    return tmp_path / "shipped" / "data"


def ship(data: Path, name: str, scratch: Path, device: DeviceKey, *, kind: str = "xgboost", engine: Engine = Engine.NATIVE) -> None:
    write_model(data / name / "model", scratch / name, kind=kind, device=device, engine=engine)
    (data / name / "about.json").write_bytes(msgspec.json.encode({"device": device, "rows": {"pairs": 1}}))


def test_what_was_found_out_on_a_device_is_not_overruled_by_another_of_its_name(shipped: Path, tmp_path: Path) -> None:
    older = dataclasses.replace(CPU, details=(("cores", "2"), ("vector", "narrow")))
    ship(shipped, "a_newer", tmp_path, CPU, kind="analytic")
    ship(shipped, "b_older", tmp_path, older)
    judged = model_in_use(CPU, Engine.NATIVE)
    assert judged.folder is None
    assert judged.settled
    assert "of this device has passed" in judged.why
    assert model_in_use(older, Engine.NATIVE).folder == shipped / "b_older" / "model"
    third = dataclasses.replace(CPU, details=(("cores", "2"), ("vector", "wide")))
    other = model_in_use(third, Engine.NATIVE)
    assert "a device of this name" in other.why
    assert not other.settled


def test_what_was_trained_and_refused_here_is_not_overruled_by_a_shipped_model_of_another_device(shipped: Path, tmp_path: Path) -> None:
    installed = cost_models_dir() / CPU.digest
    other = dataclasses.replace(CPU, details=(("cores", "2"), ("vector", "narrow")))
    ship(shipped, "a_other", tmp_path, other)
    write_model(installed, tmp_path / "few", kind="analytic", device=CPU, judged=False)
    assert model_in_use(CPU, Engine.NATIVE).folder == shipped / "a_other" / "model"
    write_model(installed, tmp_path / "enough", kind="analytic", device=CPU)
    assert model_in_use(CPU, Engine.NATIVE).folder is None
    assert model_in_use(CPU, Engine.NATIVE).settled
    # One that ships for this very device was made of more runs.
    ship(shipped, "b_own", tmp_path, CPU)
    assert model_in_use(CPU, Engine.NATIVE).folder == shipped / "b_own" / "model"


def test_a_shipped_model_of_other_lanes_gives_way_to_one_of_these(shipped: Path, tmp_path: Path) -> None:
    other = dataclasses.replace(CPU, details=(("cores", "2"), ("vector", "narrow")))
    ship(shipped, "a_own", tmp_path, CPU, engine=Engine.PYTHON)
    ship(shipped, "b_other", tmp_path, other)
    assert model_in_use(CPU, Engine.NATIVE).folder == shipped / "b_other" / "model"
    assert model_in_use(CPU, Engine.PYTHON).folder == shipped / "a_own" / "model"


def test_a_model_that_ships_for_fewer_cores_is_not_used_unless_it_is_named(shipped: Path, tmp_path: Path) -> None:
    ship(shipped, "two", tmp_path, CPU)
    larger = dataclasses.replace(CPU, details=(("cores", "16"),))
    judged = model_in_use(larger, Engine.NATIVE)
    assert judged.folder is None
    assert not judged.settled
    assert judged.why == "the model that ships for a processor was trained on 2 cores, and here there are 16"
    assert model_in_use(CPU, Engine.NATIVE).folder == shipped / "two" / "model"
    assert choose_model(larger, Engine.NATIVE, shipped / "two" / "model").model is not None


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in DATA.glob("*/model")))
def test_models_that_ship_say_what_their_runs_say(folder: str) -> None:
    about: Mapping[str, object] = json.loads((DATA / folder / "about.json").read_text())
    key = msgspec.convert(about["device"], DeviceKey)
    versions = msgspec.convert(about["software"], dict[str, str])
    _, card = read_card(DATA / folder / "model")
    assert card.devices == (key.name,)
    assert card.engine is (SoftwareKey(tuple(versions.items())).engine if key.kind == "cpu" else None)
    assert "of this device" in judged_at(DATA / folder / "model", key, card.engine).why


def test_the_note_says_what_share_is_predicted() -> None:
    graph = branches_program(branches=2, depth=1)[0].graph
    solo = [
        [SoloRecord(operator.signature, 1, Samples(10.0, 10.0, 10.0, 10.0, 10.0, 9), Contamination(0.0))] for operator in graph.operators
    ]
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


def test_the_note_counts_pairs_of_other_variants() -> None:
    graph = branches_program(branches=2, depth=1)[0].graph
    times = [SoloRecord(item.signature, 1, Samples(10.0, 10.0, 10.0, 10.0, 10.0, 9), Contamination(0.0)) for item in graph.operators]
    table = make_cost_table(
        graph, [[record] for record in times], [], widths=(1,), launch_gap_us=1.0, cross_lane_us=1.0, fixed_us=0.0, max_lanes=2,
        device=DeviceFacts("d", "cpu", 2), others=[times[0], *[None] * (len(graph) - 1)],
    )  # fmt: skip
    usual = dataclasses.replace(table, other_kernel=None, other_variant=None)
    names = {operator.signature for operator in graph.operators}
    pairs = [
        PairRecord(first, 1, last, 1, 10.0, 10.0, 12.0, 1.1, 1.3, 0.6, 1, 1, 9, Contamination(0.0)) for first in names for last in names
    ]
    model = ChosenModel(None, "analytic", "why")
    assert "predicts 0% of" in prediction_note(model, graph, usual, pairs)
    assert "predicts 0% of" not in prediction_note(model, graph, table, pairs)
    own = graph.operators[0].signature
    others = [dataclasses.replace(pair, first=own + OTHER) for pair in pairs if pair.first == own]
    others += [dataclasses.replace(pair, last=own + OTHER) for pair in pairs if pair.last == own]
    others += [dataclasses.replace(pair, first=own + OTHER, last=own + OTHER) for pair in pairs if pair.first == pair.last == own]
    assert "predicts 0% of" in prediction_note(model, graph, table, [*pairs, *others])
