"""Composing pair slowdowns to three and more: excess that adds, who started first, and room that no pair misses."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosched.core.costs import CostTable
from autosched.core.schedule import Schedule
from autosched.costmodel import composition
from autosched.costmodel.composition import LEAST_SHARE, finish_times, room_of, shares
from autosched.costmodel.model import Floats, makespan_ratio
from autosched.datasets.facts import DeviceFacts, KernelFacts, LaunchFacts
from autosched.search import fluid, simulate
from autosched.search.compiled import layout
from autosched.search.problem import Problem

NONE = np.ones((3, 3))


class Group:
    """A seeded group: times alone, ordered slowdowns and room."""

    def __init__(self, seed: int, count: int, *, room: bool = True) -> None:
        rng = np.random.default_rng(seed)
        self.solo_us = rng.uniform(1.0, 100.0, size=count)
        self.first = 1.0 + rng.exponential(0.5, size=(count, count))
        self.last = 1.0 + rng.exponential(1.5, size=(count, count))
        self.room = rng.choice([0.0, 0.1, 0.4, 0.5, 0.75, 1.0], size=count) if room else np.zeros(count)

    def finish(self, members: list[int]) -> Floats:
        """When each of ``members`` is done, started in that order."""
        index = np.ix_(members, members)
        return finish_times(self.solo_us[members], self.first[index], self.last[index], room=self.room[members])


groups = given(seed=st.integers(0, 10**6), count=st.integers(1, 6))
few = settings(max_examples=80, deadline=None, derandomize=True)


def test_equal_kernels_that_fill_a_resource_take_turns() -> None:
    twice = np.full((3, 3), 2.0)
    assert finish_times([10.0, 10.0, 10.0], twice, twice).tolist() == pytest.approx([30.0, 30.0, 30.0])


def test_without_interference_everyone_takes_its_own_time() -> None:
    assert finish_times([10.0, 20.0, 30.0], NONE, NONE).tolist() == [10.0, 20.0, 30.0]


def test_who_started_first_is_slowed_by_the_first_matrix() -> None:
    first, last = NONE.copy(), np.full((3, 3), 24.0)
    done = finish_times([10.0, 10.0, 10.0], first, last)
    assert done[0] == pytest.approx(10.0)
    assert done[1] > done[0]


def test_the_third_lane_waits_for_one_of_two_cores() -> None:
    done = finish_times([10.0, 10.0, 10.0], NONE, NONE, room=[0.5, 0.5, 0.5])
    assert done.tolist() == pytest.approx([10.0, 10.0, 20.0], rel=2 * LEAST_SHARE)
    assert finish_times([10.0, 10.0, 10.0], NONE, NONE, room=[1 / 3, 1 / 3, 1 / 3]).tolist() == [10.0, 10.0, 10.0]


@pytest.mark.parametrize("twin", [fluid.simulate, simulate.simulate])
def test_four_lanes_may_want_more_than_there_is_where_three_do_not(twin: Callable[[Problem, Schedule], fluid.Simulation]) -> None:
    done = finish_times([10.0] * 4, np.ones((4, 4)), np.ones((4, 4)), room=[0.3] * 4)
    assert done.max() > 11.0
    costs = CostTable((1,), np.zeros((4, 1), dtype=np.int32), np.array([10.0]), *np.ones((2, 1, 1)), 0.0, 0.0, 0.0, 4, room=np.array([0.3]))
    problem = Problem.from_arrays([[]] * 4, costs)
    assert twin(problem, problem.schedule(range(4), range(4))).end_us == pytest.approx(done.tolist())


def test_who_waits_for_a_core_disturbs_nobody() -> None:
    # Two at a time, each pair twice as slow: two take 20, and the third then runs alone. All three at once would be 30 each.
    twice = np.full((3, 3), 2.0)
    done = finish_times([10.0, 10.0, 10.0], twice, twice, room=[0.5, 0.5, 0.5])
    assert done.tolist() == pytest.approx([20.0, 20.0, 30.0], rel=3 * LEAST_SHARE)


def test_what_is_left_over_goes_to_the_last_in_order_of_start() -> None:
    assert shares([0.4, 0.4, 0.4]) == pytest.approx([1.0, 1.0, 0.5])
    assert shares([0.0, 1.0, 0.0]) == [1.0, 1.0, 1.0]
    # Beside the first alone the last would get half of what it wants, and that a pair has shown; beside both it gets a quarter.
    assert shares([0.5, 0.25, 1.0]) == pytest.approx([1.0, 1.0, 0.5])


def test_a_queue_that_pairs_have_shown_is_not_counted_again() -> None:
    # The first takes every core: whoever comes second or third has been seen waiting for it, in the pairs with it.
    behind = np.full((3, 3), 24.0)
    done = finish_times([10.0, 10.0, 10.0], NONE, behind, room=[1.0, 0.5, 0.5])
    assert done.tolist() == pytest.approx(finish_times([10.0, 10.0, 10.0], NONE, behind).tolist())


@few
@given(st.integers(0, 10_000))
def test_two_take_what_the_pair_model_says(seed: int) -> None:
    group = Group(seed, 2)
    a, b = (np.asarray([value]) for value in group.solo_us)
    ratio = makespan_ratio(a, b, np.asarray([group.first[0, 1]]), np.asarray([group.last[1, 0]]))
    assert group.finish([0, 1]).max() == pytest.approx(float(ratio[0]) * group.solo_us.sum())


@groups
@few
def test_the_time_together_lies_between_its_bounds(seed: int, count: int) -> None:
    group = Group(seed, count)
    everyone = list(range(count))
    # An excess pair with product 1 takes exactly as long together as one after the other; below it, less.
    pressure = np.random.default_rng(seed).uniform(0.2, 5.0, size=count)
    group.first = group.last = 1.0 + pressure[None, :] / pressure[:, None] * np.random.default_rng(seed).uniform(0.0, 1.0)
    done = group.finish(everyone)
    assert (done >= group.solo_us - 1e-9).all()
    work = float((group.solo_us * group.room).sum())
    queued = 1.0 + count * LEAST_SHARE * count
    assert done.max() <= float(group.solo_us.sum()) * queued
    if (group.room <= 0.5).all():  # then two always fit, and all that is known of room is counted here
        assert done.max() >= work / queued


@groups
@few
def test_one_more_operator_never_makes_the_others_faster(seed: int, count: int) -> None:
    crowd = Group(seed, count + 1, room=False)
    before, after = crowd.finish(list(range(count))), crowd.finish(list(range(count + 1)))
    assert (after[:count] >= before - 1e-9).all()
    queue = Group(seed, count + 1)
    queue.first, queue.last = np.ones_like(queue.first), np.ones_like(queue.last)
    before, after = queue.finish(list(range(count))), queue.finish(list(range(count + 1)))
    assert (after[:count] >= before - 1e-9).all()
    assert after.max() >= before.max() - 1e-9


@groups
@few
def test_who_is_called_what_does_not_matter(seed: int, count: int) -> None:
    group = Group(seed, count)
    names = np.random.default_rng(seed + 1).permutation(count).tolist()
    other = Group(seed, count)
    other.solo_us, other.room = group.solo_us[names], group.room[names]
    other.first, other.last = group.first[np.ix_(names, names)], group.last[np.ix_(names, names)]
    places = [names.index(member) for member in range(count)]
    assert other.finish(places).tolist() == pytest.approx(group.finish(list(range(count))).tolist())


@groups
@few
def test_the_order_of_start_matters_only_through_its_slowdowns_where_all_fit(seed: int, count: int) -> None:
    group = Group(seed, count, room=False)
    group.last = group.first
    turned = np.random.default_rng(seed + 1).permutation(count).tolist()
    assert group.finish(turned).tolist() == pytest.approx(group.finish(list(range(count)))[turned].tolist())


@groups
@few
def test_the_search_simulates_the_composition_that_is_evaluated(seed: int, count: int) -> None:
    group = Group(seed, count)
    kernel = np.arange(count, dtype=np.int32)[:, None]
    costs = CostTable((1,), kernel, group.solo_us, group.first, group.last, 0.0, 0.0, 0.0, count, room=group.room)
    problem = Problem.from_arrays([[] for _ in range(count)], costs)
    schedule = problem.schedule(range(count), list(range(count)))
    expected = group.finish(list(range(count))).tolist()
    assert fluid.simulate(problem, schedule).end_us == pytest.approx(tuple(expected))
    assert simulate.simulate(problem, schedule).end_us == pytest.approx(tuple(expected))


def test_compiled_code_holds_the_same_numbers() -> None:
    assert (layout.LEAST_SHARE, layout.ROOM_DUST) == (composition.LEAST_SHARE, composition.ROOM_DUST)


def test_room_is_cores_on_a_cpu_and_block_slots_on_a_gpu_and_not_known_elsewhere() -> None:
    cpu, gpu, npu = DeviceFacts("c", "cpu", 4), DeviceFacts("g", "cuda", 100, threads_per_unit=2048), DeviceFacts("n", "npu", 1)

    def kernel(width: int, launch: LaunchFacts | None) -> KernelFacts:
        return KernelFacts("k", width, "aten::relu", 1, 8, 8, 1000, 5.0, launch=launch)

    kernels = (kernel(1, None), kernel(4, None), kernel(1, LaunchFacts(100, 256, blocks_per_sm=4)), kernel(1, LaunchFacts(9000, 256)))
    found = room_of((*kernels, kernel(1, None), kernel(1, None)), (cpu, gpu, npu), np.asarray([0, 0, 1, 1, 1, 2]))
    assert found.tolist() == pytest.approx([0.25, 1.0, 0.25, 1.0, 0.0, 0.0])
    assert math.isfinite(float(found.sum()))
