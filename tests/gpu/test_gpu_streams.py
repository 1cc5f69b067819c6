"""What the double claims, checked on a real device; and the executor's rules with real memory."""

from __future__ import annotations

import gc
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from autosched.core.in_place import Chain
from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule, sequential
from autosched.device.cuda.measure import CudaMeasurer
from autosched.device.cuda.profile import OperatorProfile, profile_operator
from autosched.device.cuda.repeating import unrepeatable
from autosched.device.cuda.screen import observe_synchronising
from autosched.device.cuda.stress import DelaySet, stress_plan
from autosched.runtime.cuda.audit import audit_graph, node_counts
from autosched.runtime.cuda.bindings import GraphBindings
from autosched.runtime.cuda.captured import NodeKind
from autosched.runtime.cuda.load import prepare_runner
from autosched.runtime.cuda.runner import GraphRunner
from autosched.runtime.cuda.streams import EmptyCapture, StreamSet
from autosched.runtime.plan import FreeRule, Plan, make_plan
from autosched.verify.race_stress import judge_outcomes, plan_delays
from tests.conformance.graphs import random_placement
from tests.conformance.programs import branches_program
from tests.gpu.gpu_rig import Rig, without_gpu
from tests.gpu.gpu_rig import backend as open_backend
from tests.gpu.gpu_rig import reader as open_reader

pytestmark = pytest.mark.gpu


@pytest.fixture
def rig() -> Rig:
    program, constants = branches_program(branches=4, depth=4, size=64 if without_gpu() else 512)
    return Rig(program, constants)


def spread(rig: Rig, seed: int = 0, lanes: int = 4) -> Schedule:
    return random_placement(random.Random(seed), rig.program.graph, lanes)


def bindings(rig: Rig) -> GraphBindings:
    if rig.reader is None:
        pytest.skip("cuda-bindings is not installed")
    return rig.reader


def test_the_streams_of_a_set_are_distinct() -> None:
    streams = StreamSet(open_backend())
    taken = [streams.named("origin"), streams.named("replay"), *(streams.lane(lane) for lane in range(16))]
    assert len({open_backend().handle(stream) for stream in taken}) == 18


@pytest.mark.gpu_only(reason="it asks PyTorch for streams")
def test_nobody_else_is_given_the_streams_of_a_set() -> None:
    """Trap 6: PyTorch hands its own out round robin, and so may give a user one of them in the middle of a capture."""
    backend = open_backend()
    streams = StreamSet(backend)
    taken = {backend.handle(streams.lane(lane, priority)): priority for priority in range(4) for lane in range(4)}
    taken[backend.handle(streams.named("origin"))] = 0
    others = {torch.cuda.Stream(priority=-priority).cuda_stream for priority in range(4) for _ in range(40)}
    assert not others & taken.keys()
    assert all(backend.lasting(streams.lane(lane)) for lane in range(4))
    assert [streams.lane(0, priority).priority for priority in range(4)] == [0, -1, -2, -3]


def test_what_the_driver_tells_of_a_known_graph_is_right(rig: Rig) -> None:
    """Else everything here and in production runs without audits."""
    bindings(rig)
    assert rig.capturer.unread == ""
    assert rig.capturer.can_observe


@pytest.mark.gpu_only(reason="a double's streams have no raw handles")
def test_the_current_stream_is_known_by_its_handle_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_backend()
    side = backend.new_stream(0)
    for ask in (backend._current_handle, None):
        monkeypatch.setattr(backend, "_current_handle", ask)
        home = backend.handle(backend.current_stream())
        assert backend.current_handle() == home
        with backend.on(side):
            assert backend.current_handle() == backend.handle(side) != home
        assert backend.current_handle() == home


