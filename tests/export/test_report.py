"""The report: everything in a bundle is shown, nothing in it is executed, and nothing is fetched."""

from __future__ import annotations

import builtins
import dataclasses
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest

from autosched.cli import main
from autosched.core.errors import UsageError
from autosched.core.records import Failure, FailureKind, Source
from autosched.core.report import StageTime
from autosched.export.bundle import encode_bundle
from autosched.export.report import report_html, write_report
from autosched.export.report_figures import figures, scatter_figure, timeline_figure
from autosched.runtime.bundle.format import Bundle, Evidence, OperatorTimes
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches

pytest.importorskip("plotly")
pytest.importorskip("jinja2")

_EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'{{ 7 * 7 }}"
# What may make a browser fetch something.
_FETCHING = re.compile(
    r"""(?:src|href|srcset|data|poster)\s*=\s*["']?\s*(?:https?:)?//|@import|url\(\s*["']?https?:|<link|<iframe""", re.IGNORECASE
)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return two_branches_bundle(TwoBranches())


@pytest.fixture(scope="module")
def page(bundle: Bundle) -> str:
    return report_html([bundle])


class _Reader(html.parser.HTMLParser):
    """Tags, and the text outside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.words.append(data)


def read(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    return reader


def without_library(page: str) -> str:
    """The page without plotly's own code, which holds the word of every tag there is."""
    begin = page.index("<script>")
    return page[:begin] + page[page.index("</script>", begin) :]


def evil(bundle: Bundle) -> Bundle:
    report = bundle.evidence.report
    rows = tuple(dataclasses.replace(row, name=f"{row.name}{_EVIL}") for row in report.strategies)
    rows += (dataclasses.replace(rows[-1], failure=Failure(FailureKind.CRASH, _EVIL), name="broken"),)
    bad = dataclasses.replace(
        report, model=_EVIL, verdict=_EVIL, notes=(_EVIL,), strategies=rows, chosen=rows[1].name, best_baseline=_EVIL, lowering=_EVIL
    )
    evidence = dataclasses.replace(bundle.evidence, report=bad, environment=((_EVIL, _EVIL),), rewrites=((_EVIL, 1),))
    operators = tuple(dataclasses.replace(item, name=f"{_EVIL}{item.index}", source=_EVIL) for item in bundle.program.graph.operators)
    graph = dataclasses.replace(bundle.program.graph, operators=operators)
    key = dataclasses.replace(bundle.key.device, name=_EVIL, details=((_EVIL, _EVIL),))
    parts = {name: getattr(bundle.key, name) for name in bundle.key.__struct_fields__} | {"device": key}
    return dataclasses.replace(
        bundle, evidence=evidence, program=dataclasses.replace(bundle.program, graph=graph), key=type(bundle.key)(**parts)
    )


def test_the_page_has_every_part(page: str, bundle: Bundle) -> None:
    reader = read(page)
    words = " ".join(" ".join(reader.words).split())
    report = bundle.evidence.report
    for expected in (
        report.model, report.verdict, "tuned schedule kept", "Strategies", "Timeline of the kept schedule", "Predicted against measured",
        "Operators", "Failures", "no compiler", "unavailable", "Rewriting and notes", "Environment", bundle.key.device.name,
        bundle.key.graph, "0.0105", "0.0110 to 0.0120", "1.095x", "seed of search",
    ):  # fmt: skip
        assert expected in words, expected
    ids = [value for name, value in reader.attributes if name == "id"]
    assert ids == ["strategies-0", "timeline-0", "scatter-0"]
    assert page.count('Plotly.newPlot("') == 3
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == [
        "Strategies", "Timeline of the kept schedule", "Predicted against measured", "Operators", "Failures",
        "Rewriting and notes", "Environment",
    ]  # fmt: skip
    operators = re.search(r'<table class="sortable operators">.*?<tbody>(.*?)</tbody>', page, re.DOTALL)
    assert operators is not None
    assert operators.group(1).count("<tr>") == len(bundle.program.graph)


def test_a_baseline_that_is_kept_is_marked_as_both_and_stands_for_its_equals(bundle: Bundle) -> None:
    report = bundle.evidence.report
    rows = [
        dataclasses.replace(report.strategies[0], name=name, is_baseline=True, measured_us=10.0)
        for name in ("a_twin", "the_kept", "b_twin")
    ]
    stages = (StageTime("search", 2.0), StageTime("baseline torch_compile", 61.5, False))
    shown = dataclasses.replace(report, strategies=tuple(rows), chosen="the_kept", stages=stages)
    changed = dataclasses.replace(bundle, evidence=dataclasses.replace(bundle.evidence, report=shown))
    made = report_html([changed])
    assert 'the_kept<span class="mark">kept</span><span class="mark">baseline</span>' in made
    assert "search 2.0 s; not in the budget: baseline torch_compile 61.5 s" in made
    bars = next(item.figure.data[0] for item in figures(changed) if item.place == "strategies-0")
    # The same schedule, found thrice.
    assert bars.y == ("the_kept",)
    assert '<div class="others">= a_twin, b_twin</div>' in made


