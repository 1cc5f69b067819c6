"""A schedule that ends the measuring process: tried twice, and never a third time, for each try takes a process's start or its limit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule, make_schedule, sequential
from autosched.device.cpu_session import CpuSession
from autosched.device.worker import WorkerDied
from autosched.device.worker_messages import Answer, PairedAnswer, PairedRequest, Request, ScheduleAnswer, SchedulesRequest
from tests.conformance.programs import branches_program

GONE = Failure(FailureKind.CRASH, "the measuring process ended with status 3")
HUNG = Failure(FailureKind.TIMEOUT, "no progress for 120 s")
NOTHING = Failure(FailureKind.UNAVAILABLE, "came through")


class Device:
    """A process that the schedule ``deadly`` ends as long as ``deaths`` are left."""

    def __init__(self, deadly: Schedule, failure: Failure, deaths: int, *, by_others: bool = False) -> None:
        self.deadly, self.failure, self.deaths, self.by_others = deadly, failure, deaths, by_others
        self.asked: list[tuple[Schedule, ...]] = []

    def ask(self, request: Request) -> Iterator[Answer]:
        assert isinstance(request, (PairedRequest, SchedulesRequest))
        self.asked.append(request.schedules)
        if self.deadly in request.schedules and self.deaths:
            self.deaths -= 1
            raise WorkerDied(self.failure, request.schedules.index(self.deadly), by_others=self.by_others)
        if isinstance(request, PairedRequest):
            yield PairedAnswer(tuple((1.0,) * request.rounds for _ in request.schedules))
        else:
            for place in range(len(request.schedules)):
                yield ScheduleAnswer(place, failure=NOTHING)


def opened() -> tuple[CpuSession, list[Schedule]]:
    program, constants = branches_program(branches=2, depth=2, size=16)
    count = len(program.graph)
    lanes = ([index % 2 for index in range(count)], [0] * (count - 1) + [1])
    schedules = [sequential(program.graph), *(make_schedule(program.graph, range(count), row) for row in lanes)]
    return CpuSession(program, constants, timeout_s=5.0, max_lanes=2, widths=(1,)), schedules


def test_one_that_has_ended_two_processes_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session, schedules = opened()
    device = Device(schedules[1], GONE, 100)
    monkeypatch.setattr(CpuSession, "_ask", device.ask)
    assert session.paired(schedules, rounds=2) == GONE
    assert len(device.asked) == 2
    # Alone, in whatever it is asked for: the others are not kept waiting, and it is told why at once.
    assert session.paired([schedules[1]], rounds=2) == GONE
    assert not isinstance(session.paired([schedules[0], schedules[2]], rounds=2), Failure)
    assert session.schedules(schedules, rounds=2) == [NOTHING, GONE, NOTHING]
    assert len(device.asked) == 4
    assert all(schedules[1] not in asked for asked in device.asked[2:])


def test_one_that_hangs_twice_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session, schedules = opened()
    device = Device(schedules[1], HUNG, 100)
    monkeypatch.setattr(CpuSession, "_ask", device.ask)
    assert session.schedules(schedules, rounds=2) == [NOTHING, HUNG, NOTHING]
    assert session.paired([schedules[1]], rounds=2) == HUNG
    asked = len(device.asked)
    assert session.paired([schedules[1]], rounds=2) == HUNG
    assert len(device.asked) == asked


def test_one_that_came_through_meanwhile_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    session, schedules = opened()
    device = Device(schedules[1], GONE, 1)
    monkeypatch.setattr(CpuSession, "_ask", device.ask)
    for _ in range(3):
        device.deaths = 1
        assert not isinstance(session.paired(schedules, rounds=2), Failure)
    assert len(device.asked) == 6


def test_what_somebody_else_may_have_ended_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory runs out, the system ends the process whichever schedule it is at."""
    session, schedules = opened()
    device = Device(schedules[1], GONE, 2, by_others=True)
    monkeypatch.setattr(CpuSession, "_ask", device.ask)
    assert session.paired(schedules, rounds=2) == GONE
    assert not isinstance(session.paired(schedules, rounds=2), Failure)