def test_clones_of_any_tensors_are_their_owners_with_the_same_bits_and_strides() -> None:
    backend = open_backend()
    with torch.inference_mode():
        base = torch.arange(24.0, device=backend.device).reshape(4, 6)
        tensors = [
            base,
            base.t(),
            base[:, ::2],
            base[1],
            base.half(),
            base.to(torch.int64),
            base > 3,
            base[:0],
            base[0, 0],
            base[:1].expand(3, 6),
        ]
        tensors += [base.neg().reshape(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)]
    for count in (1, 2, 3, len(tensors)):
        with torch.no_grad():
            made = backend.clone(tensors[-count:])
            expected = [tensor.clone() for tensor in tensors[-count:]]
        assert [tensor.stride() for tensor in made] == [tensor.stride() for tensor in expected]
        assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(made, expected, strict=True))
        assert not any(tensor.is_inference() for tensor in made)
        assert not {tensor.data_ptr() for tensor in made if tensor.numel()} & {tensor.data_ptr() for tensor in tensors}


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.complex32])
def test_tensors_of_any_type_are_copied(dtype: torch.dtype) -> None:
    backend = open_backend()
    sources = [torch.arange(8.0).to(dtype).to(backend.device) for _ in range(3)]
    targets = [backend.static_like(source) for source in sources]
    backend.copy(targets, sources)
    for made in (targets, backend.clone(sources)):
        assert backend.same(made, sources)


def test_an_allocation_before_the_fork_is_outside_the_pool_and_its_kernel_outside_the_graph() -> None:
    backend = open_backend()
    origin, outside, inside = (backend.new_stream(0) for _ in range(3))
    pool = backend.new_pool()
    with backend.on(outside):
        torch.ones(1 << 20, device=backend.device)  # cached for this stream: cudaMalloc itself would break the capture
    backend.synchronize()
    with torch.inference_mode(), backend.on(origin):
        graph = backend.begin_capture(pool)
        start = backend.new_event()
        backend.record(start, origin)
        backend.wait(inside, start)
        assert backend.capturing(inside)
        assert not backend.capturing(outside)
        with backend.on(inside):
            kept = torch.ones(1 << 20, device=backend.device)
        with backend.on(outside):
            stray = torch.ones(1 << 20, device=backend.device)
        end = backend.new_event()
        backend.record(end, inside)
        backend.wait(origin, end)
        backend.end_capture(graph)
    spans = backend.pool_spans(pool, unused=False)
    assert spans
    assert any(span.start <= kept.data_ptr() < span.end for span in spans)
    assert not any(span.start <= stray.data_ptr() < span.end for span in spans)
    backend.synchronize()
    assert bool((stray == 1).all())  # it ran at once
    reader = open_reader()
    if reader is not None:
        assert len(reader.read(graph)[0]) == 1
    backend.reset(graph)


def test_poison_reaches_memory_that_nobody_holds() -> None:
    backend = open_backend()
    tensor = torch.zeros(1 << 16, device=backend.device)
    backend.poison([backend.span(tensor)])
    backend.synchronize()
    assert bool(tensor.isnan().all())


def test_an_empty_capture_is_an_error() -> None:
    backend = open_backend()
    backend.synchronize()
    with backend.on(backend.new_stream(0)):
        graph = backend.begin_capture(backend.new_pool())
        with pytest.raises(EmptyCapture):
            backend.end_capture(graph)
    backend.reset(graph)


@pytest.mark.parametrize("rule", [FreeRule.VECTOR_CLOCK, FreeRule.HOLD_ALL])
def test_every_way_of_running_gives_the_same_bits(rig: Rig, rule: FreeRule) -> None:
    for seed in range(4):
        schedule = spread(rig, seed)
        plan = make_plan(rig.program.graph, schedule, rule)
        runner = rig.capture(plan)
        for turn in range(3):
            inputs = rig.inputs(turn)
            wanted = rig.measurer.reference(inputs)
            assert rig.backend.same(runner(inputs), wanted)
            assert rig.backend.same(rig.capturer.run_eager(rig.bound, plan, inputs), wanted)
        runner.close()
    rig.close()


def test_the_captured_graph_passes_the_audit_and_has_the_nodes_of_one_stream(rig: Rig) -> None:
    bindings(rig)
    graph = rig.program.graph
    alone = make_plan(graph, sequential(graph))
    runner = rig.capture(alone, observe=True)
    assert runner.captured is not None
    assert audit_graph(graph, alone, runner.captured).problems == ()
    counts = node_counts(graph, runner.captured)
    assert all(counts)
    for seed in range(4):
        plan = make_plan(graph, spread(rig, seed))
        captured = rig.capture(plan, observe=True).captured
        assert captured is not None
        report = audit_graph(graph, plan, captured, expected_nodes=counts)
        assert report.problems == ()
        assert captured.pool
        assert report.orderings_checked > len(graph)


