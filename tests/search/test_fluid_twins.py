from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autosched.core.costs import CostTable
from autosched.core.errors import UsageError
from autosched.core.schedule import Schedule
from autosched.search import fluid, simulate, synthetic
from autosched.search.beam import Beam
from autosched.search.policies import Decoder, Policy
from autosched.search.problem import Problem
from autosched.search.strategy import SearchContext
from autosched.search.synthetic import random_order


def with_concurrent_gap(problem: Problem, gap_us: float) -> Problem:
    return Problem.make(problem.graph, dataclasses.replace(problem.costs, concurrent_gap_us=gap_us))


def with_room(problem: Problem, seed: int) -> Problem:
    """Kernels that take from nothing to all of the device."""
    room = np.random.default_rng(seed).choice([0.0, 0.2, 0.5, 0.7, 1.0], size=len(problem.solo_us))
    return Problem.make(problem.graph, dataclasses.replace(problem.costs, room=room))


def with_threads(problem: Problem, polling_us: float, team_spin_us: float) -> Problem:
    """Kernels of one and of two threads on two cores, whose lanes poll and whose helper threads spin."""
    room = np.full(len(problem.solo_us), 0.5)
    if len(problem.costs.widths) > 1:
        room[np.setdiff1d(problem.kernel[:, 1], problem.kernel[:, 0])] = 1.0
    costs = dataclasses.replace(problem.costs, room=room, polling_us=polling_us, team_spin_us=team_spin_us)
    return Problem.make(problem.graph, costs)


def with_variants(problem: Problem, seed: int) -> Problem:
    """Half of the operators in another variant, too: the kernel of some other operator."""
    rng = np.random.default_rng(seed)
    own = problem.costs.kernel[:, 0]
    kernel = np.where(rng.random(problem.count) < 0.5, own, rng.permutation(own)).astype(np.int32)
    variant = np.zeros_like(problem.costs.kernel)
    costs = dataclasses.replace(problem.costs, variant=variant, other_kernel=kernel, other_variant=(kernel != own).astype(np.int32))
    return Problem.make(problem.graph, costs)


def random_schedule(problem: Problem, seed: int, lanes: int) -> Schedule:
    rng = np.random.default_rng(seed)
    order = random_order(problem, rng)
    extra = []
    for _ in range(int(rng.integers(0, 5))):
        first, second = np.sort(rng.integers(0, problem.count, size=2))
        if first != second:
            extra.append((int(order[first]), int(order[second])))
    width_index = rng.integers(0, problem.kernel.shape[1], size=problem.count)
    return problem.schedule(order, rng.integers(0, lanes, size=problem.count), width_index=width_index, extra_edges=extra)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 40), lanes=st.integers(1, 6), widths=st.sampled_from([(1,), (1, 2)]))
@example(seed=736537, count=16, lanes=5, widths=(1,))  # sums that differ in the last bit if added up in order of start
def test_the_compiled_simulator_equals_the_reference(seed: int, count: int, lanes: int, widths: tuple[int, ...]) -> None:
    problem = synthetic.random_problem(seed, count, widths=widths, max_lanes=lanes)
    problem = with_concurrent_gap(problem, 2.5 * (seed % 2))
    if seed % 3:
        problem = with_room(problem, seed)
    if seed % 5 == 0:
        problem = with_variants(problem, seed)
    schedule = random_schedule(problem, seed, lanes)
    assert simulate.simulate(problem, schedule) == fluid.simulate(problem, schedule)


THREADS = {"polling_us": st.sampled_from([0.0, 5.0, 300.0]), "team_spin_us": st.sampled_from([0.0, 8.0, 400.0])}


