"""The coverage sweep at its smallest: outcomes, what a dead or late process is called, a rerun that goes on, and the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import coverage
from experiments.coverage_cases import check as checking
from experiments.coverage_cases import odd
from experiments.coverage_cases.answers import structural_difference
from experiments.coverage_cases.case_list import CaseList
from experiments.coverage_cases.made import Made
from experiments.coverage_cases.outcome import Outcome
from experiments.tables_coverage import coverage_table

_SCRIPT = Path(coverage.__file__)


def found(model: torch.nn.Module, *args: Any) -> checking.Found:
    return checking.check(lambda: Made(model, args))


class Lies(torch.nn.Module):
    """Computes something else each time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


class Branches(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Raises(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("the weather")


def test_what_comes_of_a_model_is_told_apart() -> None:
    x = torch.randn(3, 4)
    assert found(torch.nn.Linear(4, 4), x).outcome == Outcome.WORKS
    refused = found(Branches(), x)
    assert (refused.outcome, refused.export_refuses) == (Outcome.REFUSED, True)
    assert found(Raises(), x).outcome == Outcome.BROKEN
    # Export captured one of its answers, and loading noticed.
    assert found(Lies(), x).outcome == Outcome.FALLS_BACK


def test_lanes_that_compute_something_else_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class Zeros:
        def __init__(self, bound: Any, plan: Any) -> None:
            self.bound = bound

        def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            return [torch.zeros_like(tensor) for tensor in self.bound.run(inputs)]

    monkeypatch.setattr(checking, "LaneExecutor", Zeros)
    wrong = found(torch.nn.Linear(4, 4), torch.randn(3, 4))
    assert (wrong.outcome, wrong.reason.partition(",")[0]) == (Outcome.WRONG, "two lanes")


def test_structures_are_compared_to_the_last_type() -> None:
    one, two = torch.ones(2), torch.ones(3)
    assert structural_difference({"a": [one, 1]}, {"a": [one, 1]}, "output") == ""
    assert "tuple" in structural_difference({"a": [one]}, {"a": (one,)}, "output")
    assert "output['a'][0]" in structural_difference({"a": [two]}, {"a": [one]}, "output")
    assert "True" in structural_difference([1], [True], "output") or "bool" in structural_difference([1], [True], "output")
    assert "keys" in structural_difference({"a": 1, "b": 2}, {"b": 2, "a": 1}, "output")


def test_no_case_is_written_twice() -> None:
    cases = CaseList("made-up", tuple)
    cases.model("one")(torch.nn.Identity)
    with pytest.raises(ValueError, match="'made-up:one' is written twice"):
        cases.function("one")(lambda self: None)
    by_source = [coverage.cases((source,)) for source in ("odd", "low_precision", "regions", "torch_modules")]
    assert all(by_source)
    assert len(by_source[0]) == sum(len(file.CASES.builders) for file in odd.FILES)
    assert sum(map(len, by_source)) == len(set().union(*by_source))


# The sweep itself forks before it has threads; here other tests may have left some.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("end", "limit_s", "outcome"),
    [(partial(os._exit, 3), 300.0, "crash"), (partial(time.sleep, 600), 1.0, "timeout")],
    ids=["crash", "timeout"],
)
def test_a_process_that_dies_or_hangs_is_an_outcome(monkeypatch: pytest.MonkeyPatch, end: Any, limit_s: float, outcome: str) -> None:
    monkeypatch.setattr(coverage, "child", lambda *arguments: end())
    assert coverage.run("odd", "odd:any", limit_s, 2**33)["outcome"] == outcome


def test_a_rerun_skips_what_is_done_and_forgets_a_line_cut_short(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        '{"name": "a:1", "outcome": "wrong", "reason": "r"}\n{"name": "a:1", "outcome": "works", "reason": ""}\n{"name": "a:2", "outc'
    )
    finished = coverage.done(lines)
    assert {name: item["outcome"] for name, item in finished.items()} == {"a:1": "works"}
    assert not coverage._wanted("a:1", [], finished)
    assert coverage._wanted("a:2", [], finished)
    assert coverage._wanted("a:1", ["a:*"], finished)


@pytest.mark.parametrize(
    ("name", "outcome", "reason"),
    [
        ("odd:custom-operator", "works", ""),
        ("odd:custom-operator-not-trusted", "refused", "custom_operators=('coverage',)"),
        ("odd:custom-operator-in-place", "refused", "changes its arguments"),
        ("odd:custom-operator-not-deterministic", "refused", "two results for the same tensors"),
    ],
)
def test_custom_operators_are_taken_where_they_are_trusted_and_fit(name: str, outcome: str, reason: str) -> None:
    found = checking.check(coverage.cases(("odd",))[name])
    assert (found.outcome, reason in found.reason) == (outcome, True), found.reason


def test_the_table_counts_and_gives_reasons(tmp_path: Path) -> None:
    path = tmp_path / "coverage.json"
    assert coverage_table(path) == "(not recorded yet)"
    made = coverage.summary(
        {
            "a:1": {"outcome": "works", "reason": ""},
            "a:2": {"outcome": "refused", "reason": "it draws | numbers", "export_refuses": False},
            "b:1": {"outcome": "works", "reason": "", "notes": ["strides"]},
        }
    )
    environment = {"torch": "2", "packages": {"timm": "1"}, "python": "3", "commit": "abcdef0123", "taken": "2026-01-01T00:00:00"}
    path.write_text(json.dumps({"environment": environment, **made}))
    text = coverage_table(path)
    assert "| source | models | works | refused | wrong | crash |" in text
    assert "| a | 2 | 1 | 1 | 0 | 0 |" in text
    assert "| all | 3 | 2 | 1 | 0 | 0 |" in text
    assert "| `a:2` | refused | takes it | it draws \\| numbers |" in text
    assert made["notes"] == {"b:1": ["strides"]}


@pytest.mark.slow
def test_smoke_runs_a_handful_and_writes_what_the_table_reads(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-P",
        str(_SCRIPT),
        "--smoke",
        "--lines",
        str(tmp_path / "lines.jsonl"),
        "--out",
        str(tmp_path / "coverage.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads((tmp_path / "coverage.json").read_text())["counts"]
    assert (counts["odd"]["works"], counts["odd"]["refused"], counts["torch"]["works"]) == (3, 1, 1)
    assert "odd:branch-on-value" in coverage_table(tmp_path / "coverage.json")
