"""Threads that spin after a measurement are asleep before anything that has fewer at work, and before another process has its turn."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from autosched.core.records import Failure
from autosched.core.schedule import Schedule, make_schedule, sequential
from autosched.device import cpu_measure
from autosched.device.cpu_measure import CpuMeasurer
from autosched.runtime import lanes
from autosched.runtime.kernels import random_inputs
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.widths import WidePrograms
from tests.conformance.programs import branches_program

pytestmark = pytest.mark.usefixtures("native")

ASLEEP = 0


@pytest.fixture
def measurer(monkeypatch: pytest.MonkeyPatch) -> CpuMeasurer:
    monkeypatch.setattr(lanes, "usable_cores", lambda: 2)
    program, constants = branches_program()
    return CpuMeasurer(WidePrograms(program, constants), random_inputs(program, 0), lambda item: None)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads of every run, and ``ASLEEP`` for every time that they were waited for."""
    seen: list[int] = []
    run = LaneExecutor.run

    def noted(self: LaneExecutor, *given: Any) -> Any:
        seen.append(self.team)
        return run(self, *given)

    monkeypatch.setattr(LaneExecutor, "run", noted)
    clock = SimpleNamespace(sleep=lambda seconds: seen.append(ASLEEP), perf_counter_ns=time.perf_counter_ns)
    monkeypatch.setattr(cpu_measure, "time", clock)
    return seen


def schedules_of(measurer: CpuMeasurer) -> list[Schedule]:
    graph = measurer.graph
    return [sequential(graph), make_schedule(graph, range(len(graph)), [index % 2 for index in range(len(graph))])]


def test_a_process_that_ran_lanes_answers_when_its_team_sleeps(measurer: CpuMeasurer, events: list[int]) -> None:
    _, spread = schedules_of(measurer)
    assert not isinstance(measurer.paired([spread], 1, 0), Failure)
    assert events[-1] == ASLEEP
    assert max(events) == 2
    # Its own next block finds the threads awake, as a server's calls do, and waits for nobody.
    assert events.count(ASLEEP) == 1


def test_a_process_that_ran_one_thread_waits_for_nobody(measurer: CpuMeasurer, events: list[int]) -> None:
    order, _ = schedules_of(measurer)
    assert not isinstance(measurer.paired([order], 3, 0), Failure)
    assert set(events) == {1}


def test_one_thread_is_timed_when_the_team_sleeps(measurer: CpuMeasurer, events: list[int]) -> None:
    measurer.paired(schedules_of(measurer), 5, 0)
    prepared = events.index(ASLEEP)
    assert {1, 2} <= set(events[prepared:])
    assert all(after != 1 or before != 2 for before, after in itertools.pairwise(events[prepared:]))


def test_a_traced_schedule_leaves_the_process_asleep(measurer: CpuMeasurer, events: list[int]) -> None:
    answers = list(measurer.schedules(schedules_of(measurer), 2, True, 0.0, 0))
    assert all(failure is None for _, _, failure in answers)
    assert events[-1] == ASLEEP
