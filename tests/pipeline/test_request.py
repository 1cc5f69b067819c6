"""What is asked of a job: a mistake is an error of autosched's, said before anything is captured."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

import autosched
from autosched.core.errors import ArtifactError, AutoschedError, UnknownName, UnsupportedGraph, UsageError
from autosched.search.strategy import STRATEGIES


@pytest.fixture(autouse=True)
def _nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(*_: object, **__: object) -> None:
        raise AssertionError("captured first")

    monkeypatch.setattr("torch.export.export", capture)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"effort": []}, r"effort is \[\]; expected one of quick"),
        ({"budget_s": "10s"}, "the budget is '10s'"),
        ({"budget_s": True}, "the budget is True"),
        ({"budget_s": float("nan")}, "the budget is nan"),
        ({"budget_s": 3.6e12}, "the budget is 3600000000000.0, in seconds; expected at most 30 days"),
        ({"seed": -1}, "the seed is -1"),
        ({"seed": 1.5}, "the seed is 1.5"),
        ({"seed": 2**80}, "from 0 to"),
        ({"cost_model": 3}, "cost_model is 3"),
        ({"name": Path("model.pt2")}, "name is .*model.pt2.*; expected text"),
        ({"progress": 3}, "progress is a int; expected an object with the methods stage and update"),
        ({"source": "torchvision:googlenet"}, "source is 'torchvision:googlenet'; expected a ModelSource"),
    ],
)
@pytest.mark.parametrize("run", [autosched.tune, autosched.compare])
def test_a_value_that_cannot_be_is_named(run: Any, given: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(torch.nn.ReLU(), (torch.ones(2),), device="cpu", **given)


def test_a_dtype_that_no_file_would_take_is_refused_before_the_job() -> None:
    with pytest.raises(UsageError, match=r"dtype is torch\.bfloat16; expected its name, such as 'bfloat16'"):
        autosched.tune(torch.nn.ReLU(), (torch.ones(2),), device="cpu", dtype=torch.bfloat16)  # type: ignore[arg-type]


def test_what_several_shapes_are_told_by_is_looked_at_too() -> None:
    with pytest.raises(UsageError, match="progress is a int"):
        autosched.tune_shapes(torch.nn.ReLU(), [(torch.ones(2),)], device="cpu", progress=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"example 0 of tune_shapes.* got a list as example_kwargs"):
        autosched.tune_shapes(torch.nn.ReLU(), [(torch.ones(2),)], [[1]], device="cpu")  # type: ignore[list-item]


def test_two_strategies_of_one_name_are_told_before_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("beam", "acme_sched.search:BEAM", "autosched.searchers")
    monkeypatch.setattr(STRATEGIES, "_plugged", None)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry])
    with pytest.raises(UsageError, match="'beam' is registered twice"):
        autosched.tune(torch.nn.ReLU(), (torch.ones(2),), device="cpu")


def test_a_cost_model_may_be_named_by_text(tmp_path: Path) -> None:
    for folder in (tmp_path / "none", str(tmp_path / "none")):
        with pytest.raises(AutoschedError, match="none") as raised:
            autosched.tune(torch.nn.ReLU(), (torch.ones(2),), device="cpu", cost_model=folder)
        assert isinstance(raised.value, UsageError | ArtifactError)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("bean", UnknownName, "'bean'"),
        (["sequential", "bean"], UnknownName, "'bean'"),
        (3, UsageError, "strategies is 3; expected a list of names"),
        (["beam", 3], UsageError, "expected a list of names"),
        ([], UsageError, r"strategies is \[\]; expected a list of names"),
    ],
)
def test_a_strategy_that_there_is_not_is_named_whole(given: object, error: type[AutoschedError], words: str) -> None:
    options: dict[str, Any] = {"strategies": given, "lowering": "rewritten"}
    with pytest.raises(error, match=words):
        autosched.compare(torch.nn.ReLU(), (torch.ones(2),), device="cpu", **options)


def test_one_strategy_may_be_named_by_itself() -> None:
    with pytest.raises(UnsupportedGraph, match="captured first"):
        autosched.compare(torch.nn.ReLU(), (torch.ones(2),), device="cpu", strategies="beam", lowering="rewritten", compiled=False)
