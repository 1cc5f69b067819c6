"""Operators alone and in pairs within their shares of the budget. The clock is the test's; nothing is measured."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autosched.core.progress import Silent
from autosched.core.records import BY_OTHERS, Contamination, DeviceKey, Failure, FailureKind, PairRecord, Samples, SoftwareKey, SoloRecord
from autosched.core.schedule import Schedule
from autosched.datasets.facts import device_facts
from autosched.datasets.journal import Journal, Scope
from autosched.device.base import Pair
from autosched.pipeline.measuring import Ledger, SoloTime, cost_table, measure_pairs, measure_solo, rounds_within
from tests.conformance import contest_double
from tests.conformance.graphs import TwoBranches, two_branches_program
from tests.conformance.session_double import SessionDouble

GRAPH = two_branches_program(TwoBranches())[0].graph
KEY = DeviceKey("cpu", "double", (("cores", "2"),))
HUNG = Failure(FailureKind.TIMEOUT, "no progress for 120 s, so the measuring process was ended")


class Session(SessionDouble):
    """A run of the program takes ``run_s`` of the test's clock, a pair ``pair_s``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run_s: float, pair_s: float = 0.0) -> None:
        super().__init__(lambda schedule: 100.0)
        self.now_s, self.run_s, self.pair_s = 0.0, run_s, pair_s
        self.wide_s: float | None = run_s
        self.lots: list[int] = []
        self.widths: set[tuple[int, int]] = set()
        self.repeats: list[int] = []
        self.load = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def paired(self, schedules: Sequence[Schedule], *, rounds: int) -> list[list[float]] | Failure:
        wide = sum(max(schedule.width) > 1 for schedule in schedules)
        if wide and self.wide_s is None:
            return Failure(FailureKind.CRASH, "no such width")
        self.now_s += rounds * (self.run_s * (len(schedules) - wide) + (self.wide_s or 0.0) * wide)
        return super().paired(schedules, rounds=rounds)

    def solo(self, widths: Sequence[int], *, repeats: int) -> list[list[SoloRecord | Failure]]:
        self.repeats.append(repeats)
        samples = Samples(10.0, 10.0, 10.0, 10.0, 10.0, repeats)
        return [[SoloRecord(item.signature, width, samples, Contamination(self.load)) for width in widths] for item in GRAPH.operators]

    def pairs(self, pairs: Sequence[Pair], *, repeats: int) -> list[PairRecord | Failure]:
        self.now_s += self.pair_s * len(pairs)
        self.lots.append(len(pairs))
        self.widths |= {(pair.first_width, pair.last_width) for pair in pairs}
        return [Failure(FailureKind.UNAVAILABLE, "not on this double")] * len(pairs)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.open(tmp_path / "journal.jsonl", Scope(KEY, SoftwareKey((("torch", "0"),))))


@pytest.mark.parametrize(("seconds", "rounds"), [(math.inf, 12), (100.0, 12), (18.1, 8), (8.0, 6), (3.6, 6), (2.6, 4), (1.0, 3), (0.0, 3)])
def test_rounds_shrink_to_their_time_and_below_half_where_that_is_far_more(
    monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int
) -> None:
    # Two columns of a second each: nine rounds in eighteen seconds, the first of which is not counted.
    assert rounds_within(Session(monkeypatch, 1.0), GRAPH, 2, 12, SoloTime(seconds)) == rounds


@pytest.mark.parametrize(("most_s", "rounds"), [(math.inf, 6), (14.0, 4), (10.1, 2), (8.1, 1), (2.0, 1), (0.0, 1)])
def test_a_job_that_has_no_time_makes_fewer_rounds_than_a_median_needs_and_one_at_the_least(
    monkeypatch: pytest.MonkeyPatch, most_s: float, rounds: int
) -> None:
    # Its pace has taken four seconds of it by then.
    session = Session(monkeypatch, 1.0)
    assert rounds_within(session, GRAPH, 2, 12, SoloTime(4.0, most_s)) == rounds
    # Its pace is not worth the time of learning it where it decides nothing.
    assert (session.now_s > 0.0) is (most_s > 0.0)


def test_rounds_are_fewer_where_the_widest_run_is_the_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(monkeypatch, 1.0)
    session.wide_s = 3.0
    # Four seconds for both widths: four rounds in sixteen, the first of which is not counted; half of the rounds in sixteen times four.
    assert rounds_within(session, GRAPH, 2, 12, SoloTime(16.0)) == 6
    assert rounds_within(session, GRAPH, 2, 12, SoloTime(5.1)) == 4
    session.wide_s = None
    assert rounds_within(session, GRAPH, 2, 12, SoloTime(16.0)) == 7


