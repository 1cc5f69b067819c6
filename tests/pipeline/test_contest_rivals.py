"""What compiled baselines mean for the choice among lowerings: the fastest one's mode is taken apart, on a device of the test's times."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from autosched.capture.export import capture
from autosched.core.errors import AutoschedError, UnsupportedGraph
from autosched.core.report import LoweringOutcome, TuneReport
from autosched.core.variants import Lowering
from autosched.pipeline import baselines, contest
from tests.conformance.contest_double import Bench, Branches, Speed, comparing, rows, steady_clock


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    steady_clock(monkeypatch)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., TuneReport]:
    return comparing(monkeypatch, tmp_path)


def rivals(
    monkeypatch: pytest.MonkeyPatch, times_us: Mapping[Lowering, float], made: list[str], answers: list[list[Any]] | None = None
) -> None:
    """Compiled baselines that take these times; what becomes of them goes to ``made``, the shapes they must answer in to ``answers``."""

    class Rival:
        max_abs_error = 0.0

        def __init__(self, *call: Any, lowering: Lowering, **options: Any) -> None:
            self._lowering = lowering
            made.append(f"{lowering} compiled")
            if answers is not None:
                answers.append([tuple(tensor.shape) for tensor in call[3]])

        def prepare(self) -> None:
            made.append(f"{self._lowering} prepared")

        def round_us(self) -> float:
            return times_us[self._lowering]

        def close(self) -> None:
            made.append("closed")

    monkeypatch.setattr(baselines, "CompiledBaseline", Rival)


def test_the_compiled_rival_is_prepared_once_and_stands_in_the_kept_report(
    compare: Callable[..., TuneReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    rivals(monkeypatch, {Lowering.INDUCTOR: 8e3, Lowering.MAX_AUTOTUNE: 9e3}, made)
    report = compare(Bench(rewritten=Speed(105.0, lanes_us=60.0), fused=Speed(500.0), inductor=Speed(100.0)), Branches(), compiled=True)
    assert made == ["inductor compiled", "inductor prepared", "max_autotune compiled", "max_autotune prepared"] + ["closed"] * 2
    assert report.lowering == "rewritten"
    found = {row.name: row for row in report.strategies}
    assert found["torch_compile"].is_baseline
    assert found["max_autotune"].is_baseline
    assert found["torch_compile"].measured_us == pytest.approx(8e3)
    budgeted = {stage.name: stage.in_budget for stage in report.stages}
    assert not budgeted["baseline torch_compile"]
    assert not budgeted["baseline max_autotune"]
    assert budgeted["final comparison"]


class Counting(torch.nn.Module):
    """Answers one tensor twice, and counts its calls: neither is what its graph gives."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen += 1
        answer = self.linear(x) + self.seen
        return answer, answer