@settings(max_examples=120, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 40), lanes=st.integers(1, 6), **THREADS)
def test_the_compiled_simulator_equals_the_reference_where_threads_poll_and_spin(
    seed: int, count: int, lanes: int, polling_us: float, team_spin_us: float
) -> None:
    problem = with_threads(synthetic.random_problem(seed, count, widths=(1, 2), max_lanes=lanes), polling_us, team_spin_us)
    schedule = random_schedule(problem, seed, lanes)
    assert simulate.simulate(problem, schedule) == fluid.simulate(problem, schedule)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6), count=st.integers(1, 30), lanes=st.integers(1, 5), gate=st.sampled_from([0.0, 0.4, float("inf")]), **THREADS
)
def test_what_a_list_policy_predicts_holds_where_threads_poll_and_spin(
    seed: int, count: int, lanes: int, gate: float, polling_us: float, team_spin_us: float
) -> None:
    problem = with_threads(synthetic.random_problem(seed, count, widths=(1, 2), max_lanes=lanes), polling_us, team_spin_us)
    candidate = Decoder(problem, lanes, np.array([0, 1], dtype=np.int32)).decode(Policy(alpha=1.0, gate=gate, wide_below=2.0))
    exported = candidate.schedule(problem)
    assert fluid.simulate(problem, exported).makespan_us == pytest.approx(candidate.makespan_us, rel=1e-9)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 30),
    lanes=st.integers(1, 5),
    alpha=st.sampled_from([0.0, 1.0]),
    gate=st.sampled_from([0.0, 0.4, 1.0, float("inf")]),
    wide_below=st.sampled_from([-1.0, 0.0, 2.0, 1e9]),
)
def test_what_a_list_policy_predicts_is_what_the_exported_schedule_takes(
    seed: int, count: int, lanes: int, alpha: float, gate: float, wide_below: float
) -> None:
    problem = with_concurrent_gap(synthetic.random_problem(seed, count, widths=(1, 2), max_lanes=lanes), 2.5 * (seed % 2))
    if seed % 3:
        problem = with_room(problem, seed)
    decoder = Decoder(problem, lanes, np.array([0, 1], dtype=np.int32))
    candidate = decoder.decode(Policy(alpha=alpha, gate=gate, wide_below=wide_below))
    exported = candidate.schedule(problem)
    assert fluid.simulate(problem, exported).makespan_us == pytest.approx(candidate.makespan_us, rel=1e-9)


def of_one_team(problem: Problem, cross_lane_us: float = 1.0) -> Problem:
    """The same where the lanes are the threads of one team."""
    return Problem.make(problem.graph, dataclasses.replace(problem.costs, one_team=True, cross_lane_us=cross_lane_us))


TEAM = {
    "seed": st.integers(0, 10**6),
    "count": st.integers(1, 40),
    "lanes": st.integers(1, 5),
    "shape": st.sampled_from(["layered", "wide", "cells"]),
    "cross_lane_us": st.sampled_from([0.2, 1.0, 9.0]),
    "polling_us": st.sampled_from([0.0, 0.0, 5.0]),
}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(**TEAM)
def test_a_wide_operator_of_a_team_has_edges_from_all_before_it_and_to_all_after_it(
    seed: int, count: int, lanes: int, shape: str, cross_lane_us: float, polling_us: float
) -> None:
    apart = with_threads(synthetic.random_problem(seed, count, shape=shape, widths=(1, 2), max_lanes=lanes), polling_us, 0.0)
    apart = with_concurrent_gap(apart, 2.5 * (seed % 2))
    team = of_one_team(apart, cross_lane_us)
    apart = Problem.make(apart.graph, dataclasses.replace(team.costs, one_team=False))
    schedule = random_schedule(team, seed, lanes)
    run = fluid.simulate(team, schedule)
    assert simulate.simulate(team, schedule) == run
    edges = set(schedule.extra_edges)
    for place, operator in enumerate(schedule.order):
        if schedule.width[operator] > 1:
            edges |= {(before, operator) for before in schedule.order[:place]}
            edges |= {(operator, after) for after in schedule.order[place + 1 :]}
    assert fluid.simulate(apart, dataclasses.replace(schedule, extra_edges=tuple(sorted(edges)))) == run


@settings(max_examples=100, deadline=None, derandomize=True)
@given(**TEAM, gate=st.sampled_from([0.0, 0.4, float("inf")]), wide_below=st.sampled_from([0.0, 1.0, 2.0, 1e9]))
def test_what_a_list_policy_predicts_holds_where_lanes_are_one_team(
    seed: int, count: int, lanes: int, shape: str, cross_lane_us: float, polling_us: float, gate: float, wide_below: float
) -> None:
    problem = with_threads(synthetic.random_problem(seed, count, shape=shape, widths=(1, 2), max_lanes=lanes), polling_us, 0.0)
    problem = of_one_team(with_concurrent_gap(problem, 2.5 * (seed % 2)), cross_lane_us)
    candidate = Decoder(problem, lanes, np.array([0, 1], dtype=np.int32)).decode(Policy(alpha=1.0, gate=gate, wide_below=wide_below))
    exported = candidate.schedule(problem)
    assert fluid.simulate(problem, exported).makespan_us == pytest.approx(candidate.makespan_us, rel=1e-9)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(**TEAM, pilot=st.booleans())
