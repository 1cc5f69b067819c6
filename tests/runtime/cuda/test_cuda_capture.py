"""The executor on the double: what it does with streams, events and memory. Names of traps as the device's notes count them."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import threading
import types
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from autosched.core.errors import DeviceError, ShortOfMemory, UsageError
from autosched.core.graph import OpGraph
from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule, make_schedule, sequential
from autosched.export.bundle import encode_bundle
from autosched.runtime.cuda import load as cuda_load
from autosched.runtime.cuda.captured import NodeKind
from autosched.runtime.cuda.graph import GraphCapturer
from autosched.runtime.cuda.lanes import CaptureOptions
from autosched.runtime.cuda.load import prepare_runner
from autosched.runtime.cuda.runner import GraphRunner
from autosched.runtime.cuda.streams import STREAMS_PER_PRIORITY, StreamSet
from autosched.runtime.float32 import full_float32
from autosched.runtime.load import load
from autosched.runtime.plan import FreeRule, make_plan
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.fake_cuda import FakeCuda
from tests.conformance.fake_cuda_values import FakeStream, FakeTensor, OutOfMemory
from tests.conformance.fake_graphs import GraphBuilder, diamond, random_graph, random_schedule
from tests.conformance.fake_program import FakeProgram
from tests.conformance.graphs import TwoBranches, two_branches_inputs


class Rig:
    """A double, a program on it, and a capturer."""

    def __init__(self, graph: OpGraph, *, cuda: FakeCuda | None = None, **options: object) -> None:
        self.cuda = cuda or FakeCuda()
        self.graph = graph
        self.program = FakeProgram(self.cuda, graph, **options)  # type: ignore[arg-type]
        self.capturer = GraphCapturer(self.cuda, reader=self.cuda)
        self.inputs = self.program.inputs(1)

    def capture(self, schedule: Schedule, rule: FreeRule = FreeRule.VECTOR_CLOCK, **options: object) -> GraphRunner | Failure:
        static = [self.cuda.static_like(tensor) for tensor in self.inputs]
        plan = make_plan(self.graph, schedule, rule)
        return self.capturer.capture(self.program, plan, static, graph=self.graph, options=CaptureOptions(**options))  # type: ignore[arg-type]

    def numbers(self, tensors: list[FakeTensor]) -> list[int]:
        return [self.cuda.number(tensor) for tensor in tensors]


def two_lanes(graph: OpGraph) -> Schedule:
    return random_schedule(random.Random(3), graph, 2)


def captured(rig: Rig, schedule: Schedule, **options: object) -> GraphRunner:
    runner = rig.capture(schedule, **options)  # type: ignore[arg-type]
    assert isinstance(runner, GraphRunner), runner
    return runner


@pytest.mark.parametrize("rule", [FreeRule.VECTOR_CLOCK, FreeRule.HOLD_ALL])
@pytest.mark.parametrize("seed", range(25))
def test_replay_and_eager_streams_give_the_numbers_of_one_stream(seed: int, rule: FreeRule) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, 30)
    rig = Rig(graph)
    schedule = random_schedule(rng, graph, 4, priorities=True, extra=3)
    runner = captured(rig, schedule, rule=rule)
    for turn in range(3):
        inputs = rig.program.inputs(turn)
        wanted = rig.program.answer(inputs)
        assert rig.numbers(runner(inputs)) == wanted
        eager = rig.capturer.run_eager(rig.program, make_plan(graph, schedule, rule), inputs)
        assert rig.numbers(eager) == wanted


def test_the_vector_clock_reuses_memory_that_hold_all_keeps() -> None:
    builder = GraphBuilder()
    value = builder.inputs[0]
    for _ in range(20):
        value = builder.add([value])
    rig = Rig(builder.build())
    schedule = sequential(rig.graph)
    tight, loose = captured(rig, schedule), captured(rig, schedule, rule=FreeRule.HOLD_ALL)
    assert tight.peak_bytes < loose.peak_bytes / 4


@pytest.mark.parametrize("product", [1, -1])  # among wide values, and when they are gone: with nothing else held, nothing of them shows
def test_a_workspace_that_the_first_capture_makes_counts_for_no_schedule(product: int) -> None:
    builder = GraphBuilder()
    value = builder.inputs[0]
    for elements in (1 << 20, 1 << 20, 1 << 20, 128, 128, 128):
        value = builder.add([value], elements=elements)
    rig = Rig(builder.build())
    workspaces: list[FakeTensor] = []
    kernels = list(rig.program.kernels)
    first = kernels[product]

    def with_workspace(slots: list[FakeTensor]) -> None:
        if not workspaces:
            workspaces.append(rig.cuda.tensor(1, 32 << 20))
        first(slots)

    kernels[product] = with_workspace
    rig.program.kernels = kernels  # type: ignore[assignment]
    schedule = sequential(rig.graph)
    peaks = [captured(rig, schedule).peak_bytes for _ in range(2)]
    assert len(workspaces) == 1
    assert 8 << 20 <= peaks[0] == peaks[1] < 32 << 20


def test_the_origin_launches_nothing_and_no_stream_is_shared() -> None:
    """Trap 4: some versions clear the workspaces of a graph's origin stream when the graph goes."""
    graph = diamond(3, 2)
    rig = Rig(graph)
    rig.capturer.scratch_pool()
    assert rig.capturer.warm_up(rig.program, rig.inputs) is None
    warm = set(rig.cuda.eager_launches)
    runner = captured(rig, make_schedule(graph, range(len(graph)), [0, 0, 0, 1, 1, 2, 2, 0]))
    streams = {node.stream for node in runner._graph.nodes}  # type: ignore[union-attr]
    origin = rig.capturer.streams.named("origin")
    assert origin not in streams
    assert origin not in warm
    assert not streams & warm  # trap 4 again: workspaces must be made inside the capture, so warm-up has streams of its own
    assert rig.capturer.streams.named("keeper") not in streams


