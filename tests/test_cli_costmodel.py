"""The cost model's commands: what was measured is never endangered, and every command says what follows from its result."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from autosched.cli.costmodel import whether_used
from autosched.cli.costmodel_tables import print_evaluation
from autosched.datasets.synthetic import synthetic_store
from autosched.pipeline import collecting, retraining
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


def test_training_into_a_folder_of_other_files_is_refused_at_once(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = tmp_path / "costmodel"
    sources.mkdir()
    (sources / "model.py").write_text("precious = True")
    assert run("train", str(runs), "-o", str(sources)) == 2
    printed = capsys.readouterr()
    assert "Name a new folder" in printed.err
    assert "reading" not in printed.err
    assert (sources / "model.py").read_text() == "precious = True"


@pytest.mark.parametrize(
    ("chosen", "installed", "words"),
    [
        ("analytic", True, "no learned model is good enough"),
        ("xgboost", True, "'autosched tune' on this device uses it"),
        ("xgboost", False, "--cost-model elsewhere"),
    ],
)
def test_training_says_whether_tuning_will_use_the_model(chosen: str, installed: bool, words: str) -> None:
    assert words in whether_used(chosen, Path("elsewhere"), installed=installed)


def test_no_cell_of_an_evaluation_is_cut_off_in_a_narrow_terminal(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    retraining.train(runs, tmp_path / "model")
    found = retraining.evaluate(tmp_path / "model", runs)
    first = next(iter(found.by_family.values()))
    classes = {"compute x compute": dataclasses.replace(first, rows=12345, contended_rows=12345, mape_pct=123.4)}
    console = Console(width=80, file=io.StringIO())
    print_evaluation(dataclasses.replace(found, by_class=classes), console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "compute x compute" in printed
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert "flatters it" in " ".join(printed.split())


@pytest.mark.parametrize(("kept", "code"), [(0, 3), (5, 0)])
def test_a_collection_of_which_nothing_was_kept_ends_as_unstable(
    kept: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = collecting.CollectResult(str(tmp_path), "cpu", ("autosched:toy",), (), (), kept, 0, 0, 0, 0, 12, None, ())
    monkeypatch.setattr(collecting, "collect", lambda subjects, folder, **options: result)
    assert run("collect", "autosched:toy", "-o", str(tmp_path / "runs")) == code
    assert ("nothing was kept" in capsys.readouterr().err) == (code == 3)