def test_what_a_beam_predicts_holds_where_lanes_are_one_team(
    seed: int, count: int, lanes: int, shape: str, cross_lane_us: float, polling_us: float, pilot: bool
) -> None:
    problem = with_threads(synthetic.random_problem(seed, count, shape=shape, widths=(1, 2), max_lanes=lanes), polling_us, 0.0)
    problem = of_one_team(problem, cross_lane_us)
    context = SearchContext(np.random.default_rng(seed), max_evaluations=1500, max_lanes=lanes)
    found, _ = Beam("beam", width=4, branch=4, pilot=pilot).run(problem, context)
    for candidate in found:
        assert fluid.simulate(problem, candidate.schedule(problem)).makespan_us == pytest.approx(candidate.makespan_us, rel=1e-9)


def test_what_is_launched_around_a_wide_operator_of_a_team_does_not_run_beside_it() -> None:
    predecessors, solo = [[], [], [], [], []], [10.0, 4.0, 6.0, 3.0, 3.0]
    ones = np.ones((6, 6))
    kernel = np.array([[0, 5], [1, 5], [2, 5], [3, 5], [4, 5]], dtype=np.int32)
    costs = CostTable((1, 2), kernel, np.array([*solo, 5.0]), ones, ones, 0.5, 2.0, 0.0, 2, one_team=True)
    problem = Problem.from_arrays(predecessors, costs)
    wide = [0, 0, 1, 1, 0]
    run = fluid.simulate(problem, problem.schedule([1, 0, 2, 3, 4], [0, 1, 0, 0, 1], width_index=wide))
    # Beside each other 10 and 4; the wide one when both have ended, its own lane last; the next after the gap; then the team parts.
    assert run.start_us == pytest.approx((0.0, 0.0, 10.5, 16.0, 23.0))
    run = fluid.simulate(problem, problem.schedule([0, 1, 2, 4, 3], [1, 0, 0, 0, 1], width_index=[0, 0, 1, 0, 0]))
    # Now the other lane is last: the team comes together; an operator of the wide one's own lane follows it after the gap.
    assert run.start_us == pytest.approx((0.0, 0.0, 12.0, 17.5, 19.0))


def two_operators(first: float, last: float, solo: tuple[float, float] = (10.0, 10.0)) -> Problem:
    ones = np.ones((2, 2))
    costs = CostTable((1,), np.array([[0], [1]], dtype=np.int32), np.array(solo), ones * first, ones * last, 0.5, 1.0, 5.0, 2)
    return Problem.from_arrays([[], []], costs)


def test_the_operator_launched_first_suffers_the_first_slowdown() -> None:
    # Operator 1 is launched first: it runs at 1.0, the other at a third until 1 is done at 10, then alone: 10 + 10 * 2/3.
    problem = two_operators(1.0, 3.0)
    run = fluid.simulate(problem, problem.schedule([1, 0], [0, 1]))
    assert run.end_us[1] == pytest.approx(10.0)
    assert run.end_us[0] == pytest.approx(10.0 + 10.0 * 2 / 3)
    assert run.makespan_us == pytest.approx(run.end_us[0] + 5.0)


def test_equal_saturating_operators_share_the_processor() -> None:
    problem = two_operators(2.0, 2.0)
    assert fluid.simulate(problem, problem.schedule([0, 1], [0, 1])).end_us == pytest.approx((20.0, 20.0))


def test_an_extra_edge_costs_the_cross_lane_latency_and_a_lane_the_launch_gap() -> None:
    problem = two_operators(1.0, 1.0)
    apart = fluid.simulate(problem, problem.schedule([0, 1], [0, 1], extra_edges=[(0, 1)]))
    assert apart.start_us == pytest.approx((0.0, 11.0))
    together = fluid.simulate(problem, problem.schedule([0, 1], [0, 0]))
    assert together.start_us == pytest.approx((0.0, 10.5))


def test_an_operator_that_would_start_beside_another_is_put_off_once() -> None:
    problem = with_concurrent_gap(two_operators(1.0, 1.0), 3.0)
    beside = fluid.simulate(problem, problem.schedule([0, 1], [0, 1]))
    assert beside.start_us == pytest.approx((0.0, 3.0))
    assert fluid.simulate(problem, problem.schedule([0, 1], [0, 0])).start_us == pytest.approx((0.0, 10.5))
    with pytest.raises(UsageError, match="concurrent_gap_us"):
        with_concurrent_gap(problem, float("nan"))


