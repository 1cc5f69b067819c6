"""What surrounds the operators on CUDA streams, on the double: the caller's stream before and after them, and notes of their memory."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autosched.core.graph import OpGraph, TensorSpec, Value, ValueRole
from autosched.core.in_place import Chain, Link
from autosched.core.schedule import make_schedule
from autosched.runtime.cuda.audit import audit_graph
from autosched.runtime.cuda.captured import Span
from autosched.runtime.cuda.graph import GraphCapturer
from autosched.runtime.cuda.lanes import CaptureNotes, CaptureOptions
from autosched.runtime.cuda.runner import GraphRunner
from autosched.runtime.plan import make_plan
from tests.conformance.fake_cuda import FakeCuda
from tests.conformance.fake_graphs import GraphBuilder, diamond, random_schedule
from tests.conformance.fake_program import FakeProgram


@pytest.mark.parametrize("priorities", [False, True])
def test_eager_streams_begin_after_the_callers_and_the_caller_goes_on_after_them(priorities: bool) -> None:
    graph = diamond(3, 3)
    schedule = random_schedule(random.Random(3), graph, 2, priorities=priorities)
    cuda = FakeCuda()
    program = FakeProgram(cuda, graph)
    capturer = GraphCapturer(cuda)
    cuda.sleep(5000.0)  # as if the inputs were still being made
    capturer.run_eager(program, make_plan(graph, schedule), program.inputs(1))
    placed = set(zip(schedule.lane, schedule.priority, strict=True))
    ends = [capturer.streams.lane(lane, priority).clock_us for lane, priority in placed]
    assert len(ends) > 1
    assert min(ends) > 5000.0
    assert cuda.current_stream().clock_us >= max(ends)


def test_memory_is_noted_that_an_operator_took_itself() -> None:
    spec = TensorSpec((128,), "float32", (1,))
    kinds = [ValueRole.INPUT, *[ValueRole.INTERMEDIATE] * 5, ValueRole.INTERNAL, ValueRole.CONSTANT, ValueRole.INTERMEDIATE]
    storages = {1: 0, 2: 6, 8: 7}  # views: of an input, of what stays within the operator, of a constant
    values = tuple(Value(index, spec, kind, storages.get(index, index)) for index, kind in enumerate(kinds))
    operator = replace(diamond().operators[0], reads=(0,), writes=(1, 2, 3, 4, 5, 8), mutates=())
    graph = OpGraph((operator,), values, (0,), (3,))
    chain = Chain(0, (Link(0, 0, 0, 4),), repeatable=True)  # value 4 is made in the memory of an input
    notes = CaptureNotes(SimpleNamespace(span=lambda place: Span(place, 512)), None, graph, (chain,))  # type: ignore[arg-type]
    slots: list[int | None] = [4096 * (index + 1) for index in range(len(values))]
    slots[5] = None  # nobody kept it
    notes.memory(0, slots)
    assert notes.spans == {6: Span(4096 * 3, 512), 3: Span(4096 * 4, 512)}


def test_the_audit_is_told_what_a_capture_overwrites() -> None:
    builder = GraphBuilder()
    read, made = builder.add([builder.inputs[0]]), builder.add([builder.inputs[0]])
    graph = builder.build()
    cuda = FakeCuda()
    program = FakeProgram(cuda, graph)
    link = Link(1, 0, builder.inputs[0], made)
    program.in_place = (Chain(0, (link,), repeatable=True),)  # type: ignore[assignment]
    capturer = GraphCapturer(cuda, reader=cuda)
    for lanes, sound in (([0, 0], True), ([0, 1], False)):
        plan = make_plan(graph, make_schedule(graph, [0, 1], lanes))
        runner = capturer.capture(program, plan, program.inputs(0), graph=graph, options=CaptureOptions(observe=True))
        assert isinstance(runner, GraphRunner)
        assert runner.captured is not None
        assert runner.captured.overwritten == (link,)
        assert [item.storage for item in runner.captured.spans] == [read]
        assert audit_graph(graph, plan, runner.captured).sound is sound