def test_strategies_are_names_even_where_they_look_like_numbers(bundle: Bundle) -> None:
    figure = next(item.figure for item in figures(bundle) if item.place == "strategies-0")
    assert figure.layout.yaxis.type == "category"


def test_nothing_is_fetched(page: str) -> None:
    assert "default-src 'none'" in page
    assert _FETCHING.search(without_library(page)) is None
    reader = read(page)
    assert not {"link", "iframe", "img", "object", "embed", "base"} & set(reader.tags)
    assert not [value for name, value in reader.attributes if name in ("src", "href")]


def test_strings_of_a_stranger_are_shown_and_never_run(bundle: Bundle) -> None:
    page = without_library(report_html([evil(bundle)]))
    reader = read(page)
    # One more than figures: the sorting of tables; the library's own was cut out but for its end.
    assert page.count("<script>") == 4
    assert "alert(1)</script>" not in page
    assert "img" not in reader.tags
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    assert "49" not in "".join(word for word in reader.words if "alert" in word)
    # Shown letter by letter where it belongs.
    assert sum(_EVIL in word for word in reader.words) >= 8


def test_labels_of_figures_are_escaped_for_plotly(bundle: Bundle) -> None:
    for item in figures(evil(bundle)):
        for text in _strings(item.figure.to_plotly_json()["data"]):
            assert "<script" not in text
            assert "<img" not in text


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.values() for text in _strings(item)]
    return [text for item in value for text in _strings(item)] if isinstance(value, list | tuple) else []


def test_planned_stands_above_measured_on_every_lane(bundle: Bundle) -> None:
    figure = timeline_figure(bundle)
    assert figure is not None
    lanes = sorted(set(bundle.schedule.lane))
    rows = list(figure.layout.yaxis.categoryarray)
    assert rows == [f"{title} · lane {lane}" for title in ("planned", "measured") for lane in lanes][::-1]
    slices = [trace for trace in figure.data if trace.type == "bar"]
    assert sum(len(trace.x) for trace in slices) == 2 * len(bundle.program.graph)
    assert {round(float(length), 6) for trace in slices for length in trace.x} == {0.9}


def test_a_bundle_without_times_still_makes_a_page(bundle: Bundle) -> None:
    evidence = bundle.evidence
    bare = dataclasses.replace(bundle, evidence=Evidence(dataclasses.replace(evidence.report, strategies=())))
    assert timeline_figure(bare) is None
    assert scatter_figure(bare) is None
    page = report_html([bare])
    assert 'Plotly.newPlot("' not in page
    assert "Every strategy and baseline that was tried ran." in page


def test_times_alone_and_rewrites_are_shown(bundle: Bundle) -> None:
    alone = tuple(0.45 for _ in bundle.program.graph.operators)
    full = dataclasses.replace(
        bundle, evidence=dataclasses.replace(bundle.evidence, solo_us=alone, rewrites=(("fold_batch_norm", 7), ("none", 0)))
    )
    page = report_html([full])
    assert "fold batch norm 7x." in page
    assert page.count("<td>0.5</td>") >= len(alone)  # 0.45 at one digit
    assert page.count("<td>2.00</td>") == len(alone)  # 0.9 us measured over 0.45 alone


def _changed(bundle: Bundle, **report: Any) -> Bundle:
    made = dataclasses.replace(bundle.evidence.report, **report)
    return dataclasses.replace(bundle, evidence=dataclasses.replace(bundle.evidence, report=made))


def test_a_speed_up_comes_with_what_fresh_rounds_said_of_it(bundle: Bundle) -> None:
    # The time that it is of chose the schedule; 0.9 to 0.95 of the sequential time is what the duel measured.
    assert "in fresh rounds 1.053x to 1.111x" in report_html([_changed(bundle, ratio_low=0.9, ratio_high=0.95)])
    assert "in fresh rounds 1" not in report_html([_changed(bundle, chosen="sequential", ratio_low=1.0, ratio_high=1.0)])


