"""Captured plans among captures of other people's, and what becomes of one that is dropped: the double frees memory when its owner goes."""

from __future__ import annotations

import random
import sys
import threading
from typing import Any

import pytest

from autosched.core.errors import InTheMidst
from autosched.runtime.cuda.graph import GraphCapturer
from autosched.runtime.cuda.runner import GraphRunner, ReplayGate
from autosched.runtime.plan import make_plan
from tests.conformance.fake_cuda import FakeCuda
from tests.conformance.fake_cuda_values import Block, FakeCapture, FakeEvent, FakeTensor, OutOfMemory
from tests.conformance.fake_graphs import diamond, random_schedule
from tests.conformance.fake_program import FakeProgram
from tests.conformance.interruptions import ends_whatever_interrupts


class Watched(FakeCuda):
    """Notes memory that is given back while a graph runs, and waits of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.freed_early = 0
        self.waits = 0
        self.exposed = 0  # calls that end the captures of other threads

    def free(self, block: Block) -> None:
        self.freed_early += bool(self._running)
        super().free(block)

    def await_event(self, event: FakeEvent) -> None:
        self.waits += 1
        self.exposed += not self.beside
        super().await_event(event)

    def reset(self, graph: FakeCapture) -> None:
        self.exposed += not self.beside
        super().reset(graph)


class Rig:
    """A double, and a capturer whose runners share nothing but the gate."""

    def __init__(self) -> None:
        self.cuda = Watched()
        self.graph = diamond()
        self.capturer = GraphCapturer(self.cuda)
        self.program = FakeProgram(self.cuda, self.graph)
        self.inputs = self.program.inputs(1)

    def runner(self) -> GraphRunner:
        static = [self.cuda.static_like(tensor) for tensor in self.inputs]
        plan = make_plan(self.graph, random_schedule(random.Random(3), self.graph, 2))
        # A program of its own: folded weights go with the graph that reads them.
        made = self.capturer.capture(FakeProgram(self.cuda, self.graph), plan, static, graph=self.graph)
        assert isinstance(made, GraphRunner)
        return made

    def called(self, *runners: GraphRunner) -> None:
        """Each on a stream of its own, none of them that which the inputs were made on."""
        for runner in runners:
            with self.cuda.on(self.cuda.new_stream(0)):
                runner.run_static(self.inputs)

    def captures(self) -> Any:
        """Begin somebody else's capture on the current stream."""
        return self.cuda.begin_capture(self.cuda.new_pool())


def test_a_call_joins_no_capture_of_the_thread_that_called_before() -> None:
    rig = Rig()
    runner = rig.runner()
    first, second = rig.cuda.new_stream(0), rig.cuda.new_stream(0)
    with rig.cuda.on(first):
        runner(rig.inputs)
        theirs = rig.captures()
        rig.cuda.touch()
        with rig.cuda.on(second):
            made = runner(rig.inputs)
        assert not rig.cuda.capturing(second)
        rig.cuda.end_capture(theirs)
    assert second.clock_us >= 2 * first.clock_us > 0
    assert [rig.cuda.number(tensor) for tensor in made] == rig.program.answer(rig.inputs)


