"""The CPU measurer on a program that overwrites its inputs: every run has the same to do, and comparisons see what is served."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from autosched.capture.export import capture
from autosched.core.in_place import chains_of
from autosched.core.program import Program, Ref, WriteBack
from autosched.core.records import Failure, ScheduleRecord
from autosched.core.schedule import make_schedule, sequential
from autosched.core.variants import Lowering
from autosched.device.base import Pair
from autosched.device.cpu_measure import CpuMeasurer
from autosched.device.cpu_pairs import measure_pairs
from autosched.device.cpu_solo import measure_solo
from autosched.runtime.kernels import random_inputs
from autosched.runtime.plan import make_plan
from autosched.runtime.widths import WidePrograms
from autosched.runtime.workspace import peak_live_bytes
from tests.conformance.graphs import Recorder
from tests.conformance.stateful import KeyValueCache, example, made


def measurer_of(program: Program, constants: dict[int, torch.Tensor], seed: int = 0) -> CpuMeasurer:
    return CpuMeasurer(WidePrograms(program, constants), random_inputs(program, seed), lambda item: None)


@pytest.fixture
def cache() -> CpuMeasurer:
    """A cache of keys and one of values, filled at a place that is counted."""
    captured = capture(made(KeyValueCache), (example(),), lowering=Lowering.REWRITTEN)
    return measurer_of(captured.program, captured.constants)


def test_a_hundred_runs_leave_the_place_where_it_was_and_give_one_answer(cache: CpuMeasurer) -> None:
    order = sequential(cache.graph)
    expected = cache.bound.run([tensor.clone() for tensor in cache.inputs])
    count = cache.inputs[next(place for place, value in enumerate(cache.graph.inputs) if not cache.graph.values[value].spec.shape)]
    before = int(count)
    (answer,) = list(cache.schedules([order], 3, True, 500.0, 0))
    assert isinstance(answer[1], ScheduleRecord)
    assert int(count) == before
    executor = cache._executor(make_plan(cache.graph, order))
    assert len(executor.in_place) == 2
    for _ in range(100):
        outputs = executor.run(cache.inputs)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(outputs, expected, strict=True))
    # The memory that the caches have already is no workspace.
    assert answer[1].peak_memory_bytes < peak_live_bytes(cache.graph, make_plan(cache.graph, order))


def test_a_comparison_overwrites_all_that_calls_do_and_none_of_the_references_inputs(cache: CpuMeasurer) -> None:
    order = sequential(cache.graph)
    assert len(cache._executor(make_plan(cache.graph, order), every=True).in_place) == 3
    inputs = random_inputs(cache.bound.program, 7)
    before = [tensor.clone() for tensor in inputs]
    references = [cache.bound.run([tensor.clone() for tensor in inputs])]
    comparison = cache.compare(order, [inputs], references).comparison
    assert comparison is not None
    assert comparison.bitwise
    assert comparison.within_tolerance
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(inputs, before, strict=True))


def test_operators_alone_are_timed_in_place_under_a_name_of_their_own(cache: CpuMeasurer) -> None:
    graph = cache.graph
    own = {link.operator for chain in chains_of(cache.bound.program) if chain.repeatable for link in chain.links}
    assert {operator.index for operator in graph.operators if operator.signature.endswith("+in_place")} == own
    for index in own:
        assert cache.kernel(index, 1) is not cache.programs.kernel(index, 1)
        assert graph.operators[index].bytes_written < graph.values[graph.operators[index].writes[0]].spec.bytes
    records = {operator: record for operator, _, record, _ in measure_solo(cache, [(1, 0)], 2, (), 0)}
    assert all(records[index] is not None and records[index].signature.endswith("+in_place") for index in own)


def test_a_pair_of_writers_can_be_timed(cache: CpuMeasurer) -> None:
    first, last = sorted({link.operator for chain in chains_of(cache.bound.program) if chain.repeatable for link in chain.links})
    if not cache.graph.independent(first, last):
        pytest.skip("one of them waits for the other in this capture")
    ((_, record, failure),) = measure_pairs(cache, [Pair(first, last, 1, 1)], 1, 0)
    assert failure is None
    assert record is not None


def raced() -> tuple[Program, dict[int, torch.Tensor]]:
    """A reader of the old contents and a writer that nothing orders."""
    recorder = Recorder()
    cache, x = recorder.input(torch.zeros(64, 64)), recorder.input(torch.ones(64, 64))
    old = recorder.run("aten::add.Tensor", cache, x)
    final = recorder.run("aten::mul.Tensor", cache, x)
    program = dataclasses.replace(recorder.build([final, old]), writes=(WriteBack(cache.value, final.value),))
    assert isinstance(old, Ref)
    return program, {}


def test_a_schedule_that_would_race_is_compared_in_the_form_that_copies() -> None:
    program, constants = raced()
    measurer = measurer_of(program, constants)
    for lanes, expected in (([0, 0], 1), ([0, 1], 0)):
        schedule = make_schedule(program.graph, [0, 1], lanes)
        assert len(measurer._executor(make_plan(program.graph, schedule), every=True).in_place) == expected
        inputs = random_inputs(program, 3)
        answer = measurer.compare(schedule, [inputs], [measurer.bound.run([tensor.clone() for tensor in inputs])])
        assert not isinstance(answer.failure, Failure)
        assert answer.comparison is not None
        assert answer.comparison.bitwise