def test_priorities_reach_the_nodes(rig: Rig) -> None:
    reader = bindings(rig)
    graph = rig.program.graph
    schedule = replace(sequential(graph), priority=tuple(3 * (index % 2) for index in range(len(graph))))
    runner = rig.capture(make_plan(graph, schedule))
    found = {kernel.priority for kernel in reader.kernels(runner._graph)}
    assert len(found) == 2
    assert rig.backend.same(runner(rig.inputs(1)), rig.measurer.reference(rig.inputs(1)))


def test_an_operator_whose_bits_change_is_found(rig: Rig) -> None:
    measurer, graph = rig.measurer, rig.program.graph
    plan, inputs = make_plan(graph, sequential(graph)), rig.inputs(1)
    assert unrepeatable(measurer, inputs, plan) is None
    ordinary, (made, *_) = rig.bound.kernels[5], graph.operators[5].writes

    def varying(slots: list[torch.Tensor]) -> None:
        ordinary(slots)
        slots[made] = slots[made] + torch.rand((), device=rig.backend.device)

    kernels = (*rig.bound.kernels[:5], varying, *rig.bound.kernels[6:])
    varied = CudaMeasurer(rig.capturer, replace(rig.bound, kernels=kernels), graph, inputs)
    assert unrepeatable(varied, inputs, plan) == graph.operators[5]
    varied.close()


def remove_a_wait(plan: Plan) -> Plan:
    """Without the last wait of the plan: the concatenation no longer waits for one branch."""
    steps = list(plan.steps)
    position = max(place for place, step in enumerate(steps) if step.waits)
    steps[position] = replace(steps[position], waits=steps[position].waits[1:])
    return replace(plan, steps=tuple(steps))


def stressed(rig: Rig, plan: Plan, schedule: Schedule) -> bool:
    """Whether the plan survives the delays."""
    delays = [DelaySet(()), *plan_delays(rig.program.graph, schedule, 1000.0, random.Random(0))]
    outcomes = list(stress_plan(rig.measurer, plan, delays, [rig.inputs(1), rig.inputs(2)], replays=2, seed=0))
    report = judge_outcomes(rig.program.graph, delays, outcomes)
    assert not isinstance(report, Failure), report
    return report.sound


def test_a_removed_wait_is_caught_by_audit_and_delays(rig: Rig) -> None:
    bindings(rig)
    graph = rig.program.graph
    schedule = spread(rig, 1)
    plan = make_plan(graph, schedule)
    assert stressed(rig, plan, schedule)
    broken = remove_a_wait(plan)
    captured = rig.capture(broken, observe=True).captured
    assert captured is not None
    assert not audit_graph(graph, plan, captured).sound
    assert not stressed(rig, broken, schedule)


@pytest.mark.gpu_only(reason="the double with tensors keeps all memory")
def test_memory_freed_at_the_last_launch_is_caught_by_audit_and_delays(rig: Rig) -> None:
    bindings(rig)
    graph = rig.program.graph
    caught = 0
    for seed in range(8):
        schedule = spread(rig, seed)
        plan = make_plan(graph, schedule, FreeRule.LAST_LAUNCH)
        captured = rig.capture(plan, observe=True).captured
        assert captured is not None
        if not audit_graph(graph, make_plan(graph, schedule), captured).sound:
            caught += 1
            assert not stressed(rig, plan, schedule)
        if caught == 2:
            return
    pytest.fail("the allocator never handed a block over too early: the case is too small to show anything")


