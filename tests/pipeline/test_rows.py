"""The table of a report: what each row is compared with. Times are made up."""

from __future__ import annotations

import pytest

from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import sequential
from autosched.device.base import Comparison
from autosched.pipeline.candidates import Candidate
from autosched.pipeline.judge import External, Times
from autosched.pipeline.proving import Entry
from autosched.pipeline.rows import best_baseline, strategy_rows
from autosched.search.strategy import STRATEGIES
from tests.conformance.graphs import TwoBranches, two_branches_program

SCHEDULE = sequential(two_branches_program(TwoBranches())[0].graph)


def entry(*names: str) -> Entry:
    published = {"sequential", "opara", "nimble"}
    return Entry(tuple(Candidate(name, name in published, SCHEDULE, names[0], 1.0) for name in names), Comparison(True, 0.0, True))


@pytest.mark.parametrize(
    ("times_us", "best"),
    [
        ({"sequential": 1000.0, "portfolio": 700.0, "nimble": 900.0, "eager_1": 2000.0}, "opara"),
        ({"sequential": 1000.0, "portfolio": 950.0, "nimble": 900.0, "eager_1": 2000.0}, "nimble"),
        ({"sequential": 1000.0, "portfolio": 950.0, "nimble": 1100.0, "eager_1": 600.0}, "eager_1"),
        ({"sequential": 1000.0, "nimble": 1100.0}, "sequential"),
    ],
)
def test_the_best_baseline_is_the_fastest_row_that_is_one(times_us: dict[str, float], best: str) -> None:
    # One program that a search and a published scheduler both proposed: it stands under the name of the first.
    entries = [entry("sequential"), entry("portfolio", "opara"), entry("nimble"), entry("beam")]
    externals = [External("eager_1", lambda: Failure(FailureKind.CRASH, "not asked"))]
    times = Times({**{name: [time_us] * 9 for name, time_us in times_us.items()}, "beam": [500.0] * 9}, {}, "sequential", [])
    rows = strategy_rows(entries, [None] * 4, externals, {}, times)
    assert best_baseline(rows) == best
    fastest_us = min(row.measured_us for row in rows if row.is_baseline and row.measured_us is not None)
    assert {row.name: row.speedup_vs_best_baseline for row in rows if row.measured_us is not None} == {
        row.name: fastest_us / row.measured_us for row in rows if row.measured_us is not None
    }
    assert {row.name for row in rows if row.measured_us is None} == ({"portfolio", "opara", "eager_1"} if len(times_us) == 2 else set())


def test_a_published_scheduler_that_failed_is_a_baseline_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES._places, "absent", "no_such_package_anywhere:STRATEGY")
    failures = dict.fromkeys(("opara", "opara_2", "sequential_wide", "beam", "tuned", "absent"), Failure(FailureKind.CRASH, "it died"))
    rows = strategy_rows([entry("sequential")], [None], [], failures, Times({"sequential": [9.0] * 9}, {}, "sequential", []))
    assert [row.name for row in rows if row.is_baseline] == ["sequential", "opara", "opara_2", "sequential_wide"]
    assert {row.name: row.failure for row in rows[1:]} == failures
