"""What is set aside for a verdict, on a session whose pace the test decides."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule
from autosched.pipeline.judge import LEAST_DUEL, LEAST_ROUNDS
from autosched.pipeline.reserve import reserve_s
from autosched.pipeline.timetable import LEAST_ROWS
from tests.conformance.programs import branches_program
from tests.conformance.session_double import SessionDouble

PROGRAM = branches_program(branches=2, depth=1)[0]


class Paced(SessionDouble):
    """Each run takes ``run_s`` of the test's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run_s: float) -> None:
        super().__init__(lambda schedule: 100.0)
        self.now_s, self.run_s = 0.0, run_s
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def paired(self, schedules: Sequence[Schedule], *, rounds: int) -> list[list[float]] | Failure:
        self.now_s += self.run_s * rounds * len(schedules)
        return super().paired(schedules, rounds=rounds)


def prepared(session: SessionDouble) -> Any:
    return SimpleNamespace(session=session, captured=SimpleNamespace(program=PROGRAM))


def test_a_slow_model_has_the_time_of_its_rounds_and_its_duel(monkeypatch: pytest.MonkeyPatch) -> None:
    least = LEAST_ROUNDS * (LEAST_ROWS + 1) + 3 * LEAST_DUEL
    slow = reserve_s(prepared(Paced(monkeypatch, 0.2)))
    assert slow > 0.2 * least
    assert reserve_s(prepared(Paced(monkeypatch, 0.1))) == pytest.approx(slow / 2.0)


def test_nothing_is_set_aside_where_pace_is_not_known_or_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Paced(monkeypatch, 0.2)
    session.limits = dataclasses.replace(session.limits, lanes_matter=False)
    assert reserve_s(prepared(session)) == 0.0
    assert session.now_s == 0.0
    session = Paced(monkeypatch, 0.2)
    monkeypatch.setattr(session, "paired", lambda *given, rounds: Failure(FailureKind.CRASH, "it ended"))
    assert reserve_s(prepared(session)) == 0.0
