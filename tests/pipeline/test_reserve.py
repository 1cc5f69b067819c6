"""What is set aside for a verdict, on a session whose pace the test decides."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule
from autosched.pipeline.judge import LEAST_DUEL, LEAST_ROUNDS
from autosched.pipeline.reserve import reserve_s
from autosched.pipeline.timetable import LEAST_ROWS
from tests.conformance.programs import branches_program
from tests.conformance.session_double import SessionDouble, Truth

PROGRAM = branches_program(branches=2, depth=1)[0]


def reserved_s(truth: Truth, spare_s: float = 0.0, *, lanes_matter: bool = True) -> float:
    session = SessionDouble(truth, noise=0.0)
    session.limits = dataclasses.replace(session.limits, lanes_matter=lanes_matter)
    prepared: Any = SimpleNamespace(session=session, captured=SimpleNamespace(program=PROGRAM))
    return reserve_s(prepared, spare_s)


def test_a_slow_model_has_the_time_of_its_rounds_and_its_duel() -> None:
    slow_s = reserved_s(lambda schedule: 100_000.0)
    # Before each run is one that does not count.
    assert slow_s > 0.2 * (LEAST_ROUNDS * (LEAST_ROWS + 1) + 3 * LEAST_DUEL)
    assert reserved_s(lambda schedule: 200_000.0) == pytest.approx(2.0 * slow_s)
    # Runs of less than ten milliseconds are timed several at once.
    assert reserved_s(lambda schedule: 100.0) == pytest.approx(slow_s * 10_100.0 / 200_000.0)


@pytest.mark.parametrize("slow_width", [1, 2])
def test_the_faster_of_two_orders_tells_the_pace(slow_width: int) -> None:
    def truth(schedule: Schedule) -> float:
        return 900_000.0 if max(schedule.width) == slow_width else 100_000.0

    assert reserved_s(truth) == pytest.approx(reserved_s(lambda schedule: 100_000.0))


def test_the_order_on_all_threads_is_not_run_where_the_other_is_fast_enough() -> None:
    seen: set[int] = set()

    def truth(schedule: Schedule) -> float:
        seen.add(max(schedule.width))
        return 10_000.0

    needed_s = reserved_s(truth, 1000.0)
    assert seen == {1}
    assert reserved_s(truth, needed_s - 1.0) == needed_s
    assert seen == {1, 2}


def test_nothing_is_set_aside_where_pace_is_not_known_or_no_matter() -> None:
    assert reserved_s(lambda schedule: 100_000.0, lanes_matter=False) == 0.0
    assert reserved_s(lambda schedule: Failure(FailureKind.CRASH, "it ended")) == 0.0
