"""What the CUDA device does before and beside a capture: profiles, the screen, baselines, settings, operators run eagerly on streams."""

from __future__ import annotations

import gc
import json
import random
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autosched.core.errors import UnsupportedGraph, UsageError
from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole
from autosched.core.program import Call, Many, Ref
from autosched.device.cuda.baselines import BaselineKind, compile_options, program_module
from autosched.device.cuda.profile import OperatorProfile, ProfileSource, read_trace
from autosched.device.cuda.screen import require_capturable, synchronising_operators
from autosched.device.cuda.settings import apply_settings, current_settings
from autosched.runtime.cuda.graph import GraphCapturer
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.plan import FreeRule, make_plan
from tests.conformance.fake_cuda import FakeCuda
from tests.conformance.graphs import random_placement, random_program
from tests.conformance.programs import branches_program


def test_a_profiler_trace_is_read_without_looking_at_names() -> None:
    kernel = {"grid": [4, 1, 1], "block": [256, 1, 1], "registers per thread": 32, "shared memory": 2048, "blocks per SM": 0.03}
    events = [
        {"ph": "X", "cat": "kernel", "ts": 20, "args": {**kernel, "occupancy": {"activeBlocksPerMultiprocessor": 8}}},
        {"ph": "X", "cat": "kernel", "ts": 10, "args": kernel},
        {"ph": "X", "cat": "gpu_memset", "ts": 5, "args": {}},
        {"ph": "X", "cat": "cpu_op", "ts": 1, "name": "aten::mm"},
        {"ph": "M", "name": "process_name"},
    ]
    kernels, others = read_trace(json.loads(json.dumps(events)))
    assert others == 1
    assert [item.resident_blocks for item in kernels] == [0, 8]  # "blocks per SM" is not residency
    assert kernels[0].blocks == 4
    assert kernels[0].dynamic_shared_bytes == 2048
    profile = OperatorProfile("s", 0, kernels, others, 1, 2, 3, 4.0, 5.0, ProfileSource.PROFILER)
    assert profile.longest is kernels[0]
    assert OperatorProfile("s", 0, (), 0, 1, 2, 3, 4.0, 5.0, ProfileSource.GRAPH).longest is None


def one_call(target: str, *args: object, dtypes: tuple[str, ...] = ("float32", "float32")) -> OpGraph:
    values = [Value(index, TensorSpec((4,), dtype, (1,)), ValueRole.INPUT, index) for index, dtype in enumerate(dtypes)]
    made = len(values)
    values.append(Value(made, TensorSpec((4,), "float32", (1,)), ValueRole.INTERMEDIATE, made))
    call = Call(target, args, (), (made,))  # type: ignore[arg-type]
    operator = Operator(0, "pick", (call,), call.reads(), (made,), (), 0, 0, 0, "s", "net.py:7")
    return OpGraph((operator,), tuple(values), tuple(range(made)), (made,))


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (one_call("aten::nonzero.default", Ref(0)), "reads a value back"),
        (one_call("aten::masked_select.default", Ref(0), Ref(1), dtypes=("float32", "bool")), "reads a value back"),
        (one_call("aten::index.Tensor", Ref(0), Many((Ref(1),)), dtypes=("float32", "bool")), "indexes with a mask"),
    ],
)
def test_operators_that_synchronise_are_named_before_capture(graph: OpGraph, words: str) -> None:
    (found,) = synchronising_operators(graph)
    assert words in found.reason
    with pytest.raises(UnsupportedGraph, match=r"pick \(aten::.*\) at net\.py:7"):
        require_capturable(graph)


@pytest.mark.parametrize(
    "graph",
    [
        one_call("aten::index.Tensor", Ref(0), Many((Ref(1),)), dtypes=("float32", "int64")),  # tagged dynamic, and harmless
        one_call("aten::add.Tensor", Ref(0), Ref(1)),
        branches_program()[0].graph,
    ],
)
def test_ordinary_operators_pass(graph: OpGraph) -> None:
    assert synchronising_operators(graph) == []