def test_a_rival_must_answer_what_the_model_returns_and_not_what_its_graph_gives(
    compare: Callable[..., TuneReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[list[Any]] = []
    rivals(monkeypatch, {Lowering.INDUCTOR: 8e3, Lowering.MAX_AUTOTUNE: 9e3}, [], answers)
    compare(Bench(rewritten=Speed(105.0), fused=Speed(500.0), inductor=Speed(100.0)), Counting(), compiled=True)
    assert answers == [[(8, 8), (8, 8)]] * 2


def test_the_mode_of_the_fastest_rival_takes_the_place_of_inductors_defaults(
    compare: Callable[..., TuneReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    rivals(monkeypatch, {Lowering.INDUCTOR: 10e3, Lowering.MAX_AUTOTUNE: 7e3}, [])
    bench = Bench(rewritten=Speed(300.0), fused=Speed(300.0), inductor=Speed(100.0), max_autotune=Speed(70.0))
    report = compare(bench, compiled=True)
    found = rows(report)
    assert report.lowering == "max_autotune"
    assert found["max_autotune"].outcome is LoweringOutcome.KEPT
    assert found["inductor"].outcome is LoweringOutcome.DROPPED
    assert "max_autotune is the fastest of torch.compile's ways here: 7,000 us; torch_compile 10,000 us" in found["inductor"].why
    # Compiled once, in the right mode.
    assert list(bench.sessions) == ["rewritten", "fused", "max_autotune"]
    assert all(session.closed for session in bench.sessions.values())


@pytest.mark.parametrize(("inductor_us", "max_autotune_us", "kept"), [(100.0, 70.0, "max_autotune"), (60.0, 70.0, "inductor")])
def test_of_a_small_model_the_orders_of_two_modes_decide_and_not_their_compiled_calls(
    compare: Callable[..., TuneReport], monkeypatch: pytest.MonkeyPatch, inductor_us: float, max_autotune_us: float, kept: str
) -> None:
    rivals(monkeypatch, {Lowering.INDUCTOR: 400.0, Lowering.MAX_AUTOTUNE: 500.0}, [])
    bench = Bench(rewritten=Speed(300.0), fused=Speed(300.0), inductor=Speed(inductor_us), max_autotune=Speed(max_autotune_us))
    report = compare(bench, compiled=True)
    found = rows(report)
    assert report.lowering == kept
    assert {name: found[name].sequential_us for name in ("inductor", "max_autotune")} == pytest.approx(
        {"inductor": inductor_us, "max_autotune": max_autotune_us}, rel=1e-3
    )
    assert list(bench.sessions) == ["rewritten", "fused", "inductor", "max_autotune"]
    assert all(session.closed for session in bench.sessions.values())


@pytest.mark.parametrize("answer", ["the launches are not understood", UnsupportedGraph("no")])
def test_where_that_mode_cannot_be_had_inductors_defaults_stay(
    compare: Callable[..., TuneReport], monkeypatch: pytest.MonkeyPatch, answer: str | AutoschedError
) -> None:
    rivals(monkeypatch, {Lowering.INDUCTOR: 10e3, Lowering.MAX_AUTOTUNE: 7e3}, [])
    bench = Bench(rewritten=Speed(300.0), fused=Speed(300.0), inductor=Speed(100.0))
    report = compare(bench, compiled=True, refuse={"max_autotune": answer})
    found = rows(report)
    assert report.lowering == "inductor"
    assert found["max_autotune"].outcome is LoweringOutcome.FAILED
    assert str(answer) in found["max_autotune"].why


def test_what_a_baseline_has_compiled_is_there_however_short_the_budget(
    compare: Callable[..., TuneReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    rivals(monkeypatch, {Lowering.INDUCTOR: 10e3, Lowering.MAX_AUTOTUNE: 17e3}, [])
    bench = Bench(rewritten=Speed(300.0), inductor=Speed(100.0))
    report = compare(bench, compiled=True, budget_s=2.0)
    assert report.lowering == "inductor"
    assert "at least 5 s are needed" in rows(report)["fused"].why
    [said] = [note for note in report.notes if note.startswith("left out for want of time")]
    assert "the lowering fused" in said
    assert "the lowering inductor" not in said
    assert re.search(r"--budget \d+0s should include all of it", said)


def test_inductors_code_stands_in_where_nothing_else_can_be_had(
    compare: Callable[..., TuneReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    rivals(monkeypatch, {Lowering.INDUCTOR: 10e3, Lowering.MAX_AUTOTUNE: 7e3}, [])
    refused: dict[str, str | AutoschedError] = {name: UnsupportedGraph(name) for name in ("rewritten", "fused")}
    report = compare(Bench(inductor=Speed(100.0)), compiled=True, refuse=refused)
    assert report.lowering == "inductor"


def test_without_compiled_rivals_there_is_nothing_to_adopt(compare: Callable[..., TuneReport], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    rivals(monkeypatch, {Lowering.INDUCTOR: 10e3, Lowering.MAX_AUTOTUNE: 7e3}, made)
    report = compare(Bench(rewritten=Speed(300.0), fused=Speed(300.0), inductor=Speed(100.0)), compiled=False)
    assert made == []
    assert [row.lowering for row in report.lowerings] == ["rewritten", "fused", "inductor"]


def test_a_gpu_has_another_library_for_many_products_only(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = torch.nn.Sequential(*(layer for _ in range(3) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh())))
    convolutions = torch.nn.Sequential(*(layer for _ in range(16) for layer in (torch.nn.Conv2d(4, 4, 1), torch.nn.Tanh())))
    few = torch.nn.Sequential(convolutions, torch.nn.Flatten(), torch.nn.Linear(16, 4))
    programs = [capture(model.eval(), (x,)).program for model, x in ((layers, torch.ones(2, 8)), (few, torch.ones(1, 4, 2, 2)))]
    monkeypatch.setattr(contest.blas_lt, "supported", lambda: True)
    assert [contest._has_other_products(program, "cuda") for program in programs] == [True, False]
    assert not contest._has_other_products(programs[0], "cpu")
    monkeypatch.setattr(contest.blas_lt, "supported", lambda: False)
    assert not contest._has_other_products(programs[0], "cuda")
