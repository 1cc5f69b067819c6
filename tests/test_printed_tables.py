"""What is printed is what there is: brackets are no markup, nothing is cut off, and a narrow terminal loses columns, not readability."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from typing import Any

import pytest
import typer
from rich.console import Console

from autosched.cli.printing import complain, results_console, show_report, tell
from autosched.cli.shapes import show_shapes
from autosched.cli.strategy_table import strategy_table
from autosched.core.progress import OUTSIDE
from autosched.core.records import Failure, FailureKind, Source
from autosched.core.report import RESTLESS, StrategyRow, TuneReport
from autosched.pipeline.shapes import ShapesReport
from autosched.progress import LiveProgress
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches


@pytest.fixture(scope="module")
def report() -> TuneReport:
    return two_branches_bundle(TwoBranches()).evidence.report


def test_brackets_in_names_details_and_notes_are_printed(report: TuneReport, capsys: pytest.CaptureFixture[str]) -> None:
    detail = "bad [/shape] in [red]aten[/red], and the sentence goes on after the fortieth letter"
    failed = dataclasses.replace(report.strategies[-1], failure=Failure(FailureKind.CRASH, detail))
    notes = ("pip install 'autosched[cuda]'",)
    shown = dataclasses.replace(report, model="m[/b]", strategies=(*report.strategies[:-1], failed), notes=notes, verdict="kept [/x]")
    show_report(shown, as_json=False)
    printed = capsys.readouterr().out
    for words in ("m[/b]", detail, "pip install 'autosched[cuda]'", "kept [/x]"):
        assert words in printed


def test_what_was_written_is_followed_by_what_to_do_with_it(report: TuneReport, capsys: pytest.CaptureFixture[str]) -> None:
    show_report(dataclasses.replace(report, bundle="my model.autosched"), as_json=False)
    printed = capsys.readouterr().out
    assert "autosched bench 'my model.autosched'" in printed
    assert "autosched.load('my model.autosched', model)" in printed


def test_without_a_file_the_last_lines_say_where_the_schedule_is_and_how_to_use_it(
    report: TuneReport, capsys: pytest.CaptureFixture[str]
) -> None:
    show_report(dataclasses.replace(report, cached="/my cache/a.autosched"), as_json=False)
    printed = capsys.readouterr().out
    for words in ("kept in the cache: /my cache/a.autosched", "autosched bench '/my cache/a.autosched'", 'backend="autosched"', "-o FILE"):
        assert words in printed
    show_report(report, as_json=False)  # a comparison keeps nothing
    assert "kept in the cache" not in capsys.readouterr().out


def test_what_to_do_next_names_the_model_and_operators_that_no_library_has(report: TuneReport, capsys: pytest.CaptureFixture[str]) -> None:
    mine = dataclasses.replace(report, model="my models/saved.pt2")
    show_report(dataclasses.replace(mine, bundle="a.autosched"), as_json=False, namespaces=("mylib", "other"))
    printed = capsys.readouterr().out
    assert "autosched bench a.autosched 'my models/saved.pt2' --custom-operators mylib,other\n" in printed
    assert "autosched.load('a.autosched', model, custom_operators=['mylib', 'other'])" in printed
    show_report(dataclasses.replace(mine, cached="c.autosched"), as_json=False, namespaces=("mylib",))
    printed = capsys.readouterr().out
    assert "autosched bench c.autosched 'my models/saved.pt2' --custom-operators mylib\n" in printed
    assert """torch.compile(model, backend="autosched", options={"custom_operators": ['mylib']})""" in printed
    assert "autosched.compile(model, inputs, custom_operators=['mylib'])" in printed
    show_report(dataclasses.replace(report, bundle="a.autosched"), as_json=False)
    assert "autosched bench a.autosched\n" in capsys.readouterr().out


def found(report: TuneReport, *names: str, measured_us: float = 9.0, **changes: Any) -> tuple[StrategyRow, ...]:
    row = dataclasses.replace(report.strategies[0], measured_us=measured_us, predicted_us=8.0, is_baseline=False, **changes)
    return tuple(dataclasses.replace(row, name=name) for name in names)


def test_a_schedule_that_several_found_is_shown_once_and_all_are_named(report: TuneReport, capsys: pytest.CaptureFixture[str]) -> None:
    (first, *rest) = found(report, "estf", "beam", "the_kept", "anneal")
    rows = (dataclasses.replace(first, is_baseline=True), *rest, *found(report, "random", "portfolio", measured_us=9.5))
    shown = dataclasses.replace(report, strategies=rows, chosen="the_kept")
    show_report(shown, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("│")[1].strip() for line in lines if "│" in line] == ["the_kept (kept, baseline) = 3 others", "random = portfolio"]
    assert "estf, beam, anneal found the schedule of the_kept, too" in lines
    text = shown.summary().splitlines()
    assert sum("us measured" in line for line in text) == 2
    assert any(line.startswith("  the_kept = 3 others ") for line in text)
    assert "  estf, beam, anneal found the schedule of the_kept, too" in text
    # Whoever reads JSON gets a row for each strategy, as ever.
    show_report(shown, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in printed["strategies"]] == ["estf", "beam", "the_kept", "anneal", "random", "portfolio"]
    assert set(printed["strategies"][0]) == {field.name for field in dataclasses.fields(StrategyRow)}


@pytest.mark.parametrize(
    "changes",
    [
        {"source": Source.SIMULATED},  # which may tell the same of different ones
        {"predicted_us": None},  # no schedules
        {"measured_us": None, "ci_us": None, "failure": Failure(FailureKind.CRASH, "boom")},
    ],
)
def test_what_is_not_known_to_be_one_schedule_is_shown_apart(report: TuneReport, changes: dict[str, Any]) -> None:
    rows = tuple(dataclasses.replace(row, **changes) for row in found(report, "a", "b"))
    assert [(item.row.name, item.others) for item in dataclasses.replace(report, strategies=rows).schedules()] == [("a", ()), ("b", ())]


@pytest.mark.parametrize("width", [80, 100, 120, 130, 200])
def test_a_narrow_terminal_shows_fewer_columns_and_cuts_no_cell(report: TuneReport, width: int) -> None:
    long = dataclasses.replace(
        report.strategies[0], name="linear_clustering", is_baseline=True, measured_us=25_319.0, ci_us=(23_352.0, 428_764.0),
        predicted_us=25_250.0, speedup_vs_sequential=0.952, speedup_vs_best_baseline=0.952,
    )  # fmt: skip
    console = Console(width=width, file=io.StringIO())
    table, dropped = strategy_table(dataclasses.replace(report, strategies=(long, *report.strategies)), console)
    console.print(table)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    (line,) = (line for line in printed.splitlines() if "linear_clustering" in line)
    for cell in ("linear_clustering (baseline)", "25,319", "23,352 - 428,764", "0.952x"):
        assert cell in line
    assert max(map(len, printed.splitlines())) <= width
    assert bool(dropped) == (width < 130)  # at 130 without the frame, but with all columns
    assert ("┃" in printed) == (width == 200)


def test_an_error_on_a_terminal_breaks_between_words_and_leaves_paths_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/a/folder-with/" + "a-long-name/" * 8
    message = (
        f"autosched: cannot write {path}: there is no such folder; make it first, or name another one that exists\n  and a second line"
    )
    complain(message)
    assert capsys.readouterr().err == message + "\n"  # as it is, for a log
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    complain(message)
    lines = capsys.readouterr().err.splitlines()
    assert " ".join(lines).split() == message.split()
    assert f"{path}:" in lines
    assert lines[-1] == "  and a second line"
    assert all(len(line) <= 80 for line in lines if path not in line)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_result_on_a_terminal_breaks_between_words_and_keeps_its_indent(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "runs:dog:/[red]/trace.json"
    result = (
        f"13 operators on 1 lane over 1,149 us written to {path}\n"
        "  tuned (sequential), as loaded: 2,212 us; 90 of 100 within 2,611, 99 within 2,703; no difference beyond the noise floor"
    )
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "80")
    assert results_console().is_terminal == terminal
    tell(result)
    printed = capsys.readouterr().out
    assert path in printed
    if not terminal:
        assert printed == result + "\n"  # as it is, for a log
        return
    lines = printed.splitlines()
    assert printed.split() == result.split()
    assert len(lines) == 3
    assert all(len(line) <= 80 for line in lines)
    assert [line.startswith("  ") for line in lines] == [False, True, True]


@pytest.mark.parametrize("width", [None, 60, 80, 97, 150])
def test_what_a_note_says_to_type_is_not_broken_over_two_lines(
    width: int | None, report: TuneReport, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = ("'autosched collect -o runs'", "'autosched train runs'", "--budget 70s")
    note = (
        f"856 pairs of kernels that can meet are predicted by the analytic prior alone, for it is the model's own ({commands[0]}, then "
        f"{commands[1]} makes a cost model); left out for want of time: the device loop; {commands[2]} should include all of it"
    )
    console = Console(width=width, file=io.StringIO(), force_terminal=True) if width is not None else Console(width=150)
    monkeypatch.setattr("autosched.cli.printing.results_console", lambda: console)
    show_report(dataclasses.replace(report, notes=(note,)), as_json=False)
    printed = console.file.getvalue() if width is not None else capsys.readouterr().out  # type: ignore[attr-defined]
    assert all(command in printed for command in commands)
    assert note.split() == [word for word in printed[printed.index("note: ") + 6 :].split()][: len(note.split())]
    assert (note in printed) == (width is None)  # a file has it as one line
    if width is not None:
        assert all(len(line) <= width for line in printed[printed.index("note: ") :].splitlines())


def test_a_narrow_terminal_sees_the_stage_and_the_time_left() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=20)
    with LiveProgress(console) as progress:
        progress.stage("shape 1 of 2: operators in pairs", 120.0)
        progress.update(done=3, total=400, incumbent="linear_clustering 10,570 us (1.23x)", measured=12_345, failed=2)
        progress._bar.refresh()
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert re.search(r"shape 1 of 2: operators in pairs .* 3/400 1[12]\d s left, linear", drawn)


def test_only_what_is_counted_has_a_count() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=20)
    with LiveProgress(console) as progress:
        progress.stage("capture", 30.0)
        progress._bar.refresh()
        assert "0/1" not in out.getvalue()
        progress.update(done=3, total=7)
        progress._bar.refresh()
        assert "3/7" in out.getvalue()
        out.truncate(0)
        progress.stage("search")
        progress._bar.refresh()
        assert "/7" not in out.getvalue()


def test_the_progress_of_a_log_file_is_one_line_a_stage_and_never_promises_no_time() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with LiveProgress(console) as progress:
        progress.stage("operators alone", 30.2)
        progress.update(done=1, total=2, left_s=20.0)
        progress.stage("final comparison", 0.0)
        progress.update(done=1, total=2)
    assert re.fullmatch(
        r"autosched: operators alone \(\d+ s left\)\nautosched: final comparison \(budget spent, finishing\)\n",
        console.file.getvalue(),  # type: ignore[attr-defined]
    )


def test_a_stage_that_takes_nothing_from_the_budget_says_so() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with LiveProgress(console) as progress:
        progress.stage("other lowerings", 4.2)
        progress.stage("baseline torch_compile", OUTSIDE)
        progress.stage("capture, inductor")
        progress.stage("operators alone", 4.2)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "autosched: other lowerings (4 s left)",
        "autosched: baseline torch_compile (not in the budget)",
        "autosched: capture, inductor (not in the budget)",
        "autosched: operators alone (4 s left)",
    ]


@pytest.mark.parametrize("as_json", [True, False])
def test_a_noisy_machine_is_said_of_several_shapes_as_of_one(as_json: bool, report: TuneReport, capsys: pytest.CaptureFixture[str]) -> None:
    several = ShapesReport((report, dataclasses.replace(report, unstable=True)))
    with pytest.raises(typer.Exit) as ended:
        show_shapes(several, (1, 4), as_json)
    assert ended.value.exit_code == 3
    assert capsys.readouterr().err == f"autosched: {RESTLESS}\n"