def threads_problem(predecessors: list[list[int]], solo: list[float], *, wide: tuple[int, ...] = (), **waiting: float) -> Problem:
    """Operators that do not disturb each other, on two cores; those in ``wide`` take both."""
    count = len(solo)
    ones = np.ones((count, count))
    room = np.where(np.isin(np.arange(count), wide), 1.0, 0.5)
    costs = CostTable((1,), np.arange(count, dtype=np.int32)[:, None], np.array(solo), ones, ones, 0.5, 1.0, 0.0, 2, room=room, **waiting)
    return Problem.from_arrays(predecessors, costs)


def test_a_lane_that_polls_delays_whoever_ends_and_one_that_sleeps_is_woken() -> None:
    predecessors, solo = [[], [], [1], [1]], [10.0, 50.0, 5.0, 5.0]
    lanes = [1, 0, 1, 0]
    polling = threads_problem(predecessors, solo, polling_us=100.0)
    run = fluid.simulate(polling, polling.schedule([0, 1, 2, 3], lanes))
    assert run.end_us[1] == pytest.approx(51.0)
    assert run.start_us[2:] == pytest.approx((51.0, 51.5))
    asleep = threads_problem(predecessors, solo, polling_us=20.0)
    run = fluid.simulate(asleep, asleep.schedule([0, 1, 2, 3], lanes))
    assert run.end_us[1] == pytest.approx(50.0)
    assert run.start_us[2:] == pytest.approx((51.0, 50.5))
    # What ended before the lane asks costs nothing.
    early = threads_problem([[], [], [1], []], [30.0, 10.0, 5.0, 40.0], polling_us=100.0)
    assert fluid.simulate(early, early.schedule([0, 1, 2, 3], [0, 1, 0, 1])).start_us[2] == pytest.approx(30.5)


def test_helper_threads_of_a_wide_operator_take_cores_from_what_runs_after_it() -> None:
    predecessors, solo, lanes = [[], [0], [0], [1, 2]], [10.0, 20.0, 20.0, 20.0], [0, 0, 1, 0]
    quiet = threads_problem(predecessors, solo, wide=(0,))
    calm = fluid.simulate(quiet, quiet.schedule([0, 1, 2, 3], lanes))
    assert calm.end_us[1] - calm.start_us[1] == pytest.approx(20.0)
    spinning = threads_problem(predecessors, solo, wide=(0,), team_spin_us=1000.0)
    run = fluid.simulate(spinning, spinning.schedule([0, 1, 2, 3], lanes))
    # Three threads on two cores while both run (from 11.0 on); one operator and the helper have a core each.
    assert run.end_us[1] == pytest.approx(11.0 + 1.5 * 19.5)
    assert run.end_us[3] - run.start_us[3] == pytest.approx(20.0)
    over = threads_problem(predecessors, solo, wide=(0,), team_spin_us=0.6)
    assert fluid.simulate(over, over.schedule([0, 1, 2, 3], lanes)).makespan_us == pytest.approx(calm.makespan_us)


def test_several_extra_edges_into_one_operator_all_count() -> None:
    problem = synthetic.random_problem(3, 12, shape="wide", max_lanes=4)
    schedule = problem.schedule(range(12), [0, 1, 2, 3] * 3, extra_edges=[(0, 10), (1, 10), (5, 10), (5, 7)])
    assert simulate.simulate(problem, schedule) == fluid.simulate(problem, schedule)


def test_prefix_states_go_on_independently() -> None:
    problem = synthetic.random_problem(4, 10, shape="wide", max_lanes=2)
    state = fluid.FluidState(problem, 2)
    sources = [index for index in range(10) if not problem.predecessors(index)]
    state.place(sources[0], 0, 0, 0)
    twin = state.copy()
    twin.place(sources[1], 1, 0, 1)
    while twin.advance() != sources[0]:
        pass
    assert state.end_us[sources[0]] < 0.0
    assert twin.end_us[sources[0]] > 0.0


def test_a_width_without_costs_is_refused() -> None:
    problem = two_operators(1.0, 1.0)
    schedule = problem.schedule([0, 1], [0, 1])
    wide = Schedule(schedule.graph_hash, schedule.order, schedule.lane, (4, 4), schedule.priority, schedule.variant)
    with pytest.raises(UsageError, match="widths"):
        simulate.makespan_us(problem, wide)
