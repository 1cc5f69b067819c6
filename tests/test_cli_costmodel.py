"""The cost model's commands: what was measured is never endangered, and every command says what follows from its result."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from autosched.cli.costmodel import whether_used
from autosched.cli.costmodel_tables import _METRICS, print_evaluation, print_training
from autosched.costmodel.pair_set import PairSet, pair_set
from autosched.costmodel.persist import load_model, save_model
from autosched.costmodel.train import train
from autosched.costmodel.trained import TrainedModel
from autosched.costmodel.xgboost_model import XgboostModel
from autosched.datasets.store import Store
from autosched.datasets.synthetic import synthetic_store
from autosched.pipeline import collecting, model_choice, retraining
from tests.conformance.command import run


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return Path(synthetic_store(tmp_path / "runs", families=("alpha",), kernels=4, pairs=6, seed=0).folder)


def test_too_few_runs_train_the_prior_and_say_so(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", str(runs), "-o", str(tmp_path / "model"), "--device", "cpu") == 0
    printed = capsys.readouterr()
    assert "no learned model is good enough yet" in printed.out
    assert "reading" in printed.err  # the slow command says what it does
    assert run("evaluate", str(tmp_path / "model"), str(runs), "--json") == 0
    assert json.loads(capsys.readouterr().out)["model"] == "analytic"


def test_a_model_trained_without_output_is_the_one_that_evaluate_finds(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", str(runs), "--device", "cpu", "--json") == 0
    installed = Path(json.loads(capsys.readouterr().out)["model"])
    assert installed.is_relative_to(tmp_path / "cache")
    assert run("evaluate", "--device", "cpu", "--json") == 2  # there is a model, but no tuning job has left runs yet
    assert "runs" in json.loads(capsys.readouterr().out)["error"]["message"]


def trained_on(model: TrainedModel, kind: str, name: str, families: tuple[str, ...]) -> TrainedModel:
    """The same model with a card that lets tuning take it on a device of this kind and name."""
    decision = dataclasses.replace(model.card.decision, chosen=model.name)
    card = msgspec.structs.replace(model.card, kinds=(kind,), devices=(name,), families=families, simulated=0, decision=decision)
    return TrainedModel(model.inner, model.intervals, card)


def some_trees(folder: Path) -> TrainedModel:
    pairs = pair_set(synthetic_store(folder, families=("alpha", "beta"), kernels=6, pairs=40, seed=1))
    trees = XgboostModel(threads=1)
    trees.fit(pairs.query, pairs.labels, rng=np.random.default_rng(0))
    return TrainedModel(trees, None, train(pairs, seed=0, kinds=("xgboost",), curve=False).model.card)


def test_evaluate_reads_the_model_that_tuning_reads_and_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    learned = some_trees(tmp_path / "elsewhere")
    own_runs, installed = retraining.places_of("cpu")
    synthetic_store(own_runs, families=("gamma",), kernels=4, pairs=6, seed=0)
    shipped = tmp_path / "shipped" / "model"
    save_model(trained_on(learned, "cpu", "somewhere", ("alpha",)), shipped)
    monkeypatch.setattr(model_choice, "_shipped", lambda key, engine: [shipped])

    def evaluated() -> str:
        assert run("evaluate", "--device", "cpu", "--json") == 0
        return str(json.loads(capsys.readouterr().out)["folder"])

    assert evaluated() == str(shipped)
    assert run("evaluate", "--device", "cpu") == 0
    assert f"the cost model in {shipped}" in capsys.readouterr().out
    save_model(trained_on(learned, "cpu", "here", ("beta",)), installed)
    assert evaluated() == str(installed)


def test_without_any_model_evaluate_says_how_to_make_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(model_choice, "_shipped", lambda key, engine: [])
    synthetic_store(retraining.places_of("cpu")[0], families=("gamma",), kernels=4, pairs=6, seed=0)
    assert run("evaluate", "--device", "cpu") == 2
    assert "then 'autosched train runs'. To evaluate a model, name its folder" in capsys.readouterr().err


def test_where_no_model_passed_the_gate_evaluate_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_choice, "_shipped", lambda key, engine: [tmp_path])
    monkeypatch.setattr(model_choice, "judged_at", lambda *_: model_choice.Judged(None, "analytic", "none passed", settled=True))
    assert run("evaluate", "--device", "cpu") == 2
    said = capsys.readouterr().err
    assert "uses the analytic prior: none passed" in said
    assert "makes one" not in said


def test_training_into_a_folder_of_other_files_is_refused_at_once(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = tmp_path / "costmodel"
    sources.mkdir()
    (sources / "model.py").write_text("precious = True")
    assert run("train", str(runs), "-o", str(sources)) == 2
    printed = capsys.readouterr()
    assert "Name a new folder, or remove this one" in printed.err
    assert "reading" not in printed.err
    assert (sources / "model.py").read_text() == "precious = True"


def test_where_the_installed_model_is_damaged_training_says_to_remove_it(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another folder would not be looked into."""
    _, installed = retraining.places_of("cpu")
    installed.mkdir(parents=True)
    (installed / "manifest.json").write_bytes(b"")
    assert run("train", str(runs), "--device", "cpu") == 2
    said = capsys.readouterr().err
    assert f"{installed}: it holds something else, or a damaged one" in said
    assert "or remove this one" in said


