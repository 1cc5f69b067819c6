"""Who is kept of those compared, and what a report says of the circumstances. Times and records are made up."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from autosched.core.errors import NoFeasibleCandidate
from autosched.core.progress import Silent
from autosched.core.records import Contamination, DeviceKey, Failure, FailureKind, Paging, ScheduleRecord
from autosched.core.schedule import Schedule, make_schedule, sequential
from autosched.device.base import Comparison
from autosched.device.contamination import LoadMark
from autosched.device.timing import summarize
from autosched.pipeline import final
from autosched.pipeline.candidates import Candidate
from autosched.pipeline.final import Field, _judged, decide, disturbance_note, paging_note
from autosched.pipeline.judge import Times
from autosched.pipeline.measuring import Ledger
from autosched.pipeline.proving import Entry
from autosched.pipeline.timetable import Timetable
from tests.conformance.graphs import TwoBranches, two_branches_program
from tests.conformance.session_double import SessionDouble


@pytest.mark.parametrize(("taken", "share"), [(0.85, "85%"), (0.11, "11%"), (0.1, ""), (0.0, ""), (-1.0, "")])
def test_a_machine_that_others_had_is_named_and_one_that_is_not_known_is_not(taken: float, share: str) -> None:
    note = disturbance_note(taken)
    assert bool(note) == bool(share)
    assert share in note


GRAPH = two_branches_program(TwoBranches())[0].graph
SCHEDULES = {
    "sequential": sequential(GRAPH),
    "beam": make_schedule(GRAPH, range(len(GRAPH)), [index % 2 for index in range(len(GRAPH))]),
    "opara": make_schedule(GRAPH, range(len(GRAPH)), [int(index == 0) for index in range(len(GRAPH))]),
}
TIMES_US = {"sequential": 1000.0, "beam": 700.0, "opara": 800.0}


class Breaking(SessionDouble):
    """By the time of the duel, ``broken`` fail whenever they are asked for."""

    def __init__(self, broken: Sequence[str]) -> None:
        super().__init__(lambda schedule: TIMES_US[next(name for name, item in SCHEDULES.items() if item == schedule)], noise=0.001)
        self.broken = [SCHEDULES[name] for name in broken]
        self.duels: list[Schedule] = []

    def paired(self, schedules: Sequence[Schedule], *, rounds: int) -> list[list[float]] | Failure:
        if len(schedules) == 3 and schedules[0] not in self.duels:
            self.duels.append(schedules[0])
        if any(schedule in self.broken for schedule in schedules):
            return Failure(FailureKind.CRASH, "boom")
        return super().paired(schedules, rounds=rounds)


@pytest.mark.parametrize(
    ("broken", "chosen", "duels"),
    [
        ((), "beam", ("beam",)),
        (("beam",), "opara", ("beam", "opara")),
        (("beam", "opara"), "sequential", ("beam", "opara")),
        # Nobody runs any more: what is asked of the others would be asked in vain.
        (("sequential",), "sequential", ("beam",)),
    ],
)
def test_a_candidate_that_dies_in_the_duel_does_not_take_the_next_one_with_it(
    broken: tuple[str, ...], chosen: str, duels: tuple[str, ...]
) -> None:
    session = Breaking(broken)
    entries = [Entry((Candidate(name, False, item, name, 1.0),), Comparison(True, 0.0, True)) for name, item in SCHEDULES.items()]
    options = SimpleNamespace(budget=SimpleNamespace(total_s=60.0, final_rounds=10), seed=0)
    run: Any = SimpleNamespace(session=session, graph=GRAPH, options=options, timetable=Timetable.starting(60.0), ledger=Ledger())
    columns = {name: [time_us + place % 3 for place in range(10)] for name, time_us in TIMES_US.items()}
    field = Field(tuple(entries), {}, ())
    judgement = _judged(run, field, Times(columns, {}, "sequential", list(columns["sequential"])))
    assert judgement.chosen == chosen
    assert session.duels == [SCHEDULES[name] for name in duels]
    assert set(field.failures) == set(broken) - {"sequential"}
    assert ("boom" in judgement.verdict) == (chosen == "sequential")


@pytest.mark.parametrize(("share", "mib", "said"), [(0.3, 200, True), (0.04, 200, False), (0.3, 0.5, False)])
def test_memory_that_is_taken_anew_at_each_run_is_noted_where_it_takes_time(share: float, mib: float, said: bool) -> None:
    record = ScheduleRecord("", summarize([1.0]), 0, Contamination(), paging=Paging(int(mib * 2**20), share))
    note = paging_note(record)
    assert bool(note) is said
    assert not said or ("30%" in note and "200 MiB" in note and "--keep-memory" in note)
    assert not paging_note(Failure(FailureKind.CRASH, "boom"))


STATIC = {"sequential": sequential(GRAPH), "sequential_wide": sequential(GRAPH, width=2)}


@pytest.mark.parametrize(
    ("dead", "chosen"), [((), "sequential_wide"), (("sequential",), "sequential_wide"), (("sequential_wide",), "sequential")]
)
def test_one_sequential_schedule_that_runs_is_enough_for_a_verdict(
    dead: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = compared(dead, monkeypatch)
    assert kept.chosen == chosen
    assert ("boom" in str(kept.failures.values())) == bool(dead)


def test_without_any_that_runs_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoFeasibleCandidate, match="no sequential schedule can be timed: sequential, sequential_wide: crash, boom"):
        compared(tuple(STATIC), monkeypatch)


@pytest.mark.parametrize(("kind", "recording", "said"), [("cpu", None, True), ("cpu", object(), False), ("cuda", None, False)])
def test_whoever_else_had_the_cores_is_named_where_they_are_what_is_measured(
    kind: str, recording: object, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = iter([LoadMark(0.0, 10.0, 1.0, 2), LoadMark(10.0, 25.0, 12.0, 2)])
    monkeypatch.setattr(final, "mark_job", lambda: next(marks))
    assert compared((), monkeypatch, kind, recording).cores == (disturbance_note(0.2) if said else "")


def compared(dead: Sequence[str], monkeypatch: pytest.MonkeyPatch, kind: str = "cpu", recording: object = None) -> Any:
    """The choice, the failures and the note on cores of a final comparison in which the ``dead`` fail."""
    times_us = {STATIC["sequential"]: 1000.0, STATIC["sequential_wide"]: 900.0}
    broken = [STATIC[name] for name in dead]
    session = SessionDouble(lambda item: Failure(FailureKind.CRASH, "boom") if item in broken else times_us[item], noise=0.001)
    entries = [Entry((Candidate(name, True, item, name, 1.0),), Comparison(True, 0.0, True)) for name, item in STATIC.items()]
    options = SimpleNamespace(budget=SimpleNamespace(total_s=60.0, final_rounds=10), seed=0, refine=False)
    references = SimpleNamespace(answer=None, outputs=((),))
    run: Any = SimpleNamespace(session=session, graph=GRAPH, options=options, progress=Silent(), captured=None, references=references)
    run.timetable, run.ledger = Timetable.starting(60.0), Ledger()
    run.device, run.recording = SimpleNamespace(key=DeviceKey(kind, "double", ())), recording
    monkeypatch.setattr(
        final,
        "_outcome",
        lambda _run, _costs, _field, times, judged, cores: SimpleNamespace(chosen=judged.chosen, failures=times.failures, cores=cores),
    )
    rivals: Any = SimpleNamespace(ready=lambda captured, answer: [])
    costs: Any = None
    return decide(run, costs, entries, [], {}, rivals)
