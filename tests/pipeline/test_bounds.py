"""Bounds that no schedule can beat: worked examples for both kinds of device."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autosched.core.costs import CostTable
from autosched.costmodel.table import OTHER
from autosched.datasets.facts import DeviceFacts, LaunchFacts
from autosched.pipeline.bounds import bound_of_times, lower_bounds
from autosched.search.problem import Problem


def problem(narrow_us: list[float], wide_us: list[float] | None = None) -> Problem:
    """A chain of two beside single operators; ``wide_us`` adds width 2."""
    count = len(narrow_us)
    solo = np.array([*narrow_us, *(wide_us or [])])
    kernel = np.arange(len(solo), dtype=np.int32).reshape(-1, count).T.copy()
    ones = np.ones((len(solo), len(solo)))
    widths = (1, 2) if wide_us else (1,)
    return Problem.from_arrays([[], [0], *[[]] * (count - 2)], CostTable(widths, kernel, solo, ones, ones, 0.0, 0.0, 0.0, 2))


def test_on_a_cpu_an_operator_takes_its_width_of_the_cores() -> None:
    # Least core time: 10, then the wide form of the second (2 x 5 = 10 against 12), then 6; over two cores 13.
    found = lower_bounds(problem([10.0, 12.0, 6.0], [6.0, 5.0, 6.0]), DeviceFacts("c", "cpu", 2), {})
    assert found.work_us == pytest.approx(13.0)
    assert found.critical_path_us == pytest.approx(11.0)


def test_on_a_gpu_it_takes_the_share_of_the_device_that_its_blocks_fill() -> None:
    made = problem([10.0, 12.0, 6.0])
    signatures = [operator.signature for operator in made.graph.operators]
    launches = {
        signatures[0]: LaunchFacts(blocks=4, threads_per_block=128, blocks_per_sm=2),  # 4 of 8: half
        signatures[1]: LaunchFacts(blocks=80, threads_per_block=128, blocks_per_sm=2),  # more than all
        signatures[2]: LaunchFacts(blocks=1, threads_per_block=128),  # residency unknown: counts for nothing
    }
    found = lower_bounds(made, DeviceFacts("g", "cuda", 4), launches)
    assert len(set(signatures)) == 3
    assert found.work_us == pytest.approx(5.0 + 12.0)
    assert found.critical_path_us == pytest.approx(22.0)
    assert lower_bounds(made, DeviceFacts("g", "cuda", 4), {}).work_us is None


def test_on_a_gpu_another_variant_may_take_less_of_the_device_in_more_time() -> None:
    made = problem([10.0, 12.0, 6.0, 13.0])
    costs = dataclasses.replace(
        made.costs, kernel=made.costs.kernel[:3], variant=np.zeros((3, 1), dtype=np.int32),
        other_kernel=np.array([3, 1, 2], dtype=np.int32), other_variant=np.array([4, 0, 0], dtype=np.int32),
    )  # fmt: skip
    made = Problem.from_arrays([[], [0], []], costs)
    launches = {operator.signature: LaunchFacts(blocks=8, threads_per_block=128, blocks_per_sm=2) for operator in made.graph.operators}
    launches[made.graph.operators[0].signature + OTHER] = LaunchFacts(blocks=4, threads_per_block=128, blocks_per_sm=2)
    # The first fills all of the device for 10 us, or half of it for 13; the others have no choice.
    assert lower_bounds(made, DeviceFacts("g", "cuda", 4), launches).work_us == pytest.approx(6.5 + 12.0 + 6.0)


def test_times_alone_give_the_higher_bound_without_a_cost_table() -> None:
    graph = problem([10.0, 12.0, 6.0]).graph
    narrow, both = np.array([[10.0], [12.0], [6.0]]), np.array([[10.0, 6.0], [12.0, 5.0], [6.0, 6.0]])
    # The same figures as above: work over two cores, then over one, and on a GPU the longest path alone.
    assert bound_of_times(graph, both, (1, 2), DeviceFacts("c", "cpu", 2)) == pytest.approx(13.0)
    assert bound_of_times(graph, narrow, (1,), DeviceFacts("c", "cpu", 1)) == pytest.approx(28.0)
    assert bound_of_times(graph, narrow, (1,), DeviceFacts("g", "cuda", 4)) == pytest.approx(22.0)
    # One width unknown leaves the other; an operator without any time leaves nothing to say.
    both[1, 1] = np.nan
    assert bound_of_times(graph, both, (1, 2), DeviceFacts("c", "cpu", 8)) == pytest.approx(18.0)
    assert bound_of_times(graph, np.array([[10.0], [np.nan], [6.0]]), (1,), DeviceFacts("c", "cpu", 2)) is None
