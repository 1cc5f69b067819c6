"""Hill climbing on a simulated device: it never ends with something slower, goes on where it was killed, and stops when it should."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosched.core.records import Failure
from autosched.core.schedule import Schedule, violations
from autosched.search import leftover, strategy, synthetic
from autosched.search.climb import ClimbResult, ClimbSettings, climb
from autosched.search.halving import Ledger
from autosched.search.leftover import BlockKernels
from autosched.search.neighbours import Kind, Neighbours
from autosched.search.portfolio import Proposal, proposals
from autosched.search.priorities import by_path
from autosched.search.problem import Problem
from autosched.search.strategy import SearchContext
from tests.search.bench_double import FakeBench, Killed
from tests.search.test_fluid_twins import with_variants

SMALL = ClimbSettings(batch=6, rounds=(1, 2, 4), finalists=2, idle=3)


def context(seed: int = 3, deadline_s: float | None = None) -> SearchContext:
    return SearchContext(np.random.default_rng(seed), 300, deadline_s)


def start(problem: Problem) -> Proposal:
    return proposals(problem, context(), lanes_matter=False, count=1, strategies=())[0]


def climbed(problem: Problem, bench: FakeBench, ledger: Ledger | None = None, *, seed: int = 3, how: ClimbSettings = SMALL) -> ClimbResult:
    return climb(problem, bench, context(seed), ledger or Ledger(), incumbent=start(problem), lanes_matter=False, settings=how)


def truth_us(problem: Problem, kernels: BlockKernels, schedule: Schedule) -> float:
    return leftover.simulate_compiled(problem, kernels, schedule).makespan_us


@given(seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_where_nothing_is_noise_it_never_ends_with_something_slower(seed: int) -> None:
    problem, kernels = synthetic.random_block_problem(seed, 24, shape=("layered", "cells", "wide")[seed % 3])
    first = start(problem)
    found = climbed(problem, FakeBench(problem, kernels, noise=0.0), seed=seed)
    assert violations(problem.graph, found.best.schedule) == []
    before_us, after_us = (truth_us(problem, kernels, item.schedule) for item in (first, found.best))
    assert after_us < before_us if found.changes else found.best == first


def test_it_finds_what_the_model_does_not_know() -> None:
    problem, kernels = synthetic.random_block_problem(0, 40)
    found = climbed(problem, FakeBench(problem, kernels, noise=0.002), how=ClimbSettings(idle=6))
    assert found.changes >= 1
    assert truth_us(problem, kernels, found.best.schedule) < 0.995 * truth_us(problem, kernels, start(problem).schedule)


def test_it_goes_on_where_it_was_killed() -> None:
    problem, kernels = synthetic.random_block_problem(0, 24)
    whole = FakeBench(problem, kernels, noise=0.005)
    expected = climbed(problem, whole)
    assert expected.changes >= 1
    for after in (5, whole.runs // 2, whole.runs - 1):
        broken = FakeBench(problem, kernels, noise=0.005, die_after=after)
        with pytest.raises(Killed):
            climbed(problem, broken)
        resumed = FakeBench(problem, kernels, noise=0.005)
        resumed.times = {key: list(times) for key, times in broken.times.items()}
        assert climbed(problem, resumed, Ledger.resume(resumed.times)) == expected
        assert resumed.runs + sum(map(len, broken.times.values())) == whole.runs


def test_it_goes_on_where_it_was_killed_though_a_neighbour_of_a_later_batch_had_failed() -> None:
    problem, kernels = synthetic.random_block_problem(0, 24)
    probe = FakeBench(problem, kernels, noise=0.005)
    climbed(problem, probe)
    later = list(probe.times)[SMALL.batch + 2]  # the incumbent, a batch, and then it
    whole, broken, resumed = (FakeBench(problem, kernels, noise=0.005, fail=frozenset({later})) for _ in range(3))
    expected = climbed(problem, whole)
    broken.die_after = whole.runs - 1
    ledger = Ledger()
    with pytest.raises(Killed):
        climbed(problem, broken, ledger)
    assert list(ledger.failures) == [later]
    resumed.times = {key: list(times) for key, times in broken.times.items()}
    assert climbed(problem, resumed, Ledger.resume(resumed.times, ledger.failures)) == expected
    assert resumed.runs + sum(map(len, broken.times.values())) == whole.runs


def test_no_batch_begins_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, kernels = synthetic.random_block_problem(0, 24)
    now = 100.0
    monkeypatch.setattr(strategy.time, "monotonic", lambda: now)

    class Slow(FakeBench):
        def measure(self, schedules: Sequence[Schedule], rounds: int) -> list[list[float] | Failure]:
            nonlocal now
            now += 1.0
            return super().measure(schedules, rounds)

    first = start(problem)
    late = Slow(problem, kernels)
    assert climb(problem, late, context(deadline_s=100.0), Ledger(), incumbent=first, lanes_matter=False) == ClimbResult(first, 0, 0)
    assert late.runs == 0
    found = climb(problem, Slow(problem, kernels), context(deadline_s=100.5), Ledger(), incumbent=first, lanes_matter=False)
    assert found.batches == 1


def test_neighbours_that_fail_are_values_and_are_not_tried_again() -> None:
    problem, kernels = synthetic.random_block_problem(0, 24)
    first, asked = start(problem), list[str]()

    class Broken(FakeBench):
        def measure(self, schedules: Sequence[Schedule], rounds: int) -> list[list[float] | Failure]:
            self.fail = frozenset(map(self.key, schedules)) - {first.key}
            asked.extend(self.fail)
            return super().measure(schedules, rounds)

    ledger = Ledger()
    found = climbed(problem, Broken(problem, kernels), ledger)
    assert (found.best, found.batches, found.changes) == (first, SMALL.idle, 0)
    assert len(set(asked)) == len(asked) == len(ledger.failures) > 0


def test_an_incumbent_that_runs_no_more_is_kept() -> None:
    problem, kernels = synthetic.random_block_problem(0, 24)
    first = start(problem)
    found = climbed(problem, FakeBench(problem, kernels, fail=frozenset({first.key})))
    assert (found.best, found.changes) == (first, 0)


def test_it_ends_at_once_where_noise_hides_everything() -> None:
    problem, kernels = synthetic.random_block_problem(0, 24)
    assert climbed(problem, FakeBench(problem, kernels, noise=0.2)).batches == 1


@pytest.mark.parametrize("kind", list(Kind))
def test_every_move_makes_a_legal_schedule_and_leaves_the_rest_as_it_was(kind: Kind) -> None:
    problem = with_variants(synthetic.random_problem(4, 30), 2)
    schedule = proposals(problem, context(), lanes_matter=False, count=1, strategies=())[0].schedule
    schedule = by_path(problem, dataclasses.replace(schedule, variant=tuple(index % 3 for index in range(problem.count))))
    neighbours = Neighbours(problem, 4, np.random.default_rng(0))
    made = 0
    for _ in range(4000):
        move = neighbours.draw(schedule)
        if move.kind is not kind and kind is not Kind.FREE:
            continue
        changed = neighbours.make(schedule, move)
        if changed is not None:
            made += move.kind is kind
            assert violations(problem.graph, changed) == []
            assert changed != schedule
            kept = (changed.width, changed.variant, changed.priority)
            assert kept == (schedule.width, schedule.variant, schedule.priority)
            if kind is Kind.FREE and changed.extra_edges:
                schedule = changed  # there must be a wait before one can be dropped
        if made >= 5:
            return
    pytest.fail(f"{made} of {kind}")
