"""Whose graphs are captured again when schedules are timed in turn, a few rounds at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autosched.core.records import Failure
from autosched.core.schedule import Schedule, make_schedule, sequential
from autosched.device.cuda.measure import CudaMeasurer
from autosched.runtime.cuda.graph import GraphCapturer
from tests.conformance.fake_cuda import FakeCapture, FakeCuda
from tests.conformance.fake_cuda_values import FakeTensor
from tests.conformance.fake_graphs import diamond
from tests.conformance.fake_program import FakeProgram


class Counting(FakeCuda):
    """Knows how many captures began."""

    def __init__(self) -> None:
        super().__init__()
        self.captures = 0

    def begin_capture(self, pool: int) -> FakeCapture:
        self.captures += 1
        return super().begin_capture(pool)


def test_graphs_are_kept_while_the_same_schedules_are_timed() -> None:
    cuda, graph = Counting(), diamond()
    program = FakeProgram(cuda, graph)
    measurer = CudaMeasurer(GraphCapturer(cuda), program, graph, program.inputs(1))
    measurer.capturer.scratch_pool()
    alone, spread = sequential(graph), make_schedule(graph, range(len(graph)), [index % 2 for index in range(len(graph))])

    def captures(schedules: Sequence[Schedule]) -> int:
        before = cuda.captures
        times = measurer.paired(schedules, rounds=2, seed=0)
        assert not isinstance(times, Failure)
        assert [len(row) for row in times] == [2] * len(schedules)
        return cuda.captures - before

    # An A/A test is of two graphs: whoever loads the schedule captures another one.
    assert captures([alone, spread, alone]) == 3
    assert captures([spread, alone]) == 0
    assert captures([alone, spread, alone]) == 0
    # A duel of fewer begins with fresh graphs, and so does whatever comes after another measurement.
    assert captures([alone]) == 1
    assert captures([alone]) == 0
    for _ in measurer.schedules([spread], rounds=1, trace=False, min_block_us=0.0, seed=0):
        pass
    assert captures([alone]) == 1


class Holding(FakeCuda):
    """Knows how much was held when the last capture began."""

    held = 0

    def begin_capture(self, pool: int) -> FakeCapture:
        self.held = self.allocated_bytes()
        return super().begin_capture(pool)


def test_what_operators_are_given_alone_is_not_held_beside_whole_schedules() -> None:
    cuda, graph = Holding(), diamond(8, 4)
    program = FakeProgram(cuda, graph)
    measurer = CudaMeasurer(GraphCapturer(cuda), program, graph, program.inputs(1))
    measurer.capturer.scratch_pool()
    without = cuda.allocated_bytes()
    assert not isinstance(first := measurer.solo_us(1), Failure)
    assert cuda.allocated_bytes() > without
    assert not isinstance(measurer.paired([sequential(graph)], rounds=1, seed=0), Failure)
    assert cuda.held == without
    measurer.drop_runners()
    assert not isinstance(again := measurer.solo_samples(1, 3), Failure)
    assert again.median_us == first


class Small(Holding):
    """Has no memory beyond ``most`` bytes at a time."""

    most = 1 << 62

    def allocate(self, size: int) -> FakeTensor:
        if self.allocated_bytes() + size > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().allocate(size)


def test_where_there_is_no_memory_for_all_values_each_operator_is_given_its_own() -> None:
    cuda, graph = Small(), diamond(2, 20)
    program = FakeProgram(cuda, graph)
    capturer = GraphCapturer(cuda)
    capturer.scratch_pool()
    roomy, small = (CudaMeasurer(capturer, program, graph, program.inputs(1)) for _ in range(2))
    before = cuda.allocated_bytes()
    wanted = [roomy.solo_samples(operator, 3) for operator in range(len(graph))]
    every = cuda.allocated_bytes() - before
    roomy.close()
    cuda.most = cuda.allocated_bytes() + every // 2
    assert [small.solo_samples(operator, 3) for operator in range(len(graph))] == wanted
    assert not any(isinstance(found, Failure) for found in wanted)
    # Each chain has what it reads, whatever is asked for next.
    made = [small.chain([(operator, 2)]) for operator in (3, 30)]
    assert not any(isinstance(chain, Failure) for chain in made)


def test_every_replay_of_an_operator_shows_progress_with_it() -> None:
    """A chain of a slow operator may take seconds, and there are as many as repeats: their process must not count as hung."""
    graph = diamond(3, 2)
    cuda = FakeCuda()
    program = FakeProgram(cuda, graph)
    beats: list[int] = []
    measurer = CudaMeasurer(GraphCapturer(cuda), program, graph, program.inputs(1), beat=beats.append)
    rows = list(measurer.solo(9))
    timed = {operator for operator, _ in rows if beats.count(operator) > 1}
    assert {graph.operators[operator].signature for operator in timed} == {item.signature for item in graph.operators}
    assert all(beats.count(operator) > 9 for operator in timed)


def test_every_operator_that_runs_eagerly_shows_progress() -> None:
    """Libraries choose kernels at an operator's first call, and again where they may not round: by timing them, that takes minutes."""
    graph = diamond(3, 2)
    cuda = FakeCuda()
    program = FakeProgram(cuda, graph)
    beats: list[int] = []
    measurer = CudaMeasurer(GraphCapturer(cuda), program, graph, program.inputs(1), beat=beats.append)
    for run in (measurer.reference, lambda inputs: measurer.capturer.warm_up(program, inputs, lambda: beats.append(-1))):
        beats.clear()
        run(program.inputs(1))
        assert len(beats) >= len(graph)
