"""A device loop that was killed goes on where it stopped and ends where it would have ended. Times are made up, never measured."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from autosched.core.progress import Silent
from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule, canonical_key, sequential
from autosched.pipeline.budget import Budget, budget_for
from autosched.pipeline.candidates import Candidate, make_candidate
from autosched.pipeline.diary import Diary, question_of
from autosched.pipeline.measuring import Ledger
from autosched.pipeline.proving import Prover
from autosched.pipeline.references import References
from autosched.pipeline.refine import refine
from autosched.pipeline.timetable import Timetable
from autosched.search import halving, synthetic
from autosched.search.correction import Trace
from autosched.search.portfolio import Proposal
from autosched.search.simulate import makespan_us
from tests.conformance.session_double import SessionDouble

PROBLEM = synthetic.random_problem(3, 14, max_lanes=2, widths=(1, 2))


class Killed(BaseException):
    """The process died."""


class Device(SessionDouble):
    """A time depends on the schedule and on how often it was timed only; dies after so many."""

    def __init__(self, *, known: dict[str, list[float]] | None = None, die_after: int | None = None) -> None:
        super().__init__(lambda schedule: makespan_us(PROBLEM, schedule), max_lanes=2)
        self.timed = {key: len(times) for key, times in (known or {}).items()}
        self.runs, self.die_after, self.pace = 0, die_after, 1.0

    def paired(self, schedules: Sequence[Schedule], *, rounds: int) -> list[list[float]] | Failure:
        columns: list[list[float]] = []
        for schedule in schedules:
            key = canonical_key(PROBLEM.graph, schedule, lanes_matter=True)
            columns.append([])
            for _ in range(rounds):
                if self.die_after is not None and self.runs >= self.die_after:
                    raise Killed
                number = self.timed[key] = self.timed.get(key, 0) + 1
                seed = int(hashlib.sha256(f"{key} {number}".encode()).hexdigest()[:12], 16)
                noise = float(np.exp(0.02 * np.random.default_rng(seed).standard_normal()))
                columns[-1].append(self.pace * makespan_us(PROBLEM, schedule) * noise)
                self.runs += 1
        return columns


class Restless(Device):
    """Every question of rounds finds the machine at another pace."""

    def paired(self, schedules: Sequence[Schedule], *, rounds: int) -> list[list[float]] | Failure:
        self.pace = self.pace % 3.0 + 1.0
        return super().paired(schedules, rounds=rounds)


def budget(candidates: int = 10) -> Budget:
    preset = budget_for("balanced")
    return dataclasses.replace(preset, search=dataclasses.replace(preset.search, evaluations=1500, candidates=candidates, trials=4))


def tuned(session: Device, diary: Diary, study: Path, *, candidates: int = 10) -> tuple[Candidate, Ledger]:
    ledger = Ledger()
    first = make_candidate(PROBLEM, "sequential", True, sequential(PROBLEM.graph), lanes_matter=True)
    timetable = Timetable.starting(800.0)
    prover = Prover(session, PROBLEM.graph, References((), ()), ledger, timetable.pace)
    assert prover.refutation(first.schedule) is None
    with diary:
        found = refine(
            session, PROBLEM, prover.entries([first]), prover, budget=budget(candidates), timetable=timetable, rng=np.random.default_rng(5),
            ledger=ledger, progress=Silent(), diary=diary, study_path=study,
        )  # fmt: skip
    return found.best[0], ledger


@pytest.mark.parametrize("after", [7, 60, 0.35, 0.97])
def test_a_killed_job_ends_where_an_unbroken_one_ends(tmp_path: Path, after: float) -> None:
    whole = Device()
    expected, _ = tuned(whole, Diary(None, "q"), tmp_path / "whole.db")
    after = int(after * whole.runs) if after < 1 else int(after)  # the third kill lands in Optuna's study, the last among small changes
    path, study = tmp_path / "loops" / "diary.jsonl", tmp_path / "broken.db"
    with pytest.raises(Killed):
        tuned(Device(die_after=after), Diary(path, "q"), study)
    with Diary(path, "q") as kept:
        at_hand = {key: list(times) for key, times in kept.times_us.items()}
    resumed = Device(known=at_hand)
    found, ledger = tuned(resumed, Diary(path, "q"), study)
    assert found == expected
    saved = sum(map(len, at_hand.values()))
    assert saved <= after
    assert resumed.runs + saved == whole.runs
    assert (saved > 0) == any("interrupted" in note for note in ledger.notes)


@pytest.mark.parametrize("fewer", [4, 7])
@pytest.mark.parametrize("after", [0.35, 0.97])
def test_a_job_that_goes_on_otherwise_compares_no_times_of_different_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: float, fewer: int
) -> None:
    """A machine that became slower has the time for fewer candidates, say."""
    whole = Device()
    tuned(whole, Diary(None, "q"), tmp_path / "whole.db")
    path, study = tmp_path / "diary.jsonl", tmp_path / "broken.db"
    with pytest.raises(Killed):
        tuned(Restless(die_after=int(after * whole.runs)), Diary(path, "q"), study)
    take = halving.Ledger.take
    spreads: list[float] = []

    def taken(ledger: halving.Ledger, proposals: Sequence[Proposal], rounds: int, measure: halving.Measure) -> dict[str, list[float]]:
        found = take(ledger, proposals, rounds, measure)
        paces = [time / makespan_us(PROBLEM, item.schedule) for item in proposals for time in found.get(item.key, ())]
        spreads.append(max(paces) / min(paces))
        return found

    monkeypatch.setattr(halving.Ledger, "take", taken)
    _, ledger = tuned(Restless(), Diary(path, "q"), study, candidates=fewer)
    assert any("interrupted" in note for note in ledger.notes)
    assert max(spreads) < 1.5


def test_a_finished_job_leaves_nothing_and_another_question_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "diary.jsonl"
    with Diary(path, "q") as diary:
        diary.add({"key": (1.0, 2.0)}, {"bad": Failure(FailureKind.OOM, "too large")})
        diary.add_traces({"key": Trace((0.0,), (1.0,))})
        run = diary.run
    with Diary(path, "q") as again:
        assert (again.run, again.times_us, again.traces["key"]) == (run, {"key": [1.0, 2.0]}, Trace((0.0,), (1.0,)))
        assert again.failures["bad"].kind is FailureKind.OOM
    with Diary(path, "another") as other:
        assert not other.resumed
        assert other.run != run
        assert list(tmp_path.glob("*.lock")), "an interrupted job's lock is gone: two jobs could go on from one diary"
        other.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_finished_job_takes_its_lock_away_and_not_the_next_jobs(tmp_path: Path) -> None:
    path = tmp_path / "diary.jsonl"
    with Diary(path, "q") as first:
        first.finish()
    with Diary(path, "q") as second:
        with Diary(path, "q") as third:
            third.finish()
        assert second.path == path
        assert third.path is None
        assert (tmp_path / "diary.jsonl.lock").exists()
        second.add({"key": (1.0,)}, {})
    with Diary(path, "q") as after:
        assert after.times_us == {"key": [1.0]}


@pytest.mark.parametrize("damage", [b'{"check":"00', b'{"check":"00","entry":{"type":"times"}}\n', b"\xff\xfe\n"])
def test_what_follows_damage_is_forgotten(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "diary.jsonl"
    with Diary(path, "q") as diary:
        diary.add({"key": (1.0,)}, {})
    path.write_bytes(path.read_bytes() + damage)
    with Diary(path, "q") as again:
        assert again.times_us == {"key": [1.0]}
        again.add({"key": (2.0,)}, {})
    with Diary(path, "q") as third:
        assert third.times_us == {"key": [1.0, 2.0]}


def test_a_diary_knows_which_times_are_of_the_same_rounds(tmp_path: Path) -> None:
    path = tmp_path / "diary.jsonl"
    with Diary(path, "q") as diary:
        diary.add({"a": (1.0, 2.0), "b": (3.0, 4.0)}, {})
        diary.add({"a": (5.0,)}, {})
        assert diary.lots == {"a": [1, 1, 2], "b": [1, 1]}
    with Diary(path, "q") as again:
        again.add({"b": (6.0,)}, {})
        assert again.lots == {"a": [1, 1, 2], "b": [1, 1, 3]}


def test_a_diary_that_cannot_be_written_costs_a_warning_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING), Diary(tmp_path / "file" / "diary.jsonl", "q") as diary:
        diary.add({"key": (1.0,)}, {})
    assert diary.times_us == {"key": [1.0]}
    assert "AUTOSCHED_CACHE" in caplog.text


def test_a_disk_that_can_no_longer_be_written_does_not_cost_a_job_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with Diary(tmp_path / "diary.jsonl", "question") as diary:
        diary.add({"key": (1.0,)}, {})
        with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
            broken.setattr(Path, "unlink", refuse)
            diary.finish()
    assert "cannot be removed" in caplog.text


@pytest.mark.parametrize("finished", [True, False])
def test_half_a_diary_on_a_full_disk_is_for_a_job_that_was_killed(
    finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "diary.jsonl"
    with caplog.at_level(logging.WARNING), Diary(path, "question") as diary:
        diary.add({"a": (1.0,)}, {})
        with monkeypatch.context() as full:
            full.setattr(os, "fsync", refuse)
            for time_us in (2.0, 3.0):
                diary.add({"b": (time_us,)}, {})
        if finished:
            diary.finish()
    assert caplog.text.count("a killed job will not go on") == 1
    assert any(tmp_path.iterdir()) is not finished
    with Diary(path, "question") as following:
        assert following.resumed is not finished


def test_a_second_job_at_the_same_time_has_no_diary(tmp_path: Path) -> None:
    with Diary(tmp_path / "d.jsonl", "q") as first, Diary(tmp_path / "d.jsonl", "q") as second:
        second.add({"key": (1.0,)}, {})
        first.add({"key": (2.0,)}, {})
    with Diary(tmp_path / "d.jsonl", "q") as after:
        assert after.times_us == {"key": [2.0]}


def test_a_question_is_everything_that_decides_it() -> None:
    assert question_of("graph", 1, budget().search) == question_of("graph", 1, budget().search)
    assert question_of("graph", 1, budget().search) != question_of("graph", 2, budget().search)