def test_what_hangs_is_not_run_again_to_learn_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def hang(self: Session, schedules: Sequence[Schedule], *, rounds: int) -> Failure:
        asked.append(len(schedules))
        return HUNG

    monkeypatch.setattr(Session, "paired", hang)
    assert rounds_within(Session(monkeypatch, 1.0), GRAPH, 2, 12, SoloTime(16.0)) == 12
    assert asked == [2]


@pytest.mark.parametrize(
    ("width", "failure", "again"),
    [
        (2, HUNG, False),
        (2, Failure(FailureKind.CRASH, "the measuring process was killed by SIGSEGV"), False),
        (2, Failure(FailureKind.CRASH, f"the measuring process was killed by SIGKILL{BY_OTHERS}"), True),
        (2, Failure(FailureKind.OOM, "out of memory"), True),
        # There is no schedule without it, so nothing is lost by a look whether it has been mended.
        (1, HUNG, True),
    ],
)
def test_an_operator_that_an_earlier_job_lost_its_process_to_is_not_run_again(
    width: int, failure: Failure, again: bool, monkeypatch: pytest.MonkeyPatch, journal: Journal
) -> None:
    session, facts = Session(monkeypatch, 1.0), device_facts(KEY)
    timed = session.solo((1, 2), repeats=12)
    broken = [[failure if item.width == width else item for item in row if isinstance(item, SoloRecord)] for row in timed[:1]]
    monkeypatch.setattr(Session, "solo", lambda self, widths, *, repeats: self.repeats.append(repeats) or [*broken, *timed[1:]])
    first = measure_solo(session, GRAPH, facts, journal, 12, Ledger())
    session.repeats.clear()
    assert measure_solo(session, GRAPH, facts, journal, 12, Ledger()) == first
    assert len(session.repeats) == again


def test_what_was_measured_in_fewer_rounds_is_known_the_next_time(monkeypatch: pytest.MonkeyPatch, journal: Journal) -> None:
    session = Session(monkeypatch, 1.0)
    measure_solo(session, GRAPH, device_facts(KEY), journal, 12, Ledger(), SoloTime(4.0))
    measure_solo(session, GRAPH, device_facts(KEY), journal, 12, Ledger())
    assert session.repeats == [6]


def test_the_fewest_rounds_are_known_to_whoever_has_no_time_for_more(monkeypatch: pytest.MonkeyPatch, journal: Journal) -> None:
    session = Session(monkeypatch, 1.0)
    first = measure_solo(session, GRAPH, device_facts(KEY), journal, 12, Ledger(), SoloTime(1.0))
    # The same job, which comes back to what it measured to choose a lowering, and has a larger share of the budget for it.
    assert measure_solo(session, GRAPH, device_facts(KEY), journal, 12, Ledger(), SoloTime(2.0)) == first
    assert session.repeats == [3]
    measure_solo(session, GRAPH, device_facts(KEY), journal, 12, Ledger())
    assert session.repeats == [3, 12]


def test_one_round_is_known_to_whoever_has_no_time_for_three(monkeypatch: pytest.MonkeyPatch, journal: Journal) -> None:
    session = Session(monkeypatch, 1.0)
    first = measure_solo(session, GRAPH, device_facts(KEY), journal, 12, Ledger(), SoloTime(1.0, 0.0))
    # Two would tell no more than one; of three there is a median.
    assert measure_solo(session, GRAPH, device_facts(KEY), journal, 12, Ledger(), SoloTime(1.0, 6.1)) == first
    assert session.repeats == [1]
    measure_solo(session, GRAPH, device_facts(KEY), journal, 12, Ledger(), SoloTime(1.0))
    assert session.repeats == [1, 3]


def test_what_this_job_measured_beside_others_a_moment_ago_stands(monkeypatch: pytest.MonkeyPatch, journal: Journal) -> None:
    session = Session(monkeypatch, 1.0)
    session.load = 0.6
    first = measure_solo(session, GRAPH, device_facts(KEY), journal, 12, Ledger())
    assert measure_solo(session, GRAPH, device_facts(KEY), journal, 12, Ledger(), SoloTime(again=True)) == first
    assert session.repeats == [12]
    measure_solo(session, GRAPH, device_facts(KEY), journal, 12, Ledger(), SoloTime())
    assert session.repeats == [12, 12]


