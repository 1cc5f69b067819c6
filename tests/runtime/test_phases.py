"""Cutting a plan into phases: nothing is lost, no lane is reordered, and an operator of several threads has nobody beside it."""

from __future__ import annotations

import dataclasses
import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from autosched.runtime.phases import phases_of
from autosched.runtime.plan import Step, make_plan
from tests.conformance.graphs import random_placement, random_program


def _steps(seed: int) -> tuple[Step, ...]:
    rng = random.Random(seed)
    program, _ = random_program(rng, rng.randrange(1, 24))
    placed = random_placement(rng, program.graph, rng.randrange(1, 5))
    widths = (1, rng.choice((1, 2)), 4)
    return make_plan(program.graph, dataclasses.replace(placed, width=tuple(rng.choice(widths) for _ in placed.width))).steps


@given(st.integers(0, 2**31))
def test_every_step_is_in_one_phase_and_phases_follow_the_launch_order(seed: int) -> None:
    steps = _steps(seed)
    place = {step.operator: index for index, step in enumerate(steps)}
    ended = -1
    for phase in phases_of(steps):
        found = sorted(place[step.operator] for lane in phase for step in lane)
        assert found == list(range(ended + 1, ended + 1 + len(found)))
        ended = found[-1]
    assert ended == len(steps) - 1


@given(st.integers(0, 2**31))
def test_a_wide_operator_is_alone_and_a_lane_keeps_its_order(seed: int) -> None:
    for phase in phases_of(_steps(seed)):
        widths = {step.width for lane in phase for step in lane}
        assert widths == {1} or (1 not in widths and len(phase) == 1)
        if widths == {1}:
            assert [{step.lane for step in lane} for lane in phase] == [{lane[0].lane} for lane in phase]
            assert len({lane[0].lane for lane in phase}) == len(phase)


@given(st.integers(0, 2**31))
def test_two_phases_in_a_row_are_of_different_kinds(seed: int) -> None:
    kinds = [phase[0][0].width > 1 for phase in phases_of(_steps(seed))]
    assert all(one != other for one, other in itertools.pairwise(kinds))