_PLACE = Path("installed")
_PRIOR = model_choice.Judged(None, "analytic", "no model learned from 50 pairs of this device has passed the gate")
_SHIPPED = model_choice.Judged(Path("shipped"), "xgboost", "trained on 99 pairs of this device: one")
_TAKEN = model_choice.Judged(_PLACE, "torch", "trained on 50 pairs of this device: one")
_SIMULATED = model_choice.Judged(None, "analytic", "the model in installed was trained on simulated runs")


@pytest.mark.parametrize(
    ("chosen", "installed", "words"),
    [
        ("analytic", (_PRIOR, _PRIOR), "no learned model is good enough yet: tuning on this device goes on with the analytic prior; "),
        ("analytic", (_PRIOR, _SHIPPED), "goes on with xgboost, trained on 99 pairs of this device: one; 'autosched collect' more runs"),
        ("torch", (_SIMULATED, _SHIPPED), "was trained on simulated runs, so it is not used: tuning on this device goes on with xgboost"),
        ("torch", (_TAKEN, _TAKEN), "'autosched tune' on this device uses it"),
        ("xgboost", None, "--cost-model elsewhere"),
        ("analytic", None, "with it, tuning goes on with the analytic prior"),
    ],
)
def test_training_says_whether_tuning_will_use_the_model(
    chosen: str, installed: tuple[model_choice.Judged, model_choice.Judged] | None, words: str
) -> None:
    assert words in whether_used(chosen, Path("elsewhere"), installed)


def test_training_promises_nothing_of_a_model_of_simulated_runs() -> None:
    assert "no tuning job uses it" in whether_used("torch", Path("elsewhere"), None, simulated=3)


@pytest.mark.parametrize("command", ["collect", "train", "evaluate"])
def test_recorded_runs_are_no_device_of_the_cost_models_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--device", "replay:runs") == 2
    said = capsys.readouterr().err
    assert "'autosched train runs' learns from the recorded runs" in " ".join(said.split())
    assert "unknown" not in said