def test_all_streams_join_before_the_first_allocation() -> None:
    """Trap 1: an allocation on a stream that has not joined comes from the default pool."""
    graph = diamond(4, 2)
    rig = Rig(graph)
    runner = captured(rig, random_schedule(random.Random(0), graph, 4), observe=True)
    assert runner.captured is not None
    assert runner.captured.stray_launches == 0
    assert all(any(span.start <= item.span.start < span.end for span in runner.captured.pool) for item in runner.captured.spans)


def test_streams_are_distinct_though_the_pool_repeats() -> None:
    """Trap 6."""
    cuda = FakeCuda()
    for _ in range(30):
        cuda.new_stream(0)  # somebody else's
    streams = StreamSet(cuda)
    taken = [streams.named("origin"), *(streams.lane(lane) for lane in range(20))]
    assert len({cuda.handle(stream) for stream in taken}) == 21
    assert streams.lane(3) is taken[4]
    for lane in range(20, 31):
        streams.lane(lane)
    with pytest.raises(UsageError, match="no distinct stream is left for lane 31"):
        streams.lane(31)


def test_record_stream_is_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 3."""

    def refuse(self: FakeTensor, stream: object) -> None:
        raise AssertionError("record_stream keeps memory until the capture ends")

    monkeypatch.setattr(FakeTensor, "record_stream", refuse)
    graph = diamond()
    rig = Rig(graph)
    captured(rig, two_lanes(graph))
    rig.capturer.run_eager(rig.program, make_plan(graph, two_lanes(graph)), rig.inputs)


def test_no_garbage_collection_in_a_capture() -> None:
    """Trap 7: a module finalised in a capture is unloaded, which ends it."""
    graph = diamond()
    rig = Rig(graph)
    seen: list[bool] = []
    first = rig.program.kernels[0]

    def watching(slots: list[FakeTensor | None]) -> None:
        seen.append(gc.isenabled())
        first(slots)

    rig.program.kernels = (watching, *rig.program.kernels[1:])
    captured(rig, two_lanes(graph))
    assert seen == [False]
    assert gc.isenabled()


def test_candidates_share_a_pool_that_does_not_grow() -> None:
    """Trap 8: a new pool for each candidate grows memory without end."""
    graph = diamond(3, 4)
    rig = Rig(graph)
    pool = rig.capturer.scratch_pool()
    sizes = []
    for seed in range(12):
        plan = make_plan(graph, random_schedule(random.Random(seed % 3), graph, 3))
        runner = rig.capturer.capture(rig.program, plan, rig.inputs, graph=graph, pool=pool)
        assert isinstance(runner, GraphRunner)
        runner.close()
        sizes.append(sum(span.bytes for span in rig.cuda.pool_spans(pool, unused=False)))
    assert sizes[-1] == sizes[3]
    assert rig.cuda.live_graphs == 1  # the keeper
    rig.capturer.close()
    assert rig.cuda.live_graphs == 0


def test_a_runner_keeps_what_its_graph_reads() -> None:
    """Trap 9: a graph holds bare addresses."""
    graph = diamond()
    rig = Rig(graph)
    runner = captured(rig, two_lanes(graph))
    program = weakref.ref(rig.program)
    rig.program = None  # type: ignore[assignment]
    gc.collect()
    assert program() is not None
    runner.close()
    del runner
    gc.collect()
    assert program() is None


def test_intermediates_are_given_back_after_the_capture_and_outputs_after_close() -> None:
    graph = diamond()
    rig = Rig(graph)
    before = rig.cuda.allocated_bytes()
    runner = captured(rig, two_lanes(graph))
    held = rig.cuda.allocated_bytes() - before
    outputs = sum(rig.cuda.span(tensor).bytes for tensor in (*runner.outputs, *runner.inputs))
    assert held == outputs
    runner.close()
    runner.close()
    assert rig.cuda.live_graphs == 0
    with pytest.raises(DeviceError, match="closed"):
        runner.replay()


def test_calls_return_clones_and_run_static_returns_buffers() -> None:
    graph = diamond()
    rig = Rig(graph)
    runner = captured(rig, two_lanes(graph))
    first_inputs, second_inputs = rig.program.inputs(5), rig.program.inputs(6)
    kept = runner(first_inputs)
    wanted = rig.program.answer(first_inputs)
    static = runner.run_static(second_inputs)
    assert rig.numbers(kept) == wanted
    assert static == runner.outputs
    assert rig.numbers(static) == rig.program.answer(second_inputs) != wanted


def test_a_call_on_another_stream_waits_for_the_call_before() -> None:
    graph = diamond()
    rig = Rig(graph)
    runner = captured(rig, two_lanes(graph))
    first, second = rig.cuda.new_stream(0), rig.cuda.new_stream(0)
    with rig.cuda.on(first):
        runner(rig.inputs)
    with rig.cuda.on(second):
        runner(rig.inputs)
    assert second.clock_us >= 2 * first.clock_us > 0


@pytest.mark.parametrize("reused", [False, True])
def test_a_call_after_one_on_a_stream_that_is_gone_waits_for_it_all_the_same(reused: bool) -> None:
    """CUDA hands the handle of a destroyed stream out again; what was launched on it still runs."""
    graph = diamond()
    rig = Rig(graph)
    runner = captured(rig, two_lanes(graph))
    borrowed, other = rig.cuda.new_stream(0), rig.cuda.new_stream(0)
    borrowed.foreign = True
    with rig.cuda.on(borrowed):
        runner(rig.inputs)
    borrowed.gone = True
    if reused:
        other.handle, other.foreign = borrowed.handle, True
    with rig.cuda.on(other):
        runner(rig.inputs)
    assert other.clock_us >= 2 * borrowed.clock_us > 0


def test_a_graph_is_freed_when_its_call_on_a_stream_that_is_gone_has_ended() -> None:
    graph = diamond()
    rig = Rig(graph)
    runner = captured(rig, two_lanes(graph))
    borrowed = rig.cuda.new_stream(0)
    borrowed.foreign = True
    with rig.cuda.on(borrowed):
        runner.run_static(rig.inputs)
    borrowed.gone = True
    runner.close()
    assert rig.cuda.live_graphs == 0


def test_calls_wait_only_where_the_stream_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = diamond()
    rig = Rig(graph)
    runner = captured(rig, two_lanes(graph))
    first, second = rig.cuda.new_stream(0), rig.cuda.new_stream(0)
    waiting: list[int] = []
    wait = rig.cuda.wait
    monkeypatch.setattr(rig.cuda, "wait", lambda stream, event: (waiting.append(stream.handle), wait(stream, event)))
    for stream in (first, first, second, second, first):
        with rig.cuda.on(stream):
            runner(rig.inputs)
    assert waiting == [second.handle, first.handle]


def test_priorities_become_stream_priorities_and_the_lane_stays_in_order() -> None:
    graph = diamond(2, 3)
    count = len(graph)
    rig = Rig(graph)
    schedule = make_schedule(graph, range(count), [0] * count, priority=[index % 4 for index in range(count)])
    runner = captured(rig, schedule, observe=True)
    nodes = runner._graph.nodes  # type: ignore[union-attr]
    assert [node.stream.priority for node in nodes] == [index % 4 for index in range(count)]
    assert runner.captured is not None
    assert set(runner.captured.edges) == {(index, index + 1) for index in range(count - 1)}


def test_an_extra_edge_is_an_edge_of_the_graph_and_the_launch_order_is_the_order_of_creation() -> None:
    graph = diamond(2, 2)
    rig = Rig(graph)
    order = [0, 3, 1, 4, 2, 5]
    schedule = make_schedule(graph, order, [0, 0, 0, 1, 1, 0], extra_edges=[(3, 1)])
    runner = captured(rig, schedule, observe=True)
    assert runner.captured is not None
    assert [node.operator for node in runner.captured.nodes] == order
    assert (order.index(3), order.index(1)) in runner.captured.edges
    without = captured(Rig(graph), make_schedule(graph, order, [0, 0, 0, 1, 1, 0]), observe=True)
    assert without.captured is not None
    assert (order.index(3), order.index(1)) not in without.captured.edges


def test_stamps_tell_when_each_operator_ran() -> None:
    graph = diamond(2, 2)
    rig = Rig(graph)
    runner = captured(rig, two_lanes(graph), stamps=True)
    start = rig.cuda.new_event(timing=True)
    rig.cuda.record(start, rig.cuda.current_stream())
    runner.replay()
    times = runner.operator_times(start)
    assert set(times) == set(range(len(graph)))
    for before, after in ((edge.before, edge.after) for edge in graph.edges):
        assert times[before][1] <= times[after][0]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("shapes differ"), FailureKind.CAPTURE),
        (OutOfMemory(), FailureKind.OOM),
        (MemoryError(), FailureKind.OOM),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), FailureKind.OOM),
    ],
)
def test_an_operator_that_fails_in_a_capture_is_one_failure_and_everything_is_given_back(error: Exception, kind: FailureKind) -> None:
    graph = diamond()
    rig = Rig(graph, fail_at={5: error})
    before = rig.cuda.allocated_bytes()
    failure = rig.capture(two_lanes(graph))
    assert isinstance(failure, Failure)
    assert failure.kind is kind
    assert "op5" in failure.detail
    gc.collect()
    assert rig.cuda.allocated_bytes() == before
    assert rig.cuda.live_graphs == 0
    assert not rig.capturer.tainted
    assert rig.cuda.abandoned == 0  # it was ended in order, which leaves the allocator clean
    assert rig.cuda.released == (kind is FailureKind.OOM)
    rig.program = FakeProgram(rig.cuda, graph)
    assert isinstance(rig.capture(two_lanes(graph)), GraphRunner)


def test_a_capture_that_an_operator_invalidates_is_abandoned() -> None:
    graph = diamond()
    rig = Rig(graph)
    kernel = rig.program.kernels[4]

    def synchronising(slots: list[FakeTensor | None]) -> None:
        kernel(slots)
        rig.cuda.synchronize()

    rig.program.kernels = (*rig.program.kernels[:4], synchronising, *rig.program.kernels[5:])
    failure = rig.capture(two_lanes(graph))
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.CAPTURE
    assert "op4" in failure.detail
    assert rig.cuda.live_graphs == 0
    rig.program = FakeProgram(rig.cuda, graph)
    assert isinstance(rig.capture(two_lanes(graph)), GraphRunner)


def test_an_abandoned_capture_that_cannot_be_undone_taints_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = diamond()
    rig = Rig(graph)
    monkeypatch.setattr(rig.cuda, "abandon_capture", lambda graph, pool: False)
    rig.program.kernels = (lambda slots: rig.cuda.synchronize(), *rig.program.kernels[1:])
    assert isinstance(rig.capture(sequential(graph)), Failure)
    assert rig.capturer.tainted


def test_a_graph_of_views_only_is_refused() -> None:
    builder = GraphBuilder()
    builder.add([builder.inputs[0]], view_of=builder.inputs[0])
    graph = builder.build()
    failure = Rig(graph).capture(sequential(graph))
    assert isinstance(failure, Failure)
    assert "empty" in failure.detail


def test_another_allocator_is_refused() -> None:
    cuda = FakeCuda()
    cuda.native = False
    with pytest.raises(DeviceError, match="native"):
        GraphCapturer(cuda)


def test_observing_without_a_reader_is_a_failure_that_says_what_is_missing() -> None:
    graph = diamond()
    rig = Rig(graph)
    rig.capturer = GraphCapturer(rig.cuda)
    failure = rig.capture(sequential(graph), observe=True)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.UNAVAILABLE
    assert "cuda-bindings" in failure.detail


def test_a_delay_is_a_node_before_its_operator() -> None:
    graph = diamond(2, 1)
    runner = captured(Rig(graph), sequential(graph), observe=True, delays={1: 500.0})
    assert runner.captured is not None
    foreign = [index for index, node in enumerate(runner.captured.nodes) if node.operator < 0]
    assert len(foreign) == 1
    assert runner.captured.nodes[foreign[0]].kind is NodeKind.KERNEL
    assert (foreign[0], foreign[0] + 1) in runner.captured.edges


def test_warm_up_reports_what_does_not_run() -> None:
    graph = diamond()
    rig = Rig(graph, fail_at={2: RuntimeError("no kernel image")})
    failure = rig.capturer.warm_up(rig.program, rig.inputs)
    assert failure is not None
    assert "no kernel image" in failure.detail


def test_a_loaded_plan_is_captured_audited_and_called() -> None:
    graph = random_graph(random.Random(8), 25)
    rig = Rig(graph)
    plan = make_plan(graph, random_schedule(random.Random(8), graph, 3))
    runner = prepare_runner(rig.capturer, rig.program, graph, plan, rig.inputs)
    for seed in range(3):
        inputs = rig.program.inputs(seed)
        assert rig.numbers(runner(inputs)) == rig.program.answer(inputs)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory"), MemoryError()])
def test_a_loaded_plan_that_lacks_memory_says_so(error: Exception) -> None:
    graph = diamond()
    rig = Rig(graph, fail_at={2: error})
    with pytest.raises(ShortOfMemory, match="max_shapes"):
        prepare_runner(rig.capturer, rig.program, graph, make_plan(graph, two_lanes(graph)), rig.inputs)
    rig = Rig(graph, fail_at={2: RuntimeError("no kernel image")})
    with pytest.raises(DeviceError, match="no kernel image") as caught:
        prepare_runner(rig.capturer, rig.program, graph, make_plan(graph, two_lanes(graph)), rig.inputs)
    assert not isinstance(caught.value, ShortOfMemory)


def rig_with_a_product(target: str = "aten::mm.default") -> Rig:
    graph = diamond(2, 2)
    product = replace(graph.operators[1], calls=tuple(replace(call, target=target) for call in graph.operators[1].calls))
    return Rig(replace(graph, operators=(graph.operators[0], product, *graph.operators[2:])))


def test_nothing_is_held_for_workspaces_where_each_product_has_its_own() -> None:
    rig = rig_with_a_product()
    rig.cuda.workspaces_stay = False
    runner = prepare_runner(rig.capturer, rig.program, rig.graph, make_plan(rig.graph, two_lanes(rig.graph)), rig.inputs)
    assert rig.cuda.live_graphs == 1
    assert rig.numbers(runner(rig.inputs)) == rig.program.answer(rig.inputs)
    runner.close()
    assert rig.cuda.live_graphs == 0


def test_workspaces_that_served_graphs_read_are_in_the_pool_of_none_of_them() -> None:
    """Trap 4: who clears all workspaces gives their memory back with the graph in whose pool they are."""
    rig = rig_with_a_product()
    plan = make_plan(rig.graph, two_lanes(rig.graph))
    first = prepare_runner(rig.capturer, rig.program, rig.graph, plan, rig.inputs)
    held = rig.capturer._workspaces.pool
    assert held is not None
    second = prepare_runner(rig.capturer, rig.program, rig.graph, plan, rig.inputs)
    first.close()
    lanes = {node.stream for node in second._graph.nodes}  # type: ignore[union-attr]
    assert lanes <= set(rig.cuda.workspaces)
    assert {rig.cuda.workspaces[stream].storage.block.pool for stream in lanes} == {held}
    assert held not in (first.pool, second.pool)
    # A pool lives as long as a graph in it does: the last one made, and it alone.
    assert rig.capturer._workspaces.pool == held
    assert not rig.capturer._workspaces._held[1].destroyed  # type: ignore[index,union-attr]
    second.close()
    rig.capturer.close()
    assert rig.cuda.live_graphs == 0


def test_a_lane_with_workspaces_of_somebody_else_gets_another_stream() -> None:
    """Trap 4: PyTorch hands its streams out to everybody, and nobody tells when what was made there before goes."""
    rig = rig_with_a_product()
    theirs = rig.capturer.streams.lane(0)
    with rig.cuda.on(theirs):
        assert rig.cuda.multiply()
    runner = prepare_runner(rig.capturer, rig.program, rig.graph, make_plan(rig.graph, two_lanes(rig.graph)), rig.inputs)
    lanes = {node.stream for node in runner._graph.nodes}  # type: ignore[union-attr]
    assert theirs not in lanes
    assert {rig.cuda.workspaces[stream].storage.block.pool for stream in lanes} == {rig.capturer._workspaces.pool}
    assert rig.numbers(runner(rig.inputs)) == rig.program.answer(rig.inputs)


class WithoutWorkspaces(FakeCuda):
    """Products take none: no stream looks as if it had none before."""

    def multiply(self) -> bool:
        self.touch()
        return False


class WithWorkspacesOutsideOfCaptures(FakeCuda):
    """Products keep some on their stream, but for those that are captured; and nobody ever runs out of streams."""

    def new_stream(self, priority: int) -> FakeStream:
        for table in (self._rings, self._turn):
            table.pop(priority, None)
        made = super().new_stream(priority)
        assert made.handle < 1000, "as many streams as there are"
        return made

    def multiply(self) -> bool:
        if not self.capturing(self.current_stream()):
            return super().multiply()
        self.touch()
        return False


@pytest.mark.parametrize("kind", [WithoutWorkspaces, WithWorkspacesOutsideOfCaptures])
def test_where_captured_products_leave_no_workspaces_no_lane_is_changed(kind: type[FakeCuda]) -> None:
    """Else every lane would take one stream after the other until there are none, for ever where each is a new one."""
    cuda = kind()
    graph = diamond(2, 2)
    capturer, plan = GraphCapturer(cuda), make_plan(graph, two_lanes(graph))
    before = [capturer.streams.lane(lane) for lane in range(plan.lanes)]
    assert capturer.hold_workspaces(plan) is None
    assert [capturer.streams.lane(lane) for lane in range(plan.lanes)] == before


def test_where_no_stream_is_left_a_lane_keeps_its_own() -> None:
    rig = rig_with_a_product()
    theirs = rig.capturer.streams.lane(0)
    with rig.cuda.on(theirs):
        rig.cuda.multiply()
    for lane in range(1, STREAMS_PER_PRIORITY - len(rig.capturer.streams._named)):
        rig.capturer.streams.lane(lane)
    assert not rig.capturer.streams.replace(theirs)
    assert rig.capturer.streams.lane(0) is theirs


def test_a_program_without_products_gets_no_workspaces() -> None:
    graph = diamond(2, 2)
    rig = Rig(graph)
    prepare_runner(rig.capturer, rig.program, graph, make_plan(graph, two_lanes(graph)), rig.inputs)
    assert rig.cuda.workspaces == {}


@pytest.mark.parametrize(
    "target",
    [
        "aten::mv.default", "aten::dot.default", "inductor::mm.0", "aten::lstm.input", "mylib::norm.default",
        "aten::linalg_solve_triangular.default", "aten::triangular_solve.default",
    ],
)  # fmt: skip
def test_whatever_may_be_a_product_has_its_workspaces_where_they_are_held(target: str) -> None:
    """Trap 4: also what multiplies a vector, and what nobody but its author knows."""
    rig = rig_with_a_product(target)
    prepare_runner(rig.capturer, rig.program, rig.graph, make_plan(rig.graph, two_lanes(rig.graph)), rig.inputs)
    assert {item.storage.block.pool for item in rig.cuda.workspaces.values()} >= {rig.capturer._workspaces.pool}
    assert rig.capturer._workspaces.pool is not None


def test_convolutions_are_products_where_cudnn_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for enabled in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, "enabled", enabled)
        rig = rig_with_a_product("aten::convolution.default")
        prepare_runner(rig.capturer, rig.program, rig.graph, make_plan(rig.graph, two_lanes(rig.graph)), rig.inputs)
        assert (rig.capturer._workspaces.pool is None) == enabled


def test_memory_of_a_graph_that_is_gone_is_given_back_before_the_next_one_takes_its_own() -> None:
    """Its pool is cached for nobody: a model whose weights change now and then would come to hold the whole device."""
    graph = diamond()
    rig = Rig(graph)
    plan = make_plan(graph, two_lanes(graph))
    for turn in range(3):
        runner = prepare_runner(rig.capturer, rig.program, graph, plan, rig.inputs)
        assert rig.cuda.released == turn
        runner.close()


def test_serving_without_an_audit_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    graph = diamond(2, 2)
    rig = Rig(graph)
    blind = GraphCapturer(rig.cuda, reader=None)
    cuda_load._said.clear()
    plan = make_plan(graph, two_lanes(graph))
    with caplog.at_level(logging.WARNING, logger=cuda_load.__name__):
        for seed in range(2):
            runner = prepare_runner(blind, rig.program, graph, plan, rig.inputs)
            inputs = rig.program.inputs(seed)
            assert rig.numbers(runner(inputs)) == rig.program.answer(inputs)
    assert [record.levelname for record in caplog.records if "not audited" in record.message] == ["WARNING"]


def test_a_graph_is_freed_when_its_last_call_has_ended() -> None:
    graph = diamond(2, 2)
    rig = Rig(graph)
    runner = prepare_runner(rig.capturer, rig.program, graph, make_plan(graph, two_lanes(graph)), rig.inputs)
    with rig.cuda.on(rig.cuda.new_stream(0)):
        runner(rig.program.inputs(1))
    runner.close()  # the double refuses to free what may still run
    assert rig.cuda.live_graphs == 0


class Disturbed(FakeCuda):
    """Another thread waits for the device in the middle of the next captures."""

    times, words = 0, "CUDA error: operation failed due to a previous error during capture"

    def end_capture(self, graph: object) -> None:
        with contextlib.suppress(RuntimeError):
            super().end_capture(graph)  # type: ignore[arg-type]
        if self.times:
            self.times -= 1
            raise RuntimeError(self.words)


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (1, Disturbed.words),
        (2, Disturbed.words),
        (3, Disturbed.words),
        (1, "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle)`"),
        (1, "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasLtMatmul( handle)`"),
        (1, "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ],
)
def test_a_capture_that_others_broke_is_tried_again(times: int, words: str) -> None:
    graph = diamond(2, 2)
    cuda = Disturbed()
    cuda.words = words
    rig = Rig(graph, cuda=cuda)
    assert rig.capturer.warm_up(rig.program, rig.inputs) is None  # which captures a graph of its own
    cuda.times = times
    plan = make_plan(graph, two_lanes(graph))
    if times == 3:
        with pytest.raises(DeviceError, match="cannot be captured here"):
            prepare_runner(rig.capturer, rig.program, graph, plan, rig.inputs)
        return
    runner = prepare_runner(rig.capturer, rig.program, graph, plan, rig.inputs)
    inputs = rig.program.inputs(2)
    assert rig.numbers(runner(inputs)) == rig.program.answer(inputs)
    assert rig.cuda.abandoned == times


def test_workspaces_are_made_elsewhere_where_others_broke_the_capture_that_adds_to_them() -> None:
    """Its pool is not to be captured into again, and what lies there is read by graphs that serve."""
    graph, cuda = rig_with_a_product().graph, Disturbed()
    cuda.recovers = False
    rig = Rig(graph, cuda=cuda)
    plan = make_plan(graph, two_lanes(graph))
    kept = prepare_runner(rig.capturer, rig.program, graph, plan, rig.inputs)
    before = rig.capturer._workspaces.pool
    cuda.times = 1
    runners = [kept, *(prepare_runner(rig.capturer, rig.program, graph, plan, rig.inputs) for _ in range(2))]
    assert rig.capturer._workspaces.pool not in (None, before)
    for seed, runner in enumerate(runners):
        inputs = rig.program.inputs(seed)
        assert rig.numbers(runner(inputs)) == rig.program.answer(inputs)
        runner.close()
    rig.capturer.close()
    assert cuda.live_graphs == 0


def test_two_threads_never_capture_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the device's streams, and what one waits for ends the other's capture."""
    together = threading.Barrier(2)
    met: list[bool] = []

    def prepare(*_: object) -> None:
        try:
            together.wait(0.3)
            met.append(True)
        except threading.BrokenBarrierError:
            together.reset()
            met.append(False)

    monkeypatch.setattr(cuda_load, "prepare_runner", prepare)
    monkeypatch.setattr(cuda_load, "_capturer", lambda device: None)
    bound: Any = types.SimpleNamespace(device=torch.device("cpu"), program=types.SimpleNamespace(graph=None), in_place=())
    plan: Any = None
    threads = [threading.Thread(target=cuda_load.cuda_runner, args=(bound, plan, ())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == [False, False]


def test_nobody_changes_the_rounding_of_float32_while_a_schedule_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another schedule's comparison may, and a graph would keep that for good."""
    rounded: list[bool] = []

    def compare() -> None:
        with full_float32():
            comparing.set()
            recorded.wait(20.0)

    def prepare(*_: object) -> None:
        other.start()
        comparing.wait(0.3)
        rounded.append(torch.backends.cudnn.allow_tf32)
        recorded.set()

    comparing, recorded, other = threading.Event(), threading.Event(), threading.Thread(target=compare)
    monkeypatch.setattr(cuda_load, "prepare_runner", prepare)
    monkeypatch.setattr(cuda_load, "_capturer", lambda device: None)
    bound: Any = types.SimpleNamespace(device=torch.device("cpu"), program=types.SimpleNamespace(graph=None), in_place=())
    plan: Any = None
    cuda_load.cuda_runner(bound, plan, ())
    other.join()
    assert rounded == [True]
    assert comparing.is_set()


def test_an_operator_that_calls_another_schedule_does_not_wait_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: Any = types.SimpleNamespace(device=torch.device("cpu"), program=types.SimpleNamespace(graph=None), in_place=())
    plan: Any = None
    made: list[int] = []

    def prepare(*_: object) -> None:
        made.append(len(made))
        if len(made) == 1:
            cuda_load.cuda_runner(bound, plan, ())

    monkeypatch.setattr(cuda_load, "prepare_runner", prepare)
    monkeypatch.setattr(cuda_load, "_capturer", lambda device: None)
    monkeypatch.setattr(cuda_load, "_preparing", type(cuda_load._preparing)())  # none that a failure would leave taken
    thread = threading.Thread(target=cuda_load.cuda_runner, args=(bound, plan, ()), daemon=True)
    thread.start()
    thread.join(20.0)
    assert made == [0, 1]


def test_a_schedule_that_an_operator_calls_stands_aside_while_the_operators_own_is_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be making it ready, and waits for its turn with the lock that a call of it waits for."""
    bound: Any = types.SimpleNamespace(device=torch.device("cpu"), program=types.SimpleNamespace(graph=None), in_place=())
    inner = TwoBranches().eval()
    loaded = load(encode_bundle(two_branches_bundle(inner)), inner)
    args, kwargs = two_branches_inputs()
    plan: Any = None
    assert loaded._table is not None
    [slot] = loaded._table.slots
    with slot._lock:
        monkeypatch.setattr(cuda_load, "prepare_runner", lambda *_: loaded(*args, **kwargs))
        monkeypatch.setattr(cuda_load, "_capturer", lambda device: None)
        monkeypatch.setattr(cuda_load, "_preparing", type(cuda_load._preparing)())  # none that a failure would leave taken
        thread = threading.Thread(target=cuda_load.cuda_runner, args=(bound, plan, ()), daemon=True)
        thread.start()
        thread.join(20.0)
        assert not thread.is_alive()
    assert (loaded.report().calls, loaded.report().stepped_aside) == (0, ())


def test_a_plan_that_fails_its_audit_is_never_served() -> None:
    graph = diamond(2, 2)
    rig = Rig(graph)
    schedule = make_schedule(graph, range(len(graph)), [0, 0, 0, 1, 1, 0])
    plan = make_plan(graph, schedule)
    steps = tuple(replace(step, waits=()) if step.operator == 5 else step for step in plan.steps)
    with pytest.raises(DeviceError, match="fails its audit: data order"):
        prepare_runner(rig.capturer, rig.program, graph, replace(plan, steps=steps), rig.inputs)
    assert rig.cuda.live_graphs == 0
    broken = Rig(graph, fail_at={1: RuntimeError("no kernel")})
    with pytest.raises(DeviceError, match="do not run on this device"):
        prepare_runner(broken.capturer, broken.program, graph, plan, broken.inputs)


# Trap 5 (rewiring the edges of a captured graph): never done; a schedule is captured anew, because GEMMs of one stream share a workspace.
# Trap 10 (launch order permutes random numbers): capture refuses operators that draw. tests/capture has the tests.
# Trap 11 (noise misread as interference): interleaved blocks and an A/A floor. tests/device/test_timing.py has the tests.


class Crowded(FakeCuda):
    """All but a little of the device's memory is cached for other streams."""

    def crowd(self, left_bytes: int) -> None:
        other = self.new_stream(0)
        self._limit = self._next_address + (1 << 20) + left_bytes
        with self.on(other):
            self.allocate(1 << 20)


@pytest.mark.parametrize("broken_before", [False, True])
def test_memory_that_is_only_cached_is_given_back_for_a_capture(broken_before: bool) -> None:
    """PyTorch takes back what it has cached for other streams where memory is short, but not while it captures."""
    graph = diamond()
    cuda = Crowded()
    cuda.recovers = False
    rig = Rig(graph, cuda=cuda)
    if broken_before:
        kernels, rig.program.kernels = rig.program.kernels, (lambda slots: cuda.synchronize(), *rig.program.kernels[1:])
        assert isinstance(rig.capture(sequential(graph)), Failure)
        rig.program.kernels = kernels
    static = [cuda.static_like(tensor) for tensor in rig.inputs]
    wanted = rig.program.answer(rig.inputs)
    cuda.crowd(left_bytes=0)
    runner = rig.capturer.capture(rig.program, make_plan(graph, two_lanes(graph)), static, graph=graph)
    assert isinstance(runner, GraphRunner), runner
    assert rig.numbers(runner(rig.inputs)) == wanted
    assert (cuda.released, cuda.abandoned) == (1, broken_before)


def test_a_script_is_captured_again_where_memory_was_only_cached() -> None:
    cuda = Crowded()
    capturer = GraphCapturer(cuda, reader=cuda)
    stream = capturer.streams.lane(0)
    capturer.scratch_pool()
    cuda.crowd(left_bytes=0)
    made: list[FakeTensor] = []

    def body() -> None:
        made.clear()
        with cuda.on(stream):
            made.append(cuda.allocate(1 << 16))
            cuda.touch()

    result = capturer.capture_script([stream], body)
    assert not isinstance(result, Failure), result
    assert len(made) == cuda.released == 1


def test_a_graph_that_the_driver_has_no_memory_for_is_captured_again_where_some_was_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is made launchable takes memory of the driver's, which a full cache has left none of."""
    graph = diamond()
    cuda = Crowded()
    rig = Rig(graph, cuda=cuda)
    wanted = rig.program.answer(rig.inputs)
    cuda.crowd(left_bytes=1 << 20)
    ordinary = cuda.instantiate

    def instantiate(made: Any) -> None:
        if not cuda.released:
            raise RuntimeError("CUDA error: out of memory")
        ordinary(made)

    monkeypatch.setattr(cuda, "instantiate", instantiate)
    runner = rig.capture(two_lanes(graph))
    assert isinstance(runner, GraphRunner), runner
    assert rig.numbers(runner(rig.inputs)) == wanted
    assert cuda.live_graphs == 1
