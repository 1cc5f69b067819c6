"""What is made of the times of operators in a program: figures that add up to a run of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosched.core.records import SoloRecord
from autosched.device import cpu_solo
from autosched.device.cpu_measure import CpuMeasurer
from autosched.device.cpu_solo import measure_solo, shared_times
from autosched.runtime.kernels import random_inputs
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.widths import WidePrograms
from tests.conformance.programs import branches_program


def test_a_stop_somewhere_in_each_run_is_in_the_sum_and_changes_no_ratio() -> None:
    alone_us = np.asarray([10.0, 20.0, 20.0, 50.0])
    times_us = np.tile(alone_us, (4, 1))
    # Each run is stopped for as long as it takes, each time in another operator, which no median sees.
    for run in range(4):
        times_us[run, run] += 100.0
    found = shared_times(times_us, {"small": [0], "twins": [1, 2], "large": [3]})
    medians_us = {signature: float(np.median(rounds_us)) for signature, rounds_us in found.items()}
    assert medians_us["small"] + 2 * medians_us["twins"] + medians_us["large"] == pytest.approx(200.0)
    assert medians_us["large"] / medians_us["small"] == pytest.approx(5.0)


def test_operators_that_could_not_be_timed_are_left_out_of_the_sum() -> None:
    times_us = np.asarray([[10.0, 1e6, 30.0], [10.0, 1e6, 30.0]])
    found = shared_times(times_us, {"a": [0], "broken": [], "b": [2]})
    assert {signature: rounds_us.tolist() for signature, rounds_us in found.items()} == {"a": [10.0, 10.0], "b": [30.0, 30.0]}


@given(st.lists(st.lists(st.floats(1e-3, 1e6), min_size=5, max_size=5), min_size=1, max_size=9))
def test_what_is_added_up_is_the_median_run(rows: list[list[float]]) -> None:
    times_us = np.asarray(rows)
    members = {"one": [0, 3], "two": [1], "three": [2, 4]}
    found = shared_times(times_us, members)
    together_us = sum(len(members[signature]) * float(np.median(rounds_us)) for signature, rounds_us in found.items())
    assert together_us == pytest.approx(float(np.median(times_us.sum(axis=1))))


@pytest.mark.parametrize(("rounds", "long_us", "runs"), [(3, 0.0, 2 * 3), (3, 1e9, 2 * 4 * 2), (1, 1e9, 2 * 2)])
def test_of_long_runs_none_is_made_that_does_not_count(rounds: int, long_us: float, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of short ones there is a whole round, unless there is to be but one, and one before each block."""
    made: list[object] = []
    run = LaneExecutor.run
    monkeypatch.setattr(LaneExecutor, "run", lambda *given: made.append(given) or run(*given))
    monkeypatch.setattr(cpu_solo, "_LONG_RUN_US", long_us)
    monkeypatch.setattr(cpu_solo, "MOST_RUNS", 1)
    program, constants = branches_program()
    measurer = CpuMeasurer(WidePrograms(program, constants), random_inputs(program, 0), lambda item: None)
    answers = [record for _, _, record, _ in measure_solo(measurer, [(1, 0), (2, 0)], rounds, (), 0)]
    assert len(made) == runs
    assert all(isinstance(record, SoloRecord) and record.samples.count == rounds and record.samples.median_us > 0.0 for record in answers)