def test_what_training_says_of_an_installed_model_is_what_tuning_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own_runs, own_model = retraining.places_of("cpu")
    synthetic_store(own_runs, families=("gamma",), kernels=4, pairs=6, seed=0)
    monkeypatch.setattr(model_choice, "_shipped", lambda key, engine: [])
    assert run("train", "--device", "cpu") == 0
    own, in_use = retraining.judged_on("cpu", own_model)
    assert own.folder is None
    assert in_use.folder is None
    assert "goes on with the analytic prior" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("own_kind", "words"),
    [(False, "pairs of cuda, and this device is cpu"), (True, "usable pairs; a learned model needs at least 40 to be judged")],
    ids=["of a GPU", "too few"],
)
def test_runs_that_teach_nothing_here_leave_the_installed_model_alone(
    own_kind: bool, words: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def of_a_cpu(store: Store) -> PairSet:
        pairs = pair_set(store)
        devices = tuple(dataclasses.replace(item, kind="cpu") for item in pairs.query.devices)
        return dataclasses.replace(pairs, query=dataclasses.replace(pairs.query, devices=devices))

    if own_kind:
        monkeypatch.setattr(retraining, "pair_set", of_a_cpu)
    place = retraining.places_of("cpu")[1]
    save_model(trained_on(some_trees(tmp_path / "elsewhere"), "cpu", "here", ("alpha",)), place)
    assert run("train", str(runs), "--device", "cpu") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert words in said
    assert "the cost model that tuning uses here (xgboost, trained on" in said
    assert load_model(place).name == "xgboost"
    assert run("train", str(runs), "--device", "cpu", "-o", str(tmp_path / "beside")) == 0


def test_no_cell_of_an_evaluation_is_cut_off_in_a_narrow_terminal(runs: Path, tmp_path: Path) -> None:
    retraining.train(runs, tmp_path / "model")
    found = retraining.evaluate(tmp_path / "model", runs)
    first = next(iter(found.by_family.values()))
    classes = {"compute x compute": dataclasses.replace(first, rows=12345, contended_rows=12345, mape_pct=123.4)}
    for name in ("xgboost", "analytic"):
        console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
        print_evaluation(dataclasses.replace(found, by_class=classes, folder="model", model=name), console)
        printed = console.file.getvalue()  # type: ignore[attr-defined]
        assert "compute x compute" in printed
        assert "…" not in printed
        assert max(map(len, printed.splitlines())) <= 80
        # The prior has seen nothing in a training.
        assert ("flatters it" in " ".join(printed.split())) == (name != "analytic")


@pytest.mark.parametrize("width", [80, 200])
def test_a_training_prints_its_errors_as_a_table_and_names_as_they_are(width: int, runs: Path) -> None:
    pairs = pair_set(synthetic_store(runs.parent / "many", families=("alpha", "beta"), kernels=6, pairs=40, seed=1))
    training = train(pairs, seed=0, kinds=("xgboost",))
    assert training.curve
    card = msgspec.structs.replace(training.model.card, families=("a[/b]",), held_out={"x[/y]": training.held_out["xgboost"]})
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    print_training(card, training.curve, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, printed.splitlines())) <= width
    assert "model families: a[/b]" in " ".join(printed.split())
    (row,) = (line for line in printed.splitlines() if "x[/y]" in line)
    assert f"{card.held_out['x[/y]'].mape_pct:.1f}" in row
    assert printed.count(" fitted on ") == len(training.curve)
    assert f"chosen: {card.decision.chosen} (" in printed
    nothing = Console(width=width, file=io.StringIO())
    print_training(msgspec.structs.replace(card, held_out={}), (), nothing)
    assert "nothing was held out" in nothing.file.getvalue()  # type: ignore[attr-defined]


def test_an_evaluation_says_which_families_flatter_the_model(runs: Path, tmp_path: Path) -> None:
    retraining.train(runs, tmp_path / "model")
    found = dataclasses.replace(retraining.evaluate(tmp_path / "model", runs), model="xgboost")
    assert found.seen_families == ("alpha",)

    def printed(**changes: object) -> str:
        console = Console(width=200, file=io.StringIO(), color_system=None)
        print_evaluation(dataclasses.replace(found, **changes), console)  # type: ignore[arg-type]
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    assert "every model family here was in its training, which flatters it; its errors on held-out ones are in its card.md" in printed()
    some = "these model families were in its training: alpha, which flatters it; what counts is the table of unseen ones"
    assert some in printed(unseen=found.overall, unseen_families=("beta",))
    assert "flatters" not in printed(unseen=found.overall, seen_families=(), unseen_families=("alpha",))