@pytest.mark.gpu_only(reason="it captures as a user does")
def test_a_runner_that_another_thread_drops_breaks_no_capture_of_a_user(rig: Rig) -> None:
    """That of ``torch.cuda.graph`` forbids every thread to wait, and a collection may come in any of them."""
    runners = [rig.capture(make_plan(rig.program.graph, spread(rig, 2)))]
    runners[0](rig.inputs(1))
    graph, given = torch.cuda.CUDAGraph(), torch.ones(8, device=rig.backend.device)
    (given * 2).add_(1)  # a kernel that is loaded while a capture goes on may end it
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as other, torch.cuda.graph(graph):
        made = given * 2
        other.submit(runners.clear).result()
        made.add_(1)
    graph.replay()
    assert made.tolist() == [3.0] * 8


def test_a_hundred_replays_beside_noise_give_one_answer(rig: Rig) -> None:
    schedule = spread(rig, 2)
    runner = rig.capture(make_plan(rig.program.graph, schedule))
    inputs = [rig.inputs(seed) for seed in range(3)]
    wanted = [rig.measurer.reference(item) for item in inputs]
    noise = torch.zeros(1 << 10 if without_gpu() else 64 << 20, device=rig.backend.device)
    # One of its own: noise on the stream of the call would come before it, and not beside it.
    beside = rig.capturer.streams.named("noise")
    for turn in range(100):
        with rig.backend.on(beside):
            noise.add_(1.0)
        with rig.backend.on(rig.measurer.replay_stream):
            made = runner(inputs[turn % 3])
            # Another stream does not wait for the copies that a call returns.
            assert rig.backend.same(made, wanted[turn % 3])


class Faulty:
    """The bound program with one operator that misbehaves in a capture."""

    in_place: tuple[Chain, ...] = ()
    otherwise = None

    def __init__(self, rig: Rig, position: int, fault: str) -> None:
        self._rig = rig
        kernels = list(rig.bound.kernels)
        first = kernels[position]

        def run(slots: list[torch.Tensor]) -> None:
            if rig.capturing():
                if fault == "raise":
                    raise ValueError("an operator that fails")
                if fault == "synchronise":
                    rig.backend.synchronize()
                if fault == "memory":
                    torch.empty(1 << 50, device=rig.backend.device)
            first(slots)

        kernels[position] = run
        self.kernels = tuple(kernels)

    def new_slots(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return self._rig.bound.new_slots(inputs)

    def outputs(self, slots: list[torch.Tensor]) -> list[torch.Tensor]:
        return self._rig.bound.outputs(slots)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("raise", FailureKind.CAPTURE),
        pytest.param("memory", FailureKind.OOM, marks=pytest.mark.gpu_only(reason="a CPU words the want of memory otherwise")),
    ],
)
def test_a_failed_capture_is_one_failure_and_the_next_one_works(rig: Rig, fault: str, kind: FailureKind) -> None:
    plan = make_plan(rig.program.graph, spread(rig, 3))
    pool = rig.capturer.scratch_pool()
    gc.collect()
    before = rig.backend.allocated_bytes()
    failure = rig.capturer.capture(Faulty(rig, 9, fault), plan, rig.measurer.static, graph=rig.program.graph, pool=pool)
    assert isinstance(failure, Failure)
    assert failure.kind is kind
    if fault == "memory" and rig.capturer.tainted:
        return  # some versions give up the capture itself when memory runs out; a process says so and is replaced
    assert not rig.capturer.tainted
    gc.collect()
    # cuBLAS may have made its workspaces meanwhile; no tensor of the candidate may be left.
    assert rig.backend.allocated_bytes() - before <= 4 * 2 * (33 << 20)
    runner = rig.capturer.capture(rig.bound, plan, rig.measurer.static, graph=rig.program.graph, pool=pool)
    assert isinstance(runner, GraphRunner)
    assert rig.backend.same(runner(rig.inputs(1)), rig.measurer.reference(rig.inputs(1)))


def test_an_operator_that_synchronises_breaks_the_capture_only(rig: Rig) -> None:
    plan = make_plan(rig.program.graph, spread(rig, 3))
    failure = rig.capturer.capture(Faulty(rig, 9, "synchronise"), plan, rig.measurer.static, graph=rig.program.graph)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.CAPTURE
    assert "op9" in failure.detail
    torch.rand(4, device=rig.backend.device)  # not that nobody in this process can draw any more
    # Whether this process may capture on depends on the version of PyTorch; what it says must be true.
    if not rig.capturer.tainted:
        assert isinstance(rig.capturer.capture(rig.bound, plan, rig.measurer.static, graph=rig.program.graph), GraphRunner)


