"""What compiled baselines mean for the choice among lowerings: the fastest one's mode is taken apart, on a device of the test's times."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from autosched.core.errors import AutoschedError, UnsupportedGraph
from autosched.core.report import LoweringOutcome, TuneReport
from autosched.core.variants import Lowering
from autosched.pipeline import baselines
from tests.conformance.contest_double import Bench, Branches, Speed, comparing, rows, steady_clock


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    steady_clock(monkeypatch)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., TuneReport]:
    return comparing(monkeypatch, tmp_path)


def rivals(monkeypatch: pytest.MonkeyPatch, times_us: Mapping[Lowering, float], made: list[str]) -> None:
    """Compiled baselines that take these times; what becomes of them goes to ``made``."""

    class Rival:
        max_abs_error = 0.0

        def __init__(self, *call: Any, lowering: Lowering, **options: Any) -> None:
            self._lowering = lowering
            made.append(f"{lowering} compiled")

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

    rivals(monkeypatch, {Lowering.INDUCTOR: 80.0, Lowering.MAX_AUTOTUNE: 90.0}, made)
    report = compare(Bench(rewritten=Speed(105.0, lanes_us=60.0), fused=Speed(500.0), inductor=Speed(100.0)), Branches(), compiled=True)
    assert made == ["inductor compiled", "inductor prepared", "max_autotune compiled", "max_autotune prepared"] + ["closed"] * 2
    assert report.lowering == "rewritten"
    found = {row.name: row for row in report.strategies}
    assert found["torch_compile"].is_baseline
    assert found["max_autotune"].is_baseline
    assert found["torch_compile"].measured_us == pytest.approx(80.0)
    budgeted = {stage.name: stage.in_budget for stage in report.stages}
    assert not budgeted["baseline torch_compile"]
    assert not budgeted["baseline max_autotune"]
    assert budgeted["final comparison"]


def test_the_mode_of_the_fastest_rival_takes_the_place_of_inductors_defaults(
    compare: Callable[..., TuneReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    rivals(monkeypatch, {Lowering.INDUCTOR: 100.0, Lowering.MAX_AUTOTUNE: 70.0}, [])
    bench = Bench(rewritten=Speed(300.0), fused=Speed(300.0), inductor=Speed(100.0), max_autotune=Speed(70.0))
    report = compare(bench, compiled=True)
    found = rows(report)
    assert report.lowering == "max_autotune"
    assert found["max_autotune"].outcome is LoweringOutcome.KEPT
    assert found["inductor"].outcome is LoweringOutcome.DROPPED
    assert "max_autotune is the fastest of torch.compile's ways here: 70 us; torch_compile 100 us" in found["inductor"].why
    # Compiled once, in the right mode.
    assert list(bench.sessions) == ["rewritten", "fused", "max_autotune"]
    assert all(session.closed for session in bench.sessions.values())


@pytest.mark.parametrize("answer", ["the launches are not understood", UnsupportedGraph("no")])
def test_where_that_mode_cannot_be_had_inductors_defaults_stay(
    compare: Callable[..., TuneReport], monkeypatch: pytest.MonkeyPatch, answer: str | AutoschedError
) -> None:
    rivals(monkeypatch, {Lowering.INDUCTOR: 100.0, Lowering.MAX_AUTOTUNE: 70.0}, [])
    bench = Bench(rewritten=Speed(300.0), fused=Speed(300.0), inductor=Speed(100.0))
    report = compare(bench, compiled=True, refuse={"max_autotune": answer})
    found = rows(report)
    assert report.lowering == "inductor"
    assert found["max_autotune"].outcome is LoweringOutcome.FAILED
    assert str(answer) in found["max_autotune"].why


def test_what_a_baseline_has_compiled_is_there_however_short_the_budget(
    compare: Callable[..., TuneReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    rivals(monkeypatch, {Lowering.INDUCTOR: 100.0, Lowering.MAX_AUTOTUNE: 170.0}, [])
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
    rivals(monkeypatch, {Lowering.INDUCTOR: 100.0, Lowering.MAX_AUTOTUNE: 70.0}, [])
    refused: dict[str, str | AutoschedError] = {name: UnsupportedGraph(name) for name in ("rewritten", "fused")}
    report = compare(Bench(inductor=Speed(100.0)), compiled=True, refuse=refused)
    assert report.lowering == "inductor"


def test_without_compiled_rivals_there_is_nothing_to_adopt(compare: Callable[..., TuneReport], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    rivals(monkeypatch, {Lowering.INDUCTOR: 100.0, Lowering.MAX_AUTOTUNE: 70.0}, made)
    report = compare(Bench(rewritten=Speed(300.0), fused=Speed(300.0), inductor=Speed(100.0)), compiled=False)
    assert made == []
    assert [row.lowering for row in report.lowerings] == ["rewritten", "fused", "inductor"]
