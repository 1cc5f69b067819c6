"""The rules that are compared: what the project uses is the one in bold, and all say the same of two operators."""

from __future__ import annotations

import numpy as np
import pytest

from autosched.costmodel.composition import finish_times
from experiments.costmodel import rules


def case(seed: int, count: int, room: float) -> tuple[rules.Case, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    first, last = 1.0 + rng.random((count, count)), 1.0 + 2.0 * rng.random((count, count))
    alone_us = rng.uniform(1.0, 9.0, size=count)
    made = rules.Case(alone_us, rules.excess_of(first, last), np.full(count, room), alone_us, float(alone_us.max()), "made up")
    return made, first, last


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_rule_in_bold_is_the_one_in_use(count: int) -> None:
    made, first, last = case(3, count, 0.5)
    expected = finish_times(made.alone_us.tolist(), first, last, room=made.room)
    assert rules.ends(made, rules.RULES[rules.CHOSEN]).tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize("room", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", list(rules.RULES))
def test_every_rule_leaves_pairs_as_they_are(name: str, room: float) -> None:
    made, first, last = case(5, 2, room)
    assert rules.ends(made, rules.RULES[name]).tolist() == pytest.approx(finish_times(made.alone_us.tolist(), first, last).tolist())


def test_a_correction_is_learned_from_other_families_only() -> None:
    # Both families are 30 % slower than composed, but each is judged with what the other one says.
    made = [case(seed, 4, 0.5)[0] for seed in range(4)]
    slower = []
    for number, item in enumerate(made):
        together_us = float(rules.ends(item, rules.corrected(0.3)).max())
        slower.append(rules.Case(item.alone_us, item.excess, item.room, item.end_us, together_us, "ab"[number % 2]))
    assert rules.learned_error_pct(slower, [4]) == pytest.approx([0.0])
    alone = [rules.Case(item.alone_us, item.excess, item.room, item.end_us, item.together_us, "a") for item in slower]
    assert rules.learned_error_pct(alone, [4])[0] > 1.0