@pytest.mark.parametrize(("load", "asked"), [(0.0, 1), (0.04, 1), (0.6, 2), (-1.0, 1)])
def test_what_was_measured_while_others_had_the_cores_is_measured_again(
    load: float, asked: int, monkeypatch: pytest.MonkeyPatch, journal: Journal
) -> None:
    session = Session(monkeypatch, 1.0)
    session.load = load
    measure_solo(session, GRAPH, device_facts(KEY), journal, 12, Ledger())
    session.load = 0.0
    found = measure_solo(session, GRAPH, device_facts(KEY), journal, 12, Ledger())
    assert len(session.repeats) == asked
    assert all(isinstance(item, SoloRecord) and item.contamination.foreign_load < 0.1 for row in found for item in row)
    # The better answer has taken the place of the disturbed one.
    measure_solo(session, GRAPH, device_facts(KEY), journal, 12, Ledger())
    assert len(session.repeats) == asked


@pytest.mark.parametrize("budget_s", [2.0, 7.0, 25.0])
def test_lots_of_pairs_end_with_their_time(monkeypatch: pytest.MonkeyPatch, journal: Journal, budget_s: float) -> None:
    session, ledger = Session(monkeypatch, 0.0, 1.0), Ledger()
    solo = session.solo((1, 2), repeats=9)
    measure_pairs(session, GRAPH, device_facts(KEY), solo, journal, budget_s, ledger, Silent())
    assert session.lots[0] == 2
    assert max(session.lots) <= 8
    assert session.now_s <= budget_s
    complete = not ledger.notes
    assert complete or session.now_s > budget_s - 1.0


@pytest.mark.parametrize(
    ("failure", "again"),
    [
        (Failure(FailureKind.TIMEOUT, "no progress for 120 s, so the measuring process was ended"), False),
        (Failure(FailureKind.CRASH, "the measuring process ended with status 3; its last words: the device is lost"), False),
        (Failure(FailureKind.CRASH, f"the measuring process was killed by SIGKILL{BY_OTHERS}"), True),
        (Failure(FailureKind.OOM, "out of memory"), True),
    ],
)
def test_a_pair_that_an_earlier_job_lost_its_process_to_is_predicted(
    failure: Failure, again: bool, monkeypatch: pytest.MonkeyPatch, journal: Journal, tmp_path: Path
) -> None:
    asked: list[Pair] = []

    def pairs(self: Session, wanted: Sequence[Pair], *, repeats: int) -> list[PairRecord | Failure]:
        asked.extend(wanted)
        return [failure if pair == asked[1] else Failure(FailureKind.UNAVAILABLE, "not on this double") for pair in wanted]

    session = Session(monkeypatch, 0.0)
    monkeypatch.setattr(Session, "pairs", pairs)
    solo = session.solo((1, 2), repeats=9)
    measure_pairs(session, GRAPH, device_facts(KEY), solo, journal, 60.0, Ledger(), Silent())
    first = list(asked)
    resumed = Journal.open(tmp_path / "journal.jsonl", Scope(KEY, SoftwareKey((("torch", "0"),))))
    measure_pairs(session, GRAPH, device_facts(KEY), solo, resumed, 60.0, Ledger(), Silent())
    assert asked[len(first) :] == (first if again else [pair for pair in first if pair != first[1]])


@pytest.mark.parametrize("one_team", [False, True])
def test_where_lanes_are_one_team_no_pair_with_a_wide_operator_is_measured(
    one_team: bool, monkeypatch: pytest.MonkeyPatch, journal: Journal
) -> None:
    session = Session(monkeypatch, 0.0)
    session.limits = replace(session.limits, native_lanes=one_team, one_team=one_team)
    solo = session.solo((1, 2), repeats=9)
    measure_pairs(session, GRAPH, device_facts(KEY), solo, journal, 60.0, Ledger(), Silent())
    assert session.widths == ({(1, 1)} if one_team else {(1, 1), (1, 2), (2, 1)})
    table = cost_table(session, GRAPH, KEY, solo, [], {})
    assert table.one_team is one_team
    assert (table.team_spin_us > 0.0) is not one_team


@pytest.mark.parametrize(("load", "measured"), [(0.0, True), (0.9, False)])
def test_the_report_counts_only_pairs_that_nobody_disturbed_as_measured(
    load: float, measured: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def pairs(self: contest_double.Session, asked: Sequence[Pair], *, repeats: int) -> list[PairRecord | Failure]:
        names = [operator.signature for operator in self.program.graph.operators]
        return [
            PairRecord(
                names[pair.first], pair.first_width, names[pair.last], pair.last_width, 10.0, 10.0, 12.0, 1.1, 1.1, 0.6, 1, 1, 9,
                Contamination(load),
            )
            for pair in asked
        ]  # fmt: skip

    monkeypatch.setattr(contest_double.Session, "pairs", pairs)
    report = contest_double.comparing(monkeypatch, tmp_path)(
        contest_double.Bench(rewritten=contest_double.Speed(300.0)), contest_double.Branches(), lowering="rewritten"
    )
    [note] = [note for note in report.notes if note.startswith("cost model ")]
    assert ("predicts 100% of the " not in note) is measured
