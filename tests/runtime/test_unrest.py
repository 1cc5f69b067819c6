"""A model that is changed before each call is left alone for ever longer, and compared again all the same."""

from __future__ import annotations

from autosched.runtime.unrest import Unrest


def _compared(unrest: Unrest, calls: int) -> list[int]:
    return [call for call in range(calls) if not unrest.leaves()]


def test_what_is_changed_a_few_times_is_compared_each_time() -> None:
    unrest = Unrest()
    assert not unrest.any
    assert _compared(unrest, 8) == list(range(8))
    assert unrest.any
    unrest.calm()
    assert not unrest.any
    assert _compared(unrest, 8) == list(range(8))


def test_what_is_changed_all_the_time_is_compared_ever_more_seldom_up_to_a_limit() -> None:
    unrest = Unrest()
    compared = _compared(unrest, 10_000)
    assert compared[:12] == [*range(9), 9 + 16, 9 + 16 + 33, 9 + 16 + 33 + 65]
    assert {later - earlier for earlier, later in zip(compared[-4:], compared[-3:], strict=False)} == {1025}
    unrest.calm()
    assert _compared(unrest, 9) == list(range(9))