@pytest.mark.parametrize(("bound_us", "shown"), [(9.5, True), (11.0, False)])
def test_a_bound_that_the_kept_schedule_refutes_is_not_shown(bound_us: float, shown: bool, bundle: Bundle) -> None:
    page = report_html([_changed(bundle, critical_path_us=bound_us, work_us=8.0)])
    assert ("no schedule beats" in page) == shown


def test_several_shapes_have_a_section_each(bundle: Bundle) -> None:
    page = report_html([bundle, bundle])
    assert [value for name, value in read(page).attributes if name == "id"].count("timeline-1") == 1
    assert page.count("<h2>inputs [") == 2


def test_an_unstable_job_says_so(bundle: Bundle) -> None:
    report = dataclasses.replace(bundle.evidence.report, unstable=True)
    page = report_html([dataclasses.replace(bundle, evidence=dataclasses.replace(bundle.evidence, report=report))])
    assert '<div class="verdict careful"><span class="pill">no statement</span>' in page


def test_what_is_slower_than_the_best_baseline_is_no_good_news(bundle: Bundle) -> None:
    report = bundle.evidence.report

    def shown(gain: float) -> str:
        rows = tuple(dataclasses.replace(row, speedup_vs_best_baseline=gain) for row in report.strategies)
        made = dataclasses.replace(report, strategies=rows, noise_floor_pct=5.0)
        return report_html([dataclasses.replace(bundle, evidence=dataclasses.replace(bundle.evidence, report=made))])

    assert '<div class="verdict careful">' in shown(0.5)
    assert '<div class="verdict">' in shown(0.96)


@pytest.mark.parametrize(
    ("name", "said"), [("sequential", "sequential schedule"), ("opara", "tuned schedule"), ("anneal", "tuned schedule")]
)
def test_a_published_schedulers_schedule_is_not_called_sequential(bundle: Bundle, name: str, said: str) -> None:
    report = bundle.evidence.report
    row = dataclasses.replace(report.strategies[0], name=name, is_baseline=name != "anneal", speedup_vs_best_baseline=1.0)
    made = dataclasses.replace(report, strategies=(row,), chosen=name)
    page = report_html([dataclasses.replace(bundle, evidence=dataclasses.replace(bundle.evidence, report=made))])
    assert f'<span class="pill">{said} kept</span>' in page


def test_a_replayed_job_is_not_sold_as_measured(bundle: Bundle) -> None:
    rows = tuple(dataclasses.replace(row, source=Source.REPLAYED) for row in bundle.evidence.report.strategies)
    report = dataclasses.replace(bundle.evidence.report, source=Source.REPLAYED, strategies=rows)
    page = report_html([dataclasses.replace(bundle, evidence=dataclasses.replace(bundle.evidence, report=report))])
    assert '<div class="verdict careful"><span class="pill">replayed, not measured</span>' in page
    assert page.count('<td class="text">replayed</td>') == 2
    assert '<td class="text">measured</td>' not in page


def test_too_many_operators_for_a_picture_are_left_to_the_table(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosched.export.report_figures.MOST_SLICES", 3)
    assert timeline_figure(bundle) is None
    half = OperatorTimes()
    monkeypatch.setattr("autosched.export.report.MOST_OPERATORS", 2)
    page = report_html([dataclasses.replace(bundle, evidence=dataclasses.replace(bundle.evidence, planned=half))])
    assert f"{len(bundle.program.graph) - 2} more operators are in the file." in page


@pytest.mark.parametrize("missing", ["plotly", "jinja2"])
def test_a_missing_extra_is_named(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=rf"{missing}.*pip install 'autosched\[report\]'"):
        report_html([bundle])


def test_it_is_written_or_the_reason_is_given(bundle: Bundle, tmp_path: Path) -> None:
    written = write_report(tmp_path / "r.html", [bundle])
    page = (tmp_path / "r.html").read_bytes()
    assert page.startswith(b"<!doctype html>")
    assert (written.bytes, written.chosen) == (len(page), ("beam",))
    assert "r.html" in written.summary()
    with pytest.raises(UsageError, match="cannot write"):
        write_report(tmp_path / "absent" / "r.html", [bundle])
    with pytest.raises(UsageError, match="nothing to report"):
        report_html([])


def test_the_command_writes_the_page_and_says_so_in_json(bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "b.autosched", tmp_path / "p.html"
    file.write_bytes(encode_bundle(bundle))
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(file), "-o", str(page), "--json"])
    assert stopped.value.code == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["report"], said["bytes"]) == (str(page), page.stat().st_size)


def test_a_full_disk_leaves_no_half_page(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageError, match="No space left"):
        write_report(tmp_path / "page.html", [bundle])
    assert list(tmp_path.iterdir()) == []