@pytest.mark.gpu_only(reason="a CPU has no captures for another thread to break")
@pytest.mark.parametrize("library", ["cuBLAS", "cuDNN"])
def test_a_capture_that_another_thread_breaks_is_tried_again_whoever_finds_it_out(rig: Rig, library: str) -> None:
    """Libraries fail in words of their own."""
    graph, plan, inputs = rig.program.graph, make_plan(rig.program.graph, spread(rig, 3)), rig.inputs(1)
    product, *others = rig.bound.kernels
    waits = [torch.cuda.synchronize]
    image, filters = (torch.ones(shape, device=rig.backend.device) for shape in ((1, 4, 8, 8), (4, 4, 3, 3)))
    torch.conv2d(image, filters)

    def disturbed(slots: list[torch.Tensor | None]) -> None:
        if rig.capturing() and waits:
            with ThreadPoolExecutor(1) as pool, suppress(RuntimeError):
                pool.submit(waits.pop()).result()
            if library == "cuDNN":
                torch.conv2d(image, filters)
        product(slots)

    runner = prepare_runner(rig.capturer, replace(rig.bound, kernels=(disturbed, *others)), graph, plan, inputs)
    assert not waits
    assert rig.backend.same(runner(inputs), rig.measurer.reference(inputs))
    runner.close()


@pytest.mark.gpu_only(reason="PyTorch checks for synchronising calls on a GPU only")
def test_an_operator_that_synchronises_is_named_before_anything_is_captured(rig: Rig) -> None:
    measurer = rig.measurer
    assert observe_synchronising(measurer) == []
    ordinary = rig.bound.kernels[9]

    def reads_back(slots: list[torch.Tensor | None]) -> None:
        torch.ones(1, device=rig.backend.device).item()
        ordinary(slots)

    measurer.program = replace(rig.bound, kernels=(*rig.bound.kernels[:9], reads_back, *rig.bound.kernels[10:]))
    assert [(item.operator, item.reason) for item in observe_synchronising(measurer)] == [(9, "waits for the device")]
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.gpu_only(reason="the profiler sees kernels of a GPU only")
def test_the_profiler_describes_the_same_kernels_as_the_graph(rig: Rig) -> None:
    if without_gpu():
        pytest.skip("the emulator has no CUPTI")
    # The first two are a product and an elementwise operator; a library may choose another product for another stream's workspace.
    by_graph, by_profiler = (profile_operator(rig.measurer, 1, bindings=source, flush=None) for source in (bindings(rig), None))
    assert isinstance(by_graph, OperatorProfile), by_graph
    assert isinstance(by_profiler, OperatorProfile), by_profiler
    if not by_profiler.kernels:
        pytest.skip("the profiler may not watch this GPU")
    shape = [(kernel.grid, kernel.block) for kernel in by_graph.kernels]
    assert [(kernel.grid, kernel.block) for kernel in by_profiler.kernels] == shape
    # A profiler counts those that the driver and itself take, and what is allotted is a multiple of eight.
    more = [theirs.registers - mine.registers for mine, theirs in zip(by_graph.kernels, by_profiler.kernels, strict=True)]
    assert all(0 <= count <= 16 for count in more), more
    product = profile_operator(rig.measurer, 0, bindings=None, flush=None)
    assert isinstance(product, OperatorProfile), product
    assert product.kernels


def test_kernels_of_a_graph_are_described(rig: Rig) -> None:
    reader = bindings(rig)
    chain = rig.measurer.chain([(0, 3)])
    assert not isinstance(chain, Failure)
    kernels = reader.kernels(chain.graph)
    assert len(kernels) >= 3
    for kernel in kernels:
        assert kernel.blocks >= 1
        assert 1 <= kernel.threads <= 1024
        assert kernel.registers > 0
        assert kernel.resident_blocks >= 1
        assert kernel.cluster >= 1
    kinds = [kind for _, kind in reader.read(chain.graph)[0]]
    assert kinds.count(NodeKind.EVENT) == 2
