"""When a team is left alone after it came late, and when it is asked again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autosched.runtime.lateness import Lateness


def _away(lateness: Lateness) -> int:
    """Runs without the team until it is asked again."""
    runs = 0
    while not lateness.team():
        runs += 1
    return runs


def test_a_team_in_time_is_asked_for_every_run() -> None:
    lateness = Lateness()
    for _ in range(1000):
        assert lateness.team()
        lateness.came(late=False)


def test_a_team_that_is_late_again_is_left_alone_for_twice_as_long_up_to_a_limit() -> None:
    lateness = Lateness()
    found = []
    for _ in range(12):
        lateness.came(late=True)
        found.append(_away(lateness))
    assert found == [8, 16, 32, 64, 128, 256, 256, 256, 256, 256, 256, 256]


def test_many_runs_in_time_are_a_fresh_start_and_fewer_are_none() -> None:
    lateness = Lateness()
    for in_time, expected in ((0, 8), (31, 16), (32, 8), (250, 8)):
        for _ in range(in_time):
            lateness.came(late=False)
        lateness.came(late=True)
        assert _away(lateness) == expected


@given(st.lists(st.booleans(), max_size=400))
def test_a_team_is_always_asked_again(lates: list[bool]) -> None:
    lateness = Lateness()
    for late in lates:
        assert _away(lateness) <= 256
        lateness.came(late=late)
        assert lateness.team() is not late
