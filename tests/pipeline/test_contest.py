"""The choice among lowerings, on a device whose times the test decides: it follows them, survives failures, and says what it did."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from autosched.core.errors import AutoschedError, NoFeasibleCandidate, UnsupportedGraph
from autosched.core.progress import Silent
from autosched.core.records import Failure, FailureKind, Samples
from autosched.core.report import LoweringOutcome, LoweringRow, TuneReport
from autosched.core.variants import Lowering
from autosched.pipeline import contest, granularity, job, preparing
from autosched.pipeline.budget import budget_for
from autosched.pipeline.contest import LEAST_COMPILE_S, LEAST_REGIONS_S
from autosched.pipeline.memory import forget_measurements
from autosched.pipeline.preparing import NotHad
from autosched.pipeline.qualification import Entrant, Qualified, contenders
from tests.conformance.contest_double import Bench, Branches, Speed, comparing, rows, steady_clock


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    steady_clock(monkeypatch)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., TuneReport]:
    return comparing(monkeypatch, tmp_path)


def test_the_fastest_in_order_is_tuned_and_the_others_are_dropped_where_lanes_cannot_help(compare: Callable[..., TuneReport]) -> None:
    bench = Bench(rewritten=Speed(300.0), fused=Speed(100.0), inductor=Speed(200.0))
    report = compare(bench)
    assert report.lowering == "fused"
    found = rows(report)
    assert list(found) == ["rewritten", "fused", "inductor"]
    assert [found[name].outcome for name in found] == [LoweringOutcome.DROPPED, LoweringOutcome.KEPT, LoweringOutcome.DROPPED]
    for name, speed in bench.speeds.items():
        row = found[name]
        assert row.sequential_us == pytest.approx(speed.sequential_us, rel=0.01)
        assert row.ci_us is not None
        assert row.ci_us[0] <= row.sequential_us <= row.ci_us[1]  # type: ignore[operator]
        assert row.operators
    assert "fused takes 100 us in order" in found["inductor"].why
    assert found["fused"].why == ""
    assert found["fused"].tuned_us == pytest.approx(100.0, rel=0.01)
    assert found["inductor"].tuned_us is None
    assert all(session.closed for session in bench.sessions.values())
    # Qualification has measured the operators: tuning finds them in the journal.
    assert bench.sessions["fused"].asked_solo == 1


def test_a_slower_one_that_lanes_could_put_in_front_is_tuned_too_and_wins_the_duel(compare: Callable[..., TuneReport]) -> None:
    # The second in order gains by lanes what the first does not.
    bench = Bench(rewritten=Speed(105.0, lanes_us=60.0), fused=Speed(500.0), inductor=Speed(100.0))
    report = compare(bench, Branches())
    found = rows(report)
    assert report.lowering == "rewritten"
    assert found["inductor"].outcome is LoweringOutcome.TUNED
    assert "rewritten, tuned, takes 0.6" in found["inductor"].why
    assert found["fused"].outcome is LoweringOutcome.DROPPED
    assert found["rewritten"].tuned_us == pytest.approx(60.0, rel=0.01)
    assert found["inductor"].tuned_us == pytest.approx(100.0, rel=0.01)


def test_with_too_little_left_for_two_only_the_first_in_order_is_tuned(
    compare: Callable[..., TuneReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "_spare_s", lambda options, begin: 0.39 * options.budget.total_s)
    bench = Bench(rewritten=Speed(105.0, lanes_us=60.0), fused=Speed(500.0), inductor=Speed(100.0))
    found = rows(compare(bench, Branches()))
    assert found["inductor"].outcome is LoweringOutcome.KEPT
    assert found["rewritten"].outcome is LoweringOutcome.DROPPED
    assert "enough for one lowering" in found["rewritten"].why
    assert "500" in found["fused"].why or "at best" in found["fused"].why


@pytest.mark.parametrize(
    ("fused_us", "promise", "first"),
    [(100.0, (60.0, 60.0), "rewritten"), (97.0, (60.0, 60.0), "fused"), (100.0, (95.0, 80.0), "rewritten"), (100.0, (95.0, 90.0), "fused")],
)
def test_among_equals_in_order_the_one_with_more_to_gain_comes_first(fused_us: float, promise: tuple[float, float], first: str) -> None:
    @dataclasses.dataclass
    class Timed:
        name: str
        sequential: Samples
        promise: tuple[float, float]

        @property
        def at_best_us(self) -> float:
            return self.promise[0]

    def timed(name: str, time_us: float, promise: tuple[float, float]) -> Any:
        return Timed(name, Samples(time_us, time_us, time_us, time_us, time_us, 9), promise)

    fused, rewritten = timed("fused", fused_us, (95.0, 90.0)), timed("rewritten", 101.0, promise)
    found = contenders([fused, rewritten])
    assert found[0].name == first
    assert {item.name for item in found} == {"fused", "rewritten"}
    assert contenders([fused]) == [fused]


@pytest.mark.parametrize(("alone_us", "expected_us"), [(150.0, 60.0), (80.0, 90.0), (float("nan"), 90.0)])
def test_a_bound_from_times_of_a_slower_moment_is_brought_to_the_pace_of_the_rounds(alone_us: float, expected_us: float) -> None:
    cpu: Any = SimpleNamespace(device=SimpleNamespace(key=SimpleNamespace(kind="cpu")))
    timed = Qualified(Entrant(cpu, (), (), 90.0), Samples(100.0, 99.0, 101.0, 101.0, 99.0, 9), alone_us)
    assert timed.bound_us == pytest.approx(expected_us)
    assert timed.promise == (timed.at_best_us, timed.bound_us)
    assert timed.at_best_us == timed.bound_us


def test_the_first_in_order_stays_where_the_other_is_no_faster_beyond_noise(compare: Callable[..., TuneReport]) -> None:
    report = compare(Bench(rewritten=Speed(103.0, lanes_us=100.0), fused=Speed(900.0), inductor=Speed(100.0)), Branches())
    assert report.lowering == "inductor"
    assert rows(report)["rewritten"].outcome is LoweringOutcome.TUNED


def test_a_lowering_that_is_refused_or_cannot_be_captured_or_run_is_noted(compare: Callable[..., TuneReport]) -> None:
    bench = Bench(rewritten=Speed(300.0), fused=Speed(100.0), inductor=Speed(200.0))
    found = rows(compare(bench, refuse={"inductor": "its code is not understood", "fused": UnsupportedGraph("no regions")}))
    assert found["inductor"].outcome is found["fused"].outcome is LoweringOutcome.FAILED
    assert "not understood" in found["inductor"].why
    assert "no regions" in found["fused"].why
    assert found["rewritten"].outcome is LoweringOutcome.KEPT
    bench.speeds["fused"].broken = Failure(FailureKind.CRASH, "the kernel crashed")
    found = rows(compare(bench))
    assert found["fused"].outcome is LoweringOutcome.FAILED
    assert "the kernel crashed" in found["fused"].why
    assert found["inductor"].outcome is LoweringOutcome.KEPT


def test_the_next_one_stands_in_for_a_winner_that_does_not_come_through(compare: Callable[..., TuneReport]) -> None:
    bench = Bench(rewritten=Speed(300.0), fused=Speed(100.0, wrong=Failure(FailureKind.MISMATCH, "other numbers")), inductor=Speed(200.0))
    report = compare(bench)
    found = rows(report)
    assert report.lowering == "inductor"
    assert found["fused"].outcome is LoweringOutcome.FAILED
    assert "other numbers" in found["fused"].why
    assert found["inductor"].outcome is LoweringOutcome.KEPT
    assert found["rewritten"].outcome is LoweringOutcome.DROPPED


def test_if_nothing_comes_through_the_first_error_is_the_users(compare: Callable[..., TuneReport]) -> None:
    with pytest.raises(UnsupportedGraph, match="the first"):
        compare(Bench(), refuse={name: UnsupportedGraph(f"the {name}") for name in ("first", "rewritten")} | _all_refused())
    wrong = Failure(FailureKind.MISMATCH, "other numbers")
    with pytest.raises(NoFeasibleCandidate, match="other numbers"):
        compare(Bench(**{name: Speed(100.0, wrong=wrong) for name in ("rewritten", "fused", "inductor", "aten")}))
    with pytest.raises(NoFeasibleCandidate, match="other numbers"):
        compare(
            Bench(**{name: Speed(100.0, wrong=wrong) for name in ("rewritten", "fused", "inductor")}), refuse={"aten": UnsupportedGraph("")}
        )


def test_where_every_lowering_answers_otherwise_the_models_own_calls_are_tuned(compare: Callable[..., TuneReport]) -> None:
    wrong = Failure(FailureKind.MISMATCH, "other numbers")
    bench = Bench(aten=Speed(300.0, lanes_us=200.0), **{name: Speed(100.0, wrong=wrong) for name in ("rewritten", "fused", "inductor")})
    report = compare(bench, Branches())
    found = rows(report)
    assert report.lowering == "aten"
    assert found["aten"].outcome is LoweringOutcome.KEPT
    assert found["aten"].tuned_us == pytest.approx(200.0, rel=0.01)
    assert all(found[name].outcome is LoweringOutcome.FAILED for name in ("rewritten", "fused", "inductor"))
    assert bench.sessions["aten"].closed


def _all_refused() -> dict[str, AutoschedError]:
    return {"rewritten": UnsupportedGraph("the first"), "fused": UnsupportedGraph("second"), "inductor": UnsupportedGraph("third")}


def test_without_a_compiler_there_is_one_lowering_and_the_reason(
    compare: Callable[..., TuneReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(granularity, "missing_compiler", lambda kind: "there is no C++ compiler; install g++")
    report = compare(Bench(rewritten=Speed(100.0)))
    assert report.lowering == "rewritten"
    assert {name: row.outcome for name, row in rows(report).items()} == {
        "rewritten": LoweringOutcome.KEPT,
        "fused": LoweringOutcome.SKIPPED,
        "inductor": LoweringOutcome.SKIPPED,
    }
    assert rows(report)["inductor"].why == "there is no C++ compiler; install g++"


def test_a_budget_too_small_for_a_compiler_buys_none(compare: Callable[..., TuneReport]) -> None:
    bench = Bench(rewritten=Speed(100.0))
    report = compare(bench, budget_s=2.0)
    assert list(bench.sessions) == ["rewritten"]
    assert "at least 5 s are needed" in rows(report)["fused"].why
    [said] = [note for note in report.notes if note.startswith("left out for want of time")]
    assert "the lowering fused" in said
    assert "the lowering inductor" in said
    assert re.search(r"--budget \d+0s should include all of it", said)
    assert rows(report)["inductor"].outcome is LoweringOutcome.SKIPPED


@pytest.mark.parametrize(
    ("options", "refuse", "said"),
    [
        ({"budget_s": 2.0}, {}, "the same command gets further"),
        ({}, {"inductor": NotHad("Inductor had not compiled the whole model", 90.0)}, "(Inductor had not compiled the whole model)"),
        ({}, {"inductor": "its code is not understood"}, "(its code is not understood)"),
        ({}, {}, ""),
        ({"lowering": "rewritten", "budget_s": 2.0}, {}, ""),
    ],
)
def test_a_job_that_has_timed_nothing_of_a_compiler_for_whole_models_says_so_first_and_last(
    options: dict[str, Any], refuse: dict[str, Any], said: str, compare: Callable[..., TuneReport]
) -> None:
    report = compare(Bench(rewritten=Speed(100.0), fused=Speed(90.0), inductor=Speed(200.0)), refuse=refuse, **options)
    notes = [note for note in report.notes if note.startswith("neither torch.compile nor its code")]
    assert len(notes) == bool(said)
    assert report.verdict.endswith("torch.compile was not measured, nor its code, and may be faster.") is bool(said)
    if said:
        assert said in notes[0]
        assert "--effort balanced" in notes[0]
        assert report.notes[-1] == notes[0]
        assert ("the same command" in notes[0]) is (rows(report)["inductor"].outcome is LoweringOutcome.SKIPPED)


def test_a_lowering_that_is_asked_for_is_the_only_one(compare: Callable[..., TuneReport]) -> None:
    bench = Bench(fused=Speed(100.0), aten=Speed(100.0))
    assert compare(bench, lowering="fused").lowerings == ()
    assert compare(bench, rewrite=False).lowering == "aten"
    assert list(bench.sessions) == ["fused", "aten"]


@pytest.mark.parametrize("effort", ["quick", "balanced", "full"])
def test_compiling_has_its_share_and_tuning_the_rest(
    effort: str, compare: Callable[..., TuneReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, float | None] = {}
    budgets: list[float] = []
    prepare, run = contest.prepare, job.Job.run

    def limited(lowering: Lowering, *call: Any, limit_s: float | None = None) -> Any:
        limits[lowering] = limit_s
        return prepare(lowering, *call, limit_s=limit_s)

    def counted(self: job.Job) -> Any:
        budgets.append(self._options.budget.total_s)
        return run(self)

    monkeypatch.setattr(contest, "prepare", limited)
    monkeypatch.setattr(job.Job, "run", counted)
    compare(Bench(rewritten=Speed(300.0), fused=Speed(100.0), inductor=Speed(200.0)), effort=effort)
    budget = budget_for(effort)
    share_s = budget.compile_share * budget.total_s
    assert LEAST_COMPILE_S < share_s < budget.total_s
    assert limits["rewritten"] is None
    assert limits["fused"] is not None
    assert limits["fused"] <= share_s / 2
    assert limits["inductor"] is not None
    assert limits["inductor"] <= share_s
    [tuning_s] = budgets
    assert 0.25 * budget.total_s <= tuning_s <= budget.total_s


def test_no_time_is_set_aside_for_a_compiler_that_cannot_finish_in_it(
    compare: Callable[..., TuneReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, float] = {}
    prepare = contest.prepare

    def limited(lowering: Lowering, *call: Any, limit_s: float | None = None) -> Any:
        limits[lowering] = limit_s if limit_s is not None else 0.0
        return prepare(lowering, *call, limit_s=limit_s)

    monkeypatch.setattr(contest, "prepare", limited)
    bench = Bench(rewritten=Speed(300.0), fused=Speed(100.0), inductor=Speed(200.0))
    share_s = 0.6 * 60.0
    for needs_s, fused_s in ((1.0, share_s / 2), (share_s, share_s)):
        monkeypatch.setattr(contest, "compiling_needs_s", lambda lowering, *call, needs_s=needs_s: needs_s)
        compare(bench)
        assert 0.8 * fused_s < limits["fused"] <= fused_s


def test_two_jobs_divide_what_is_left_and_leave_a_duel_its_part() -> None:
    options = dataclasses.replace(_options(), budget=budget_for("full", 1000.0))
    begin = time.monotonic()
    assert contest._left_s(options, begin, others=0, tuned=False) == pytest.approx(1000.0, abs=5.0)
    assert contest._left_s(options, begin, others=1, tuned=False) == pytest.approx(450.0, abs=5.0)
    assert contest._left_s(options, begin - 500.0, others=0, tuned=True) == pytest.approx(400.0, abs=5.0)
    # However long compiling took, tuning gets something: a quarter as long as the job ends soon after its budget, else a tenth.
    assert contest._left_s(options, begin - 800.0, others=0, tuned=False) == pytest.approx(250.0, abs=5.0)
    assert contest._left_s(options, begin - 900.0, others=0, tuned=False) == pytest.approx(200.0, abs=5.0)
    assert contest._left_s(options, begin - 5000.0, others=0, tuned=False) == pytest.approx(100.0)


def _options() -> Any:
    from autosched.pipeline.options import Options

    return Options("cpu", "quick", budget_for("quick"), 0, Lowering.REWRITTEN, False, None, True, False, "m")


def test_the_report_says_it_as_text_and_as_json(compare: Callable[..., TuneReport]) -> None:
    report = compare(Bench(rewritten=Speed(300.0), fused=Speed(100.0), inductor=Speed(200.0)), refuse={"inductor": "no time"})
    again = msgspec.json.decode(msgspec.json.encode(report), type=TuneReport)
    assert again.lowerings == report.lowerings
    assert rows(report)["inductor"].sentence() == "inductor failed: no time"
    assert rows(report)["rewritten"].sentence().startswith("rewritten dropped: ")
    assert report.measurements > 0


def test_what_is_to_be_fresh_is_forgotten_once_before_anything_is_measured(
    compare: Callable[..., TuneReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[str] = []

    def forget(room: str) -> Callable[[Any], None]:
        def counted(device: Any) -> None:
            forgotten.append(room)
            forget_measurements(device)

        return counted

    for place in (contest, job):
        monkeypatch.setattr(place, "forget_measurements", forget(place.__name__))
    ask = contest.run_contest

    def fresh(model: Any, args: Any, kwargs: Any, options: Any, choice: Any, progress: Any) -> Any:
        return ask(model, args, kwargs, dataclasses.replace(options, fresh=True), choice, progress)

    monkeypatch.setattr(contest, "run_contest", fresh)
    bench = Bench(rewritten=Speed(300.0), fused=Speed(100.0), inductor=Speed(200.0))
    compare(bench)
    assert forgotten == [contest.__name__]
    assert bench.sessions["fused"].asked_solo == 1


@pytest.fixture
def regions_first(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], tuple[list[str], dict[Lowering, float | None]]]:
    """What is ready, and how long each may compile, with a budget and regions that take 30 of 34 seconds, as on a GPU the first."""

    def with_budget(total_s: float) -> tuple[list[str], dict[Lowering, float | None]]:
        limits: dict[Lowering, float | None] = {}

        def prepare(lowering: Lowering, *call: Any, limit_s: float | None = None) -> preparing.Prepared:
            limits[lowering] = limit_s
            captured: Any = SimpleNamespace(program=SimpleNamespace(graph=(), lowering=str(lowering)))
            session: Any = SimpleNamespace(close=lambda: None)
            return preparing.Prepared(captured, Bench(), session, (), 34.0, regions_s=30.0)

        monkeypatch.setattr(contest, "prepare", prepare)
        monkeypatch.setattr(contest, "_fitting", lambda *given: 0)
        monkeypatch.setattr(contest, "reserve_s", lambda *given: 0.0)
        options = dataclasses.replace(_options(), budget=budget_for("quick", total_s))
        course = contest._Course({name: LoweringRow(name, LoweringOutcome.SKIPPED) for name in (Lowering.FUSED, Lowering.INDUCTOR)})
        original: Any = SimpleNamespace(export_s=0.0)
        with contextlib.ExitStack() as stack:
            ready, _ = contest._prepared(stack, original, options, (Lowering.FUSED, Lowering.INDUCTOR), Bench(), Silent(), course)
        return [item.lowering for item in ready], limits

    return with_budget


def test_what_regions_took_to_compile_is_not_set_aside_for_the_next_capture(regions_first: Callable[[float], Any]) -> None:
    ready, limits = regions_first(60.0)
    assert ready == ["fused", "inductor"]
    share_s = budget_for("quick").compile_share * 60.0
    assert limits[Lowering.FUSED] == pytest.approx(share_s)
    assert limits[Lowering.INDUCTOR] == pytest.approx(share_s - 4.0, abs=2.0)


def test_no_process_is_started_for_regions_that_cannot_be_made_in_time(regions_first: Callable[[float], Any]) -> None:
    just = LEAST_REGIONS_S / budget_for("quick").compile_share
    assert regions_first(just + 1.0)[1][Lowering.FUSED] > LEAST_REGIONS_S
    ready, limits = regions_first(just - 1.0)
    assert ready[0] == "fused"
    assert limits[Lowering.FUSED] == 0.0
