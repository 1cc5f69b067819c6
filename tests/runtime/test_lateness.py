"""When a team is left alone after it came late, who has its runs, and when it is asked again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosched.runtime.lateness import Lateness, Walkers

TEAM_NS, OTHERS_NS, LATE_NS = 100, 150, 1000
"""What a run of the team takes that is in time, one without the team, and a late one of the team, after which it is slower than others."""


def _warm() -> Lateness:
    """Of a team with a few runs behind it."""
    lateness = Lateness()
    for _ in range(3):
        lateness.came(TEAM_NS, late=False)
    return lateness


def _away(lateness: Lateness, took_ns: dict[Walkers, int] | None = None) -> list[Walkers]:
    """Whose the runs are until the team is asked again."""
    runs = []
    while (who := lateness.walkers()) is not Walkers.TEAM:
        runs.append(who)
        lateness.took(who, (took_ns or {}).get(who, OTHERS_NS))
    return runs


def test_a_team_in_time_is_asked_for_every_run() -> None:
    lateness = Lateness()
    for _ in range(1000):
        assert lateness.walkers() is Walkers.TEAM
        lateness.came(TEAM_NS, late=False)


def test_the_first_run_decides_nothing() -> None:
    lateness = Lateness()
    lateness.came(1000 * LATE_NS, late=True)
    assert lateness.walkers() is Walkers.TEAM
    for _ in range(2):
        lateness.came(TEAM_NS, late=False)
    # It is not part of what the team takes, either: that is little more than the others', who have no more than their trials.
    lateness.came(OTHERS_NS + 1, late=True)
    assert len(_away(lateness)) == 4


def test_a_team_that_is_late_again_is_left_alone_for_twice_as_long_up_to_a_limit() -> None:
    lateness = _warm()
    found = []
    for _ in range(12):
        lateness.came(LATE_NS, late=True)
        found.append(len(_away(lateness)))
    assert found == [8, 16, 32, 64, 128, 256, 256, 256, 256, 256, 256, 256]


def test_many_runs_in_time_are_a_fresh_start_and_fewer_are_none() -> None:
    lateness = _warm()
    for in_time, expected in ((0, 8), (31, 16), (32, 8), (250, 8)):
        for _ in range(in_time):
            lateness.came(TEAM_NS, late=False)
        lateness.came(LATE_NS, late=True)
        assert len(_away(lateness)) == expected


def test_after_one_late_run_that_costs_little_the_others_have_their_trials_and_no_more() -> None:
    lateness = _warm()
    lateness.came(2 * TEAM_NS, late=True)
    assert _away(lateness) == [Walkers.ALONE, Walkers.THREADS, Walkers.ALONE, Walkers.THREADS]
    # From now on it is known what they take: while the team, late runs included, is no slower, it is asked for every run.
    for run in range(60):
        lateness.came(2 * TEAM_NS if run % 4 == 0 else TEAM_NS, late=run % 4 == 0)
        assert lateness.walkers() is Walkers.TEAM


def test_a_team_that_is_late_several_times_in_a_row_is_left_alone_even_where_each_costs_little() -> None:
    lateness = _warm()
    lateness.came(2 * TEAM_NS, late=True)
    assert len(_away(lateness)) == 4
    late = 0
    while lateness.walkers() is Walkers.TEAM:
        lateness.came(2 * TEAM_NS, late=True)
        late += 1
    assert late == 2
    assert len(_away(lateness)) == 7  # and the one that has just been asked for


def test_the_others_are_tried_again_after_many_late_runs() -> None:
    lateness = _warm()
    lateness.came(2 * TEAM_NS, late=True)
    assert len(_away(lateness, {Walkers.ALONE: LATE_NS, Walkers.THREADS: LATE_NS})) == 4
    borne = 0
    while lateness.walkers() is Walkers.TEAM:
        lateness.came(2 * TEAM_NS, late=True)
        borne += 1
    assert borne == 17
    # They have become faster than a team that is always late.
    assert len(_away(lateness)) == 7


@pytest.mark.parametrize("faster", [Walkers.ALONE, Walkers.THREADS])
def test_without_the_team_the_faster_of_the_others_has_all_runs_but_some_trials(faster: Walkers) -> None:
    lateness = _warm()
    slower = Walkers.ALONE if faster is Walkers.THREADS else Walkers.THREADS
    for expected in (8, 16):
        lateness.came(LATE_NS, late=True)
        runs = _away(lateness, {faster: 10, slower: 11})
        assert runs.count(slower) == 2
        assert runs.count(faster) == expected - 2


def test_what_was_faster_once_need_not_stay_so() -> None:
    lateness = _warm()
    for faster, slower in ((Walkers.ALONE, Walkers.THREADS), (Walkers.THREADS, Walkers.ALONE)):
        lateness.came(LATE_NS, late=True)
        assert _away(lateness, {faster: 10, slower: 11})[-1] is faster


def test_a_run_that_failed_is_no_trial() -> None:
    lateness = _warm()
    lateness.came(LATE_NS, late=True)
    # Nobody says how long it took.
    assert {lateness.walkers() for _ in range(8)} == {Walkers.ALONE}
    assert lateness.walkers() is Walkers.TEAM


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 2000)), max_size=400), st.integers(1, 2000))
def test_a_team_is_always_asked_again_and_stays_away_only_after_a_late_run(runs: list[tuple[bool, int]], others_ns: int) -> None:
    lateness = Lateness()
    for late, time_ns in runs:
        lateness.came(time_ns, late=late)
        away = _away(lateness, {Walkers.ALONE: others_ns, Walkers.THREADS: others_ns})
        assert len(away) <= 256
        assert late or not away
