"""The native engine alone: every kind of argument and instruction, what it refuses, signals, a missing wait, a team that does not come."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole
from autosched.core.program import Call, InputSpec, Many, NonFinite, Program, Ref, TorchLiteral
from autosched.core.records import Engine
from autosched.core.schedule import sequential
from autosched.runtime import lanes
from autosched.runtime.instructions import Allocate, CallOperator, Expect, Instruction, Release, RunKernel, Same, Window, carrying, scratch
from autosched.runtime.kernels import BoundProgram, bind, random_inputs
from autosched.runtime.lane_pool import LanePool
from autosched.runtime.lanes import LaneExecutor, Trace
from autosched.runtime.native.build import native_library
from autosched.runtime.native.code import NotNative
from autosched.runtime.native.lanes import Deserted, NativePlan, NativeProgram
from autosched.runtime.native.watch import Watched, native_watch
from autosched.runtime.plan import Step, make_plan
from tests.conformance.graphs import random_placement, random_program
from tests.conformance.lanes_suite import random_schedule
from tests.conformance.probes import with_hook
from tests.conformance.programs import branches_program
from tests.conformance.waiting import wait_until

pytestmark = pytest.mark.usefixtures("native")

DTYPE, FORMAT, DEVICE = TorchLiteral("dtype", "float64"), TorchLiteral("memory_format", "channels_last"), TorchLiteral("device", "cpu")
LAYOUT, PRESERVE = TorchLiteral("layout", "strided"), TorchLiteral("memory_format", "preserve_format")
_PACKED = (Many((1, 1)), Many((1, 1)), Many((1, 1)), 1)
X, INDEX, WEIGHT, BIAS = Ref(0), Ref(1), Ref(2), Ref(3)


def _inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(2, 4, 6, 6, generator=generator),
        torch.tensor([1, 0]),
        torch.randn(4, 4, 3, 3, generator=generator),
        torch.randn(4, generator=generator),
    ]


def _bound(calls: Sequence[Call], outputs: Sequence[int], instructions: Sequence[Instruction] | None = None) -> BoundProgram:
    """One operator of all of ``calls`` on the four inputs, or one that does what ``instructions`` say."""
    calls = calls or [Call("aten::relu.default", (X,), (), (made,)) for made in outputs]
    specs = [TensorSpec(tuple(item.shape), str(item.dtype).removeprefix("torch."), item.stride()) for item in _inputs()]
    values = [Value(place, spec, ValueRole.INPUT, place) for place, spec in enumerate(specs)]
    for place in range(4, 1 + max(outputs)):
        values.append(Value(place, specs[0], ValueRole.INTERMEDIATE, place))
    operator = Operator(0, "all", tuple(calls), (0, 1, 2, 3), tuple(outputs), (), 0, 0, 0, "", "")
    graph = OpGraph((operator,), tuple(values), (0, 1, 2, 3), tuple(outputs))
    program = Program(graph, (), (), tuple(InputSpec(place, 0, 1, 0.0, 1.0) for place in range(4)), "", "", (), (), "aten")
    bound = bind(program, {})
    if instructions is None:
        return bound
    return dataclasses.replace(bound, kernels=(carrying(lambda slots: None, instructions),))


def _native(bound: BoundProgram) -> LaneExecutor:
    executor = LaneExecutor(bound, make_plan(bound.program.graph, sequential(bound.program.graph)))
    assert executor.engine is Engine.NATIVE
    return executor


@pytest.mark.parametrize(
    "call",
    [
        Call("aten::add.Tensor", (X, 2.5), (), (4,)),
        Call("aten::add.Tensor", (INDEX, 2.5), (("alpha", 2),), (4,)),
        Call("aten::mul.Tensor", (INDEX, True), (), (4,)),
        Call("aten::add.Scalar", (INDEX, 3), (), (4,)),
        Call("aten::masked_fill.Scalar", (X, Ref(4), NonFinite("-inf")), (), (5,)),
        Call("aten::full.default", (Many((2, 3)), NonFinite("nan")), (("device", DEVICE), ("dtype", DTYPE), ("layout", LAYOUT)), (4,)),
        Call("aten::full.default", (Many(()), 1), (("pin_memory", False),), (4,)),
        Call("aten::clone.default", (X,), (("memory_format", FORMAT),), (4,)),
        Call("aten::_to_copy.default", (X,), (("dtype", DTYPE), ("memory_format", PRESERVE)), (4,)),
        Call("aten::sum.dim_IntList", (X, Many((1, 2)), True), (("dtype", DTYPE),), (4,)),
        Call("aten::sum.dim_IntList", (X, None), (), (4,)),
        Call("aten::mean.dim", (X, Many(())), (), (4,)),
        Call("aten::clamp.default", (X, None, 0.5), (), (4,)),
        Call("aten::clamp.default", (X, 0), (), (4,)),
        Call("aten::convolution.default", (X, WEIGHT, None, Many((1, 1)), Many((1, 1)), Many((1, 1)), False, Many((0, 0)), 1), (), (4,)),
        Call("aten::conv2d.default", (X, WEIGHT, BIAS, Many((1, 1)), Many((1, 1))), (), (4,)),
        Call("aten::conv2d.padding", (X, WEIGHT, BIAS, Many((1, 1)), "same"), (), (4,)),
        Call("mkldnn::_convolution_pointwise.default", (X, WEIGHT, BIAS, *_PACKED, "none", Many((None,)), ""), (), (4,)),
        Call("mkldnn::_convolution_pointwise.default", (X, WEIGHT, BIAS, *_PACKED, "leaky_relu", Many((0.25,)), ""), (), (4,)),
        Call("mkldnn::_convolution_pointwise.default", (X, WEIGHT, BIAS, *_PACKED, "hardtanh", Many((-1, 0.5)), ""), (), (4,)),
        Call("aten::avg_pool2d.default", (X, 2), (), (4,)),
        Call("aten::index.Tensor", (X, Many((None, INDEX))), (), (4,)),
        Call("aten::index_put.default", (X, Many((INDEX,)), X), (("accumulate", True),), (4,)),
        Call("aten::cat.default", (Many((X, X)), 1), (), (4,)),
        Call("aten::upsample_nearest2d.vec", (X, None, Many((2.0, 2))), (), (4,)),
        Call("aten::native_layer_norm.default", (X, Many((6,)), None, None, 1e-5), (), (4, -1, 5)),
        Call("aten::topk.default", (X, 2), (), (4, 5)),
        Call("aten::unbind.int", (X,), (), (4, 5)),
        Call("aten::split.Tensor", (X, 2, 1), (), (-1, 4)),
        Call("aten::split.Tensor", (X, 4, 1), (), (4,)),
        Call("aten::arange.start_step", (0, 10, 3), (("dtype", DTYPE),), (4,)),
        Call("aten::scaled_dot_product_attention.default", (X, X, X), (("scale", 0.5),), (4,)),
        Call("aten::gelu.default", (X,), (("approximate", "tanh"),), (4,)),
        Call("aten::where.ScalarSelf", (Ref(4), 1.0, X), (), (5,)),
        Call("aten::pow.Tensor_Scalar", (X, 2), (), (4,)),
        Call("aten::std.correction", (X, Many((3,))), (("correction", 0),), (4,)),
        Call("aten::native_batch_norm.default", (X, BIAS, BIAS, BIAS, BIAS, False, 0.1, 1e-5), (), (4, -1, -1)),
    ],
    ids=lambda call: f"{call.target.removeprefix('aten::')}-{len(call.args)}",
)
def test_every_kind_of_argument_reaches_the_operator(call: Call) -> None:
    mask = [Call("aten::gt.Scalar", (X, 0), (), (4,))] if Ref(4) in call.args else []
    bound = _bound([*mask, call], [slot for slot in call.outputs if slot >= 0])
    for ours, theirs in zip(_native(bound).run(_inputs()), bound.run(_inputs()), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


def test_an_operator_in_place_changes_its_argument() -> None:
    inputs = _inputs()
    expected = inputs[0] * 2
    (made,) = _native(_bound([], (4,), [CallOperator(Call("aten::add_.Tensor", (X, X), (), (4,)))])).run(inputs)
    assert torch.equal(made, expected)
    assert torch.equal(inputs[0], expected)


def test_the_numbers_of_a_compiled_kernel_get_where_they_should() -> None:
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)

    @kind
    def add(left: int, right: int, into: int) -> None:
        for place in range(4):
            sums = ctypes.cast(into, ctypes.POINTER(ctypes.c_float))
            sums[place] = (
                ctypes.cast(left, ctypes.POINTER(ctypes.c_float))[place] + ctypes.cast(right, ctypes.POINTER(ctypes.c_float))[place]
            )

    address = ctypes.cast(add, ctypes.c_void_p).value
    assert address is not None
    instructions = [
        Allocate(scratch(0), (2, 4), (4, 1), "float32"),
        Window(scratch(1), scratch(0), (4,), (1,), 4),
        RunKernel("add", address, (3, 3, scratch(1)), add),
        Same(4, scratch(1)),
        CallOperator(Call("aten::neg.default", (Ref(4),), (), (5,))),
        Release((scratch(0), scratch(1))),
    ]
    made, negated = _native(_bound([], (4, 5), instructions)).run(_inputs())
    assert torch.equal(made, _inputs()[3] * 2)
    assert torch.equal(negated, -made)
    assert made.storage_offset() == 4


@pytest.mark.parametrize("count", [100, 128, 129, 256, 257, 1000])
def test_a_kernel_of_very_many_tensors_gets_them_in_order(count: int) -> None:
    seen: list[list[int]] = []
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * count)
    function = kind(lambda *given: seen.append(list(given)))
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    instructions: list[Instruction] = [Allocate(scratch(place), (1,), (1,), "int64") for place in range(count)]
    instructions += [RunKernel("many", address, tuple(scratch(place) for place in range(count)), function), Same(4, scratch(count - 1))]
    (last,) = _native(_bound([], (4,), instructions)).run(_inputs())
    assert len(set(seen[0])) == count
    assert seen[0][-1] == last.data_ptr()


@pytest.mark.parametrize(
    ("size", "stride", "why"),
    [
        ((2, 1, 6), (36, 999, 1), ""),
        ((2, 1, 5), (36, 6, 1), "expected \\[2, 1, 5\\]"),
        ((2, 1, 6, 1), (36, 6, 1, 1), "expected \\[2, 1, 6, 1\\]"),
        ((2, 1, 6), (36, 6, 2), "expected \\[36, 6, 2\\]"),
    ],
)
def test_a_tensor_of_another_shape_than_expected_stops_the_run(size: tuple[int, ...], stride: tuple[int, ...], why: str) -> None:
    window = Window(4, 0, (2, 1, 6), (36, 6, 1), 0)
    executor = _native(_bound([], (4,), [window, Expect(4, size, stride)]))
    if not why:
        assert executor.run(_inputs())[0].shape == size
        return
    for _ in range(2):
        with pytest.raises(RuntimeError, match=why):
            executor.run(_inputs())


def test_a_tensor_of_another_dtype_than_expected_stops_the_run() -> None:
    window = Window(4, 0, (2, 1, 6), (36, 6, 1), 0)
    assert _native(_bound([], (4,), [window, Expect(4, (2, 1, 6), (36, 6, 1), "float32")])).run(_inputs())[0].shape == (2, 1, 6)
    for dtype in ("float64", "int32"):
        executor = _native(_bound([], (4,), [window, Expect(4, (2, 1, 6), (36, 6, 1), dtype)]))
        with pytest.raises(RuntimeError, match="was given Float; expected"):
            executor.run(_inputs())


def test_strides_of_a_tensor_without_elements_are_not_looked_at() -> None:
    executor = _native(_bound([], (4,), [Window(4, 0, (0, 3), (3, 1), 0), Expect(4, (0, 3), (7, 7))]))
    assert executor.run(_inputs())[0].numel() == 0


def test_what_is_loaded_for_lanes_is_not_taken_for_a_library_of_the_users() -> None:
    assert native_library() is not None
    assert not [path for path in torch.ops.loaded_libraries if "lanes-" in path]


def test_what_cannot_be_said_natively_runs_in_python() -> None:
    bound = bind(*branches_program())
    wrapped = dataclasses.replace(bound, kernels=(*bound.kernels[:-1], lambda slots: bound.kernels[-1](slots)))  # noqa: PLW0108
    plan = make_plan(bound.program.graph, sequential(bound.program.graph))
    executor = LaneExecutor(wrapped, plan)
    assert executor.engine is Engine.PYTHON
    inputs = random_inputs(bound.program, 0)
    assert torch.equal(executor.run(inputs)[0], bound.run(inputs)[0])
    assert LaneExecutor(bound, plan, None, Engine.PYTHON).engine is Engine.PYTHON


@pytest.mark.parametrize(
    ("instruction", "why"),
    [
        (CallOperator(Call("aten::relu.no_such_thing", (X,), (), (4,))), "no_such_thing"),
        (CallOperator(Call("aten::relu.default", (X,), (("colour", 1),), (4,))), "colour"),
        (CallOperator(Call("aten::relu.default", (), (), (4,))), "is given no self"),
        (CallOperator(Call("aten::pow.Tensor_Scalar", (X, "two"), (), (4,))), "number|Scalar"),
        (RunKernel("wide", 1, (0,) * 1025, None), "more than"),
    ],
    ids=["overload", "keyword", "missing", "type", "pointers"],
)
def test_a_refusal_says_why(instruction: Instruction, why: str) -> None:
    bound = _bound([], (4,), [instruction])
    library = native_library()
    assert library is not None
    steps = make_plan(bound.program.graph, sequential(bound.program.graph)).steps
    with pytest.raises(NotNative, match=why):
        NativePlan(library, bound, [steps], 0.0, steps)


def test_inputs_that_are_missing_are_an_error_and_no_crash() -> None:
    executor = _native(bind(*branches_program()))
    with pytest.raises(RuntimeError, match="of 1 inputs was given 0"):
        executor.run([])


@pytest.mark.parametrize(("lane_count", "one_team"), [(1, False), (2, False), (2, True)])
def test_ctrl_c_ends_a_run(lane_count: int, one_team: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "team_comes", lambda library, threads: one_team)
    monkeypatch.setattr(lanes, "usable_cores", lambda: 2)
    bound = bind(*branches_program(branches=4, depth=4))
    graph = bound.program.graph
    schedule = random_schedule(graph, lane_count, 2)
    # On the last lane: with two, the caller's waits natively for the other one.
    victim = next(index for index in schedule.order if schedule.lane[index] == lane_count - 1)
    pressed, ran = threading.Event(), []

    def press_and_stay() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        if lane_count > 1 and not one_team:
            assert pressed.wait(60)
        else:
            # The interpreter is met again when every operator that runs has ended.
            time.sleep(0.2)

    last = len(graph) - 1
    probed = with_hook(with_hook(bound, victim, press_and_stay), last, lambda: ran.append(last))
    before = signal.getsignal(signal.SIGINT)

    def hear(number: int, frame: object) -> None:
        pressed.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hear)
    try:
        executor = LaneExecutor(probed, make_plan(graph, schedule))
        assert executor.one_team is one_team
        inputs = random_inputs(bound.program, 0)
        held = [weakref.ref(tensor) for tensor in inputs]
        with pytest.raises(KeyboardInterrupt):
            executor.run(inputs)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ran == []
    del inputs
    gc.collect()
    # A server whose time limits are signals would keep the tensors of every request that met one.
    assert wait_until(lambda: not any(tensor() is not None for tensor in held), 5)


class _LetsGo(torch.nn.Module):
    """Lets go of things while it runs, as a garbage collection may."""

    def __init__(self, held: list[object]) -> None:
        super().__init__()
        # Not the list: export keeps what is in a model's lists.
        self.let_go = held.clear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.let_go()
        gc.collect()
        return x * 2


def test_what_is_collected_while_a_model_is_exported_is_no_part_of_it() -> None:
    weight = torch.ones(4, 4)
    watch = native_watch(Watched(placed=(weight,), counted=(weight,)))
    assert watch is not None
    ended = weakref.ref(watch)
    held: list[object] = [_native(bind(*branches_program())), watch]
    del watch
    exported = torch.export.export(_LetsGo(held), (torch.ones(2),))
    assert ended() is None
    # An operator would be there to free the same memory once more at each call of what was exported.
    assert [str(node.target) for node in exported.graph.nodes if node.op == "call_function"] == ["aten.mul.Tensor"]


@pytest.mark.parametrize("one_team", [True, False])
def test_a_missing_wait_shows_when_its_producer_is_held_back(one_team: bool) -> None:
    library = native_library()
    assert library is not None
    pool = LanePool()
    caught = 0
    for seed in range(8):
        program, constants = random_program(random.Random(seed), 16)
        bound = bind(program, constants)
        plan = make_plan(program.graph, random_placement(random.Random(seed), program.graph, 2))
        waiting = [step for step in plan.steps if step.waits]
        if not waiting:
            continue
        producer = waiting[-1].waits[-1]
        inputs = random_inputs(program, seed)
        expected = bound.run([item.clone() for item in inputs])

        def without_wait(without: int) -> list[Step]:
            return [dataclasses.replace(step, waits=tuple(item for item in step.waits if item != without)) for step in plan.steps]  # noqa: B023

        for without, sound in ((-1, True), (producer, False)):
            told = without_wait(without)
            lanes = [[step for step in told if step.lane == lane] for lane in range(plan.lanes)]
            native = NativePlan(library, bound, lanes, 0.0, told, as_team=one_team, delays_us={producer: 20_000.0})
            assert native.one_team is one_team
            with torch.inference_mode():
                try:
                    got = native.run([item.clone() for item in inputs], None, pool)
                    same = all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
                except RuntimeError:
                    same = False  # what was to be read was not there yet
            assert same or not sound
            caught += not same
    pool.close()
    assert caught >= 4


def test_a_team_that_does_not_come_leaves_the_lanes_to_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "usable_cores", lambda: 2)
    bound = bind(*branches_program(branches=4, depth=4))
    schedule = random_schedule(bound.program.graph, 2, 2, widths=(1, 2))
    executor = LaneExecutor(bound, make_plan(bound.program.graph, schedule))
    inputs = random_inputs(bound.program, 0)
    expected = bound.run(inputs)[0]
    assert executor.one_team
    assert torch.equal(executor.run(inputs)[0], expected)
    library = native_library()
    assert library is not None
    # What a region of fewer threads leaves behind: nothing.
    monkeypatch.setattr(NativeProgram, "_here", lambda *given: (_ for _ in ()).throw(Deserted(midway=True)))
    assert torch.equal(executor.run(inputs)[0], expected)
    assert not executor.one_team
    assert torch.equal(executor.run(inputs)[0], expected)


@pytest.mark.parametrize("limit", ["1", "2"])
def test_openmp_is_asked_how_many_threads_come(limit: str, tmp_path: Path) -> None:
    """``OMP_THREAD_LIMIT`` is read once, when OpenMP is loaded."""
    script = tmp_path / "team.py"
    script.write_text(
        "import torch\n"
        "from autosched.runtime.native.build import build_native, native_library\n"
        "from autosched.runtime.native.lanes import team_comes\n"
        "assert not build_native()\n"
        "library = native_library()\n"
        "print(team_comes(library, 1), team_comes(library, 2), team_comes(library, 3))\n"
    )
    environment = {**os.environ, "OMP_THREAD_LIMIT": limit}
    found = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert found.stdout.split() == [str(size <= int(limit)) for size in (1, 2, 3)]


def test_an_operator_of_several_threads_has_the_whole_team_and_nobody_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "usable_cores", lambda: 2)
    bound = bind(*branches_program(branches=4, depth=4))
    graph = bound.program.graph
    for seed in range(6):
        schedule = random_schedule(graph, 2, seed, widths=(1, 1, 2))
        executor = LaneExecutor(bound, make_plan(graph, schedule))
        trace = Trace(len(graph))
        assert torch.equal(executor.run(random_inputs(bound.program, 0), trace)[0], bound.run(random_inputs(bound.program, 0))[0])
        place = {operator: rank for rank, operator in enumerate(schedule.order)}
        for wide in (operator for operator in schedule.order if schedule.width[operator] > 1):
            for other in schedule.order:
                if place[other] < place[wide]:
                    assert trace.end_ns[other] <= trace.start_ns[wide]
                elif place[other] > place[wide]:
                    assert trace.start_ns[other] >= trace.end_ns[wide]
