"""When a team is left alone after it came late, who has its runs, and when it is asked again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosched.runtime.lateness import Lateness, Walkers


def _away(lateness: Lateness, took_ns: dict[Walkers, int] | None = None) -> list[Walkers]:
    """Whose the runs are until the team is asked again."""
    runs = []
    while (who := lateness.walkers()) is not Walkers.TEAM:
        runs.append(who)
        lateness.took(who, (took_ns or {}).get(who, 1))
    return runs


def test_a_team_in_time_is_asked_for_every_run() -> None:
    lateness = Lateness()
    for _ in range(1000):
        assert lateness.walkers() is Walkers.TEAM
        lateness.came(late=False)


def test_a_team_that_is_late_again_is_left_alone_for_twice_as_long_up_to_a_limit() -> None:
    lateness = Lateness()
    found = []
    for _ in range(12):
        lateness.came(late=True)
        found.append(len(_away(lateness)))
    assert found == [8, 16, 32, 64, 128, 256, 256, 256, 256, 256, 256, 256]


def test_many_runs_in_time_are_a_fresh_start_and_fewer_are_none() -> None:
    lateness = Lateness()
    for in_time, expected in ((0, 8), (31, 16), (32, 8), (250, 8)):
        for _ in range(in_time):
            lateness.came(late=False)
        lateness.came(late=True)
        assert len(_away(lateness)) == expected


@pytest.mark.parametrize("faster", [Walkers.ALONE, Walkers.THREADS])
def test_without_the_team_the_faster_of_the_others_has_all_runs_but_some_trials(faster: Walkers) -> None:
    lateness = Lateness()
    slower = Walkers.ALONE if faster is Walkers.THREADS else Walkers.THREADS
    for expected in (8, 16):
        lateness.came(late=True)
        runs = _away(lateness, {faster: 10, slower: 11})
        assert runs.count(slower) == 2
        assert runs.count(faster) == expected - 2


def test_what_was_faster_once_need_not_stay_so() -> None:
    lateness = Lateness()
    for faster, slower in ((Walkers.ALONE, Walkers.THREADS), (Walkers.THREADS, Walkers.ALONE)):
        lateness.came(late=True)
        assert _away(lateness, {faster: 10, slower: 11})[-1] is faster


def test_a_run_that_failed_is_no_trial() -> None:
    lateness = Lateness()
    lateness.came(late=True)
    # Nobody says how long it took.
    assert {lateness.walkers() for _ in range(8)} == {Walkers.ALONE}
    assert lateness.walkers() is Walkers.TEAM


@given(st.lists(st.booleans(), max_size=400))
def test_a_team_is_always_asked_again(lates: list[bool]) -> None:
    lateness = Lateness()
    for late in lates:
        assert len(_away(lateness)) <= 256
        lateness.came(late=late)
        assert (lateness.walkers() is Walkers.TEAM) is not late
