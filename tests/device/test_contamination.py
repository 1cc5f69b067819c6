"""Foreign load: a share, or unknown, never a guess."""

from __future__ import annotations

import time

import pytest

from autosched.device import contamination
from autosched.device.contamination import LoadMark, LoadMeter, foreign_load, mark_load


def test_share_of_what_is_not_ours() -> None:
    before = LoadMark(wall_s=0.0, busy_s=100.0, own_s=10.0, cores=2)
    assert foreign_load(before, LoadMark(1.0, 101.5, 11.0, 2)) == pytest.approx(0.25)
    assert foreign_load(before, LoadMark(1.0, 102.0, 10.0, 2)) == pytest.approx(1.0)
    assert foreign_load(before, LoadMark(1.0, 100.5, 11.0, 2)) == 0.0  # ticks lag behind our own clock


@pytest.mark.parametrize(
    "after",
    [LoadMark(1.0, -1.0, 11.0, 2), LoadMark(1.0, 101.0, 11.0, 4), LoadMark(0.01, 100.02, 10.01, 2)],
    ids=["unread", "cores", "short"],
)
def test_unknown_is_said(after: LoadMark) -> None:
    assert foreign_load(LoadMark(0.0, 100.0, 10.0, 2), after) == -1.0


def test_own_work_is_not_foreign() -> None:
    start = mark_load()
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        sum(range(1000))
    load = foreign_load(start, mark_load())
    assert load == -1 or 0 <= load <= 1


def test_a_short_window_is_stretched_to_an_earlier_mark() -> None:
    meter = LoadMeter()
    time.sleep(0.15)
    start = meter.start()
    found = meter.read(start)
    assert (found.foreign_load == -1) == (mark_load().busy_s < 0)


def test_where_nothing_can_be_read_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contamination, "_busy_seconds", lambda: (-1.0, 0))
    meter = LoadMeter()
    start = meter.start()
    time.sleep(0.12)
    assert meter.read(start).foreign_load == -1
