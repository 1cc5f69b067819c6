"""Where the time went: every second of a job is some stage's, once. The clock is the test's."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from autosched.core.progress import OUTSIDE
from autosched.core.report import StageTime, where_time_went
from autosched.pipeline.clock import StageClock


class Told:
    """A progress line that remembers."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, float | None]] = []
        self.updates: list[tuple[int, int, str, float | None]] = []

    def stage(self, name: str, left_s: float | None = None) -> None:
        self.stages.append((name, left_s))

    def update(
        self, *, done: int, total: int, incumbent: str = "", measured: int = 0, failed: int = 0, left_s: float | None = None
    ) -> None:
        self.updates.append((done, total, incumbent, left_s))


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.s)
    return now


def test_seconds_are_added_up_by_stage_and_the_budget_begins_where_it_is_first_told(at: SimpleNamespace) -> None:
    clock = StageClock(Told())
    at.s += 1.0  # before the first stage: nobody's
    clock.stage("capture")
    at.s += 2.0
    clock.stage("search", 60.0)
    at.s += 3.0
    clock.stage("capture")
    at.s += 4.0
    clock.stage("search", 50.0)
    at.s += 5.0
    assert clock.times() == (StageTime("capture", 2.0, False), StageTime("search", 8.0), StageTime("capture", 4.0))
    at.s += 1.0
    assert sum(stage.seconds for stage in clock.times()) == pytest.approx(15.0)


def test_what_compilers_of_baselines_take_is_not_the_budgets(at: SimpleNamespace) -> None:
    clock = StageClock(Told())
    clock.stage("search", 60.0)
    at.s += 1.0
    clock.stage("baseline torch_compile", OUTSIDE)
    at.s += 30.0
    clock.stage("capture, inductor")
    at.s += 8.0
    clock.stage("final comparison", 59.0)
    at.s += 2.0
    assert [(stage.name, stage.in_budget) for stage in clock.times()] == [
        ("search", True),
        ("baseline torch_compile", False),
        ("capture, inductor", False),
        ("final comparison", True),
    ]


def test_everything_is_passed_on(at: SimpleNamespace) -> None:
    told = Told()
    clock = StageClock(told)
    clock.stage("search", 60.0)
    clock.update(done=1, total=2, incumbent="beam", left_s=3.0)
    assert told.stages == [("search", 60.0)]
    assert told.updates == [(1, 2, "beam", 3.0)]


def test_without_a_stage_there_is_nothing_to_tell(at: SimpleNamespace) -> None:
    assert StageClock(Told()).times() == ()


def test_where_the_time_went_is_told_longest_first_with_what_the_budget_does_not_cover_apart() -> None:
    stages = (StageTime("capture", 2.0, False), StageTime("search", 1.0), StageTime("duel", 3.0), StageTime("trace", 0.04))
    assert where_time_went(stages) == "duel 3.0 s, search 1.0 s; not in the budget: capture 2.0 s"
    assert where_time_went(stages[:1]) == "not in the budget: capture 2.0 s"
    assert where_time_went(()) == ""
    # A comma parts two stages, so what a stage is of stands in brackets.
    several = (StageTime("capture, fused", 2.0), StageTime("search", 1.0))
    assert where_time_went(several) == "capture (fused) 2.0 s, search 1.0 s"