@settings(deadline=None, derandomize=True, max_examples=15)
@given(st.integers(0, 1000))
def test_the_program_as_a_module_computes_the_same(seed: int) -> None:
    program, constants = random_program(random.Random(seed), 20)
    bound = bind(program, constants)
    inputs = random_inputs(program, seed)
    wanted = [tensor.clone() for tensor in bound.run(inputs)]
    with torch.inference_mode():
        made = program_module(bound)(*[tensor.clone() for tensor in inputs])
    assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


@pytest.mark.parametrize("kind", [BaselineKind.COMPILED, BaselineKind.MAX_AUTOTUNE, BaselineKind.MAX_AUTOTUNE_COMBO])
def test_every_compiler_option_exists(kind: BaselineKind) -> None:
    known = torch._inductor.list_options()
    options = compile_options(kind)
    assert set(options) <= set(known)
    assert options["triton.cudagraphs"] is False  # captured by us, so that no guard or copy is on its clock
    assert options.get("freezing", False) == (kind is BaselineKind.MAX_AUTOTUNE_COMBO)


def test_an_eager_baseline_has_no_compiler_options() -> None:
    with pytest.raises(UsageError, match="not compiled"):
        compile_options(BaselineKind.EAGER)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.integers(0, 10_000))
def test_real_operators_in_any_order_with_frees_give_the_same_bits(seed: int) -> None:
    rng = random.Random(seed)
    program, constants = random_program(rng, rng.randint(5, 30))
    bound = bind(program, constants)
    inputs = random_inputs(program, seed)
    wanted = [tensor.clone() for tensor in bound.run([tensor.clone() for tensor in inputs])]
    schedule = random_placement(rng, program.graph, 4, extra_edges=1)
    for rule in (FreeRule.VECTOR_CLOCK, FreeRule.HOLD_ALL):
        made = GraphCapturer(FakeCuda()).run_eager(bound, make_plan(program.graph, schedule, rule), inputs)
        assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


def test_a_freed_value_is_really_gone() -> None:
    """Its last Python reference goes when the plan says so; else no block is ever used again."""
    program, constants = branches_program(branches=2, depth=3, size=8)
    bound = bind(program, constants)
    alive: list[weakref.ref[Any]] = []
    most = 0

    def watching(kernel: Any, index: int) -> Any:
        def run(slots: list[Any]) -> None:
            nonlocal most
            kernel(slots)
            for value in program.graph.operators[index].writes:
                alive.append(weakref.ref(slots[value]))
            gc.collect()
            most = max(most, sum(item() is not None for item in alive))

        return run

    kernels = tuple(watching(kernel, index) for index, kernel in enumerate(bound.kernels))
    watched = type(bound)(program, bound.device, kernels, bound.constants)
    order = list(range(len(program.graph)))
    plan = make_plan(program.graph, random_placement(random.Random(0), program.graph, 1))
    gc.freeze()  # what was there before need not be looked through after each operator
    try:
        outputs = GraphCapturer(FakeCuda()).run_eager(watched, plan, random_inputs(program, 0))
    finally:
        gc.unfreeze()
    assert len(alive) == len(order)
    assert most <= 4
    assert sum(item() is not None for item in alive) == len(outputs)


def test_settings_travel() -> None:
    before = current_settings(0)
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        changed = current_settings(2)
        assert changed.float32_matmul_precision == "high"
        assert changed.cudnn_benchmark
        assert changed.device_index == 2
        apply_settings(before)
        assert current_settings(0) == before
    finally:
        apply_settings(before)


def test_deterministic_algorithms_travel() -> None:
    before = current_settings(0)
    try:
        torch.use_deterministic_algorithms(True)
        wanted = current_settings(0)
        torch.use_deterministic_algorithms(False)
        apply_settings(wanted)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        apply_settings(before)
    assert not torch.are_deterministic_algorithms_enabled()