def test_a_graph_runs_on_where_there_is_no_memory_for_its_clones(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    runner = rig.runner()
    first, second = rig.cuda.new_stream(0), rig.cuda.new_stream(0)

    def refuse(tensors: list[FakeTensor]) -> list[FakeTensor]:
        raise OutOfMemory

    with monkeypatch.context() as patch, rig.cuda.on(first):
        patch.setattr(rig.cuda, "clone", refuse)
        with pytest.raises(OutOfMemory):
            runner(rig.inputs)
    with rig.cuda.on(second):
        runner(rig.inputs)
    assert second.clock_us >= 2 * first.clock_us > 0


def test_a_call_waits_for_one_that_was_interrupted_when_it_had_launched_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    runner = rig.runner()
    before, first, second = (rig.cuda.new_stream(0) for _ in range(3))
    with rig.cuda.on(before):
        runner(rig.inputs)
    launch = rig.cuda.replay

    def then_over(graph: FakeCapture) -> None:
        launch(graph)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, rig.cuda.on(first):
        patch.setattr(rig.cuda, "replay", then_over)
        with pytest.raises(KeyboardInterrupt):
            runner(rig.inputs)
    assert first.clock_us > before.clock_us > 0
    with rig.cuda.on(second):
        runner(rig.inputs)
    assert second.clock_us >= first.clock_us + before.clock_us


def test_a_runner_that_is_dropped_gives_its_memory_back_when_its_last_call_has_ended() -> None:
    rig = Rig()
    held = rig.cuda.allocated_bytes()
    runner, other = rig.runner(), rig.runner()
    both = rig.cuda.allocated_bytes() - held
    rig.called(runner, other)
    del runner
    assert rig.cuda.freed_early == 0
    assert rig.cuda.live_graphs == 1
    assert 0 < rig.cuda.allocated_bytes() - held < both
    other.close()


def test_a_runner_that_was_closed_or_never_called_waits_for_nothing_when_it_is_dropped() -> None:
    rig = Rig()
    closed, unused = rig.runner(), rig.runner()
    del unused
    closed.close()
    del closed
    assert rig.cuda.waits == 0
    assert rig.cuda.live_graphs == 0


@pytest.mark.parametrize("closed", [False, True])
def test_no_capture_of_another_thread_ends_when_a_runner_is_gone(closed: bool) -> None:
    rig = Rig()
    runner = rig.runner()
    rig.called(runner)
    before = rig.cuda.exposed, rig.cuda.live_graphs
    if closed:
        runner.close()
    del runner
    assert (rig.cuda.exposed, rig.cuda.live_graphs) == (before[0], before[1] - 1)
    assert rig.cuda.waits == 1


def test_a_runner_that_is_dropped_in_a_capture_neither_waits_nor_is_freed_there() -> None:
    rig = Rig()
    runner, other = rig.runner(), rig.runner()
    rig.called(runner)
    held = rig.cuda.allocated_bytes()
    with rig.cuda.on(rig.cuda.new_stream(0)):
        theirs = rig.captures()
        rig.cuda.touch()
        before = (rig.cuda.waits, rig.cuda.freed_early, rig.cuda.live_graphs)
        del runner
        assert (rig.cuda.waits, rig.cuda.freed_early, rig.cuda.live_graphs) == before
        rig.cuda.end_capture(theirs)
    assert rig.cuda.allocated_bytes() == held
    own = sum(rig.cuda.span(tensor).bytes for tensor in (*other.inputs, *other.outputs))
    other.close()
    del other
    assert rig.cuda.freed_early == before[1]
    # That of the one that was kept is gone, too.
    assert rig.cuda.allocated_bytes() < held - own


def test_a_runner_that_is_dropped_while_its_thread_holds_the_gate_does_not_hang() -> None:
    """A collection may come at any allocation, in the middle of a call of another graph."""
    rig = Rig()
    runners = [rig.runner()]
    rig.called(*runners)

    def in_a_call() -> None:
        with rig.capturer._gate.lock:
            runners.clear()

    thread = threading.Thread(target=in_a_call, daemon=True)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive()
    assert rig.cuda.live_graphs == 0


def test_a_call_that_interrupts_another_one_waits_for_nothing_and_leaves_it_right() -> None:
    """As a signal's handler may call a second model, or drop one."""
    rig = Rig()
    runner, other = rig.runner(), rig.runner()
    dropped = [rig.runner() for _ in range(100)]
    made: list[Any] = []
    refused: list[InTheMidst] = []

    def interrupt() -> None:
        if dropped:
            dropped.pop().close()
        with rig.cuda.on(rig.cuda.new_stream(0)):
            try:
                other(rig.inputs)
            except InTheMidst as error:
                refused.append(error)

    codes = {GraphRunner.__call__.__code__, ReplayGate.pass_on.__code__, ReplayGate.passed.__code__}
    assert ends_whatever_interrupts(lambda: made.append(runner(rig.inputs)), codes, interrupt)
    assert [rig.cuda.number(tensor) for tensor in made[0]] == rig.program.answer(rig.inputs)
    assert "in the midst of a call" in str(refused[0])
    assert [rig.cuda.number(tensor) for tensor in other(rig.inputs)] == rig.program.answer(rig.inputs)


def test_a_runner_that_is_left_when_the_interpreter_ends_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    runner = rig.runner()
    rig.called(runner)
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    del runner
    assert rig.cuda.waits == 0


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_runner_is_dropped_quietly_on_a_device_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    runner = rig.runner()
    rig.called(runner)
    rig.cuda.lost = "CUDA error: an illegal memory access was encountered"

    def refuse(graph: object) -> None:
        raise RuntimeError(rig.cuda.lost)

    monkeypatch.setattr(rig.cuda, "reset", refuse)
    del runner
    unmade = GraphRunner.__new__(GraphRunner)
    del unmade
    assert rig.cuda.waits == 1