def test_every_column_of_an_evaluation_is_explained() -> None:
    page = (Path(__file__).parents[1] / "docs" / "retrain.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE)
    explained = {name.strip() for cell in cells for name in cell.split(",")}
    assert {heading.removesuffix(" %") for heading in _METRICS} <= explained


@pytest.mark.parametrize("folder", ["file", "file/tables"])
def test_a_folder_that_cannot_be_is_named_before_anything_is_evaluated(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setattr(retraining, "evaluate", None)
    assert run("evaluate", str(tmp_path), str(tmp_path), "-o", str(tmp_path / folder)) == 2
    assert f"cannot write tables and figures to {tmp_path / folder}: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["evaluation.json", "evaluation.html"])
def test_a_table_or_figure_that_cannot_be_written_is_named(
    name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    retraining.train(runs, tmp_path / "model")
    (tmp_path / "out" / name).mkdir(parents=True)
    assert run("evaluate", str(tmp_path / "model"), str(runs), "-o", str(tmp_path / "out")) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"cannot write tables and figures to {tmp_path / 'out'}: Is a directory: {tmp_path / 'out' / name}. Name a folder" in said
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name.endswith(name)] == [name]


def test_that_figures_need_plotly_is_said_before_anything_is_evaluated(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr(retraining, "evaluate", lambda *args, **options: pytest.fail("it began"))
    assert run("evaluate", str(tmp_path / "model"), str(runs), "-o", str(tmp_path / "out")) == 2
    assert "pip install 'autosched[report]'" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_a_folder_without_permission_is_named_before_anything_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(retraining, "evaluate", None)
    # As for everyone but root.
    monkeypatch.setattr("os.access", lambda path, mode, **_: Path(path).name != "tables")
    assert run("evaluate", str(tmp_path), str(tmp_path), "-o", str(tmp_path / "tables")) == 2
    assert "its permissions do not allow it" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_collection_of_no_model_is_a_mistake(
    as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def result(not_measured: tuple[str, ...]) -> collecting.CollectResult:
        left_out = tuple(f"{name} left out: no operator" for name in not_measured)
        return collecting.CollectResult(str(tmp_path), "cpu", (), left_out, (), 9, 0, 0, 0, 0, 1, 0, 0, None, (), not_measured)

    command = ["collect", "autosched:toy", "autosched:toy", "-o", str(tmp_path / "runs"), *(["--json"] if as_json else [])]
    for not_measured, code in (("a", "b"), 2), (("a",), 0):
        monkeypatch.setattr(collecting, "collect", lambda *_, found=not_measured, **__: result(found))
        assert run(*command) == code
        said = capsys.readouterr()
        assert "a left out: no operator" in (said.err if code else said.out)
        if as_json:
            assert ("error" in json.loads(said.out)) == bool(code)


@pytest.mark.parametrize(("before", "kept", "disturbed", "code"), [(0, 0, 12, 3), (500, 0, 12, 3), (0, 5, 12, 0), (500, 0, 0, 0)])
def test_a_collection_of_which_nothing_was_kept_ends_as_unstable(
    before: int, kept: int, disturbed: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = collecting.CollectResult(
        str(tmp_path), "cpu", ("autosched:toy",), (), (), before + kept, 0, 0, 0, 0, kept, disturbed, 0, None, ()
    )
    monkeypatch.setattr(collecting, "collect", lambda subjects, folder, **options: result)
    assert run("collect", "autosched:toy", "-o", str(tmp_path / "runs")) == code
    assert ("nothing of this run was kept" in capsys.readouterr().err) == (code == 3)
