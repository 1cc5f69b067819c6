"""Pair runs on two threads: the thread that has nothing left to do leaves the other alone."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autosched.core.records import Engine
from autosched.device import cpu_pairs
from autosched.device.cpu_loops import Loop, time_alone
from autosched.device.cpu_measure import CpuMeasurer
from autosched.runtime import lane_pool
from autosched.runtime.calls import Slots
from autosched.runtime.lane_pool import LanePool


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When a lane polled."""
    found: list[float] = []
    monkeypatch.setattr(lane_pool, "_give_way", lambda: found.append(time.monotonic()))
    return found


@pytest.fixture
def measurer() -> CpuMeasurer:
    return cast(CpuMeasurer, SimpleNamespace(pool=LanePool(), engine=Engine.PYTHON))


def nap(slots: Slots) -> None:
    time.sleep(0.02)


@pytest.mark.parametrize("lane", [0, 1])
def test_nobody_polls_while_a_loop_is_timed_alone(lane: int, polls: list[float], measurer: CpuMeasurer) -> None:
    assert time_alone(measurer, Loop(nap, cast(Any, []), 1), lane, 2) >= 1.0
    assert polls == []


def test_who_is_done_first_does_not_poll_while_the_other_goes_on(polls: list[float], measurer: CpuMeasurer) -> None:
    begun: list[float] = []

    def last(slots: Slots) -> None:
        begun.append(time.monotonic())
        time.sleep(0.2)

    run = cpu_pairs._together(measurer, Loop(nap, cast(Any, []), 1), Loop(last, cast(Any, []), 1))
    assert run.first_end_us < run.last_end_us
    assert not [when for when in polls if when > begun[0]]
