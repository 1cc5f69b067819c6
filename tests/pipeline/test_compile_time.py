"""Compilers of whole models: each has its limit, and together they never take more than the total."""

from __future__ import annotations

import contextlib

import pytest

from autosched.core.errors import UsageError
from autosched.pipeline import compile_time
from autosched.pipeline.compile_time import CompileTime


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(compile_time.time, "monotonic", lambda: now[0])
    return now


def test_without_a_total_each_has_the_limit(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AUTOSCHED_COMPILE_LIMIT_S", "AUTOSCHED_COMPILE_TOTAL_S"):
        monkeypatch.delenv(name, raising=False)
    spent = CompileTime(900.0)
    for _ in range(3):
        with spent.turn() as limit_s:
            clock[0] += 10_000.0
        assert limit_s == 900.0


def test_the_slowest_compilers_stay_within_the_total_and_the_last_has_some(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_COMPILE_LIMIT_S", "150")
    monkeypatch.setenv("AUTOSCHED_COMPILE_TOTAL_S", "340")
    spent, given = CompileTime(900.0), []
    for _ in range(4):
        with spent.turn() as limit_s:
            clock[0] += limit_s
        given.append(limit_s)
    assert given[0] == 150.0
    assert min(given) > 20.0
    assert clock[0] <= 340.0


def test_what_a_quick_one_leaves_is_there_for_the_others(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_COMPILE_LIMIT_S", "150")
    monkeypatch.setenv("AUTOSCHED_COMPILE_TOTAL_S", "310")
    spent = CompileTime(900.0)
    with contextlib.suppress(RuntimeError), spent.turn():
        clock[0] += 10.0
        raise RuntimeError
    with spent.turn() as limit_s:
        pass
    assert limit_s == 150.0
    with spent.turn():
        clock[0] += 1000.0
    with spent.turn() as limit_s:
        pass
    assert limit_s > 0.0


def test_a_total_that_is_no_number_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_COMPILE_TOTAL_S", "soon")
    with pytest.raises(UsageError, match=r"AUTOSCHED_COMPILE_TOTAL_S is 'soon'"):
        CompileTime(900.0)
