"""Generated code as instructions: each form of statement, what is refused, and the same numbers as the code itself, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autosched.capture.build import build_program
from autosched.capture.export import draft_of
from autosched.core.program import Call, Many, NonFinite, Ref, TorchLiteral
from autosched.core.records import Engine
from autosched.core.schedule import sequential
from autosched.core.variants import Lowering
from autosched.runtime.inductor.bind import Recording, bound_of, record
from autosched.runtime.inductor.instructions import region_instructions, unit_instructions
from autosched.runtime.inductor.modes import Mode
from autosched.runtime.inductor.source import Kernel, Kind, Unrecognised
from autosched.runtime.instructions import (
    Allocate,
    CallOperator,
    Expect,
    Instruction,
    Release,
    RunKernel,
    Same,
    Window,
    instructions_of,
    scratch,
)
from autosched.runtime.kernels import BoundProgram, random_inputs
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.plan import make_plan
from tests.conformance.compiling import compiling
from tests.conformance.interpreter import CPU, Unexpected, interpret, slots_after
from tests.conformance.lanes_suite import random_schedule

FIRST, SECOND, THIRD = scratch(0), scratch(1), scratch(2)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")


def namespace() -> dict[str, Any]:
    extern = pytest.importorskip("torch._inductor.select_algorithm").extern_kernels
    return {"torch": torch, "aten": torch.ops.aten, "inductor_ops": torch.ops.inductor, "extern_kernels": extern}


def unit(*lines: str, kernels: dict[str, Kernel] | None = None) -> tuple[Instruction, ...]:
    return unit_instructions("def unit(slots):\n" + "".join(f"    {line}\n" for line in lines), kernels or {}, namespace())


def region(*lines: str) -> str:
    return "def call(args):\n" + "".join(f"    {line}\n" for line in lines)


def test_what_a_unit_makes_is_made_in_its_slot_and_the_rest_is_let_go() -> None:
    found = unit(
        "buf0 = empty_strided_cpu((2, 3), (3, 1), torch.float32)",
        "buf1 = empty_strided_cpu((2, ), (1, ), torch.int64)",
        "extern_kernels.mm(reinterpret_tensor(slots[4], (2, 5), (5, 1), 10), slots[1], out=buf0)",
        "slots[7] = buf0",
        "slots[8] = reinterpret_tensor(buf0, (3, ), (1, ), 3)",
    )
    call = Call("aten::mm.out", (Ref(THIRD), Ref(1)), (("out", Ref(7)),), (-1,))
    assert found == (
        Allocate(7, (2, 3), (3, 1), "float32"),
        Allocate(SECOND, (2,), (1,), "int64"),
        Window(THIRD, 4, (2, 5), (5, 1), 10),
        CallOperator(call),
        Window(8, 7, (3,), (1,), 3),
        Release((THIRD, SECOND)),
    )


def test_literals_of_every_kind_and_results_taken_apart() -> None:
    found = unit("buf0 = torch.ops.aten.topk.default(slots[0], 2, -1, True, True)", "slots[2] = buf0[1]")
    assert found == (CallOperator(Call("aten::topk.default", (Ref(0), 2, -1, True, True), (), (-1, 2))),)
    (only,) = unit("buf0 = torch.ops.aten.split.Tensor(slots[0], 2)", "slots[5] = buf0[0]", "slots[6] = buf0[2]")
    assert only == CallOperator(Call("aten::split.Tensor", (Ref(0), 2), (), (5, -1, 6)))
    (only,) = unit(
        "buf0 = torch.ops.aten.full.default([2, 3], -inf, dtype=torch.float64, layout=torch.strided, "
        "device=device(type='cpu'), pin_memory=False)",
        "slots[1] = buf0",
    )
    kwargs = (
        ("device", TorchLiteral("device", "cpu")),
        ("dtype", TorchLiteral("dtype", "float64")),
        ("layout", TorchLiteral("layout", "strided")),
        ("pin_memory", False),
    )
    assert only == CallOperator(Call("aten::full.default", (Many((2, 3)), NonFinite("-inf")), kwargs, (1,)))
    (only,) = unit("torch.ops.aten.index_put_.default(slots[0], [None, slots[1]], slots[2], True)")
    assert only == CallOperator(Call("aten::index_put_.default", (Ref(0), Many((None, Ref(1))), Ref(2), True), (), (-1,)))


def test_a_result_kept_twice_is_one_tensor_in_two_slots() -> None:
    assert unit("buf0 = empty_strided_cpu((1, ), (1, ), torch.float32)", "slots[3] = buf0", "slots[4] = buf0") == (
        Allocate(FIRST, (1,), (1,), "float32"),
        Same(3, FIRST),
        Same(4, FIRST),
        Release((FIRST,)),
    )


def test_a_bias_that_is_repeated_is_given_as_one_row() -> None:
    allocate = "buf0 = empty_strided_cpu((4, 3), (3, 1), torch.float32)"
    last = "slots[9] = buf0"
    for size, stride, row in (((4, 3), (0, 1), True), ((1, 3), (3, 1), True), ((4, 3), (3, 1), False), ((0, 3), (0, 1), False)):
        bias = f"reinterpret_tensor(slots[0], {size}, {stride}, 2)"
        found = unit(allocate, f"extern_kernels.bias_addmm({bias}, slots[1], slots[2], alpha=1, beta=1, out=buf0)", last)
        assert found[1] == Window(SECOND, 0, size[row:], stride[row:], 2)
        kwargs = (("alpha", 1), ("beta", 1), ("out", Ref(9)))
        assert found[2] == CallOperator(Call("aten::addmm.out", (Ref(SECOND), Ref(1), Ref(2)), kwargs, (-1,)))
    with pytest.raises(Unrecognised, match="shape of 'slots"):
        unit(allocate, "extern_kernels.bias_addmm(slots[0], slots[1], slots[2], alpha=1, beta=1, out=buf0)", last)


def test_what_is_asserted_of_several_inputs_and_of_a_dtype_is_expected() -> None:
    # PyTorch writes so from 2.14 on.
    source = region(
        "arg0_1, arg1_1, arg2_1 = args",
        "args.clear()",
        "assert_size_stride_grouped((arg1_1, arg0_1), ((2, 2), (2, 2)), ((2, 1), (1, 2)), 'input')",
        "buf0 = torch.ops.aten.mm.default(arg0_1, arg1_1)",
        "assert_tensor_metadata(buf0, (2, 2), (2, 1), torch.float32, 'torch.ops.aten.mm.default')",
        "assert_tensor_metadata(arg2_1, (2, 2), (2, 1), torch.float32, 'torch.ops.aten.mm.default')",
        "return (buf0, )",
    )
    found = region_instructions(source, namespace(), (5, 6, 7), (8,))
    assert found == (
        Expect(6, (2, 2), (2, 1)),
        Expect(5, (2, 2), (1, 2)),
        CallOperator(Call("aten::mm.default", (Ref(5), Ref(6)), (), (8,))),
        Expect(8, (2, 2), (2, 1), "float32"),
        Expect(7, (2, 2), (2, 1), "float32"),
    )
    a, b = torch.rand(2, 2).t(), torch.rand(2, 2)
    slots = {5: a, 6: b, 7: b}
    interpret(found, slots)
    assert torch.equal(slots[8], a @ b)
    for wrong in ({5: a, 6: torch.rand(4, 4), 7: b}, {5: b, 6: b, 7: b}, {5: a, 6: b, 7: b.int()}, {5: a.double(), 6: b.double(), 7: b}):
        with pytest.raises(Unexpected):
            interpret(found, dict(wrong))


def test_a_region_lets_go_of_memory_where_its_code_does() -> None:
    source = region(
        "arg0_1, arg1_1 = args",
        "args.clear()",
        "assert_size_stride(arg0_1, (2, 2), (2, 1), 'input')",
        "buf0 = empty_strided_cpu((2, 2), (2, 1), torch.float32)",
        "extern_kernels.mm(arg0_1, reinterpret_tensor(arg1_1, (2, 2), (1, 2), 0), out=buf0)",
        "del arg0_1",
        "buf1 = buf0; del buf0  # reuse",
        "buf2 = torch.ops.aten.topk.default(buf1, 1)",
        "buf3 = buf2[0]",
        "buf4 = buf2[1]",
        "del buf2",
        "del buf1",
        "return (reinterpret_tensor(buf3, (2, ), (1, ), 0), buf4, )",
    )
    found = region_instructions(source, namespace(), (5, 6), (8, 9))
    assert found == (
        Expect(5, (2, 2), (2, 1)),
        Allocate(FIRST, (2, 2), (2, 1), "float32"),
        Window(SECOND, 6, (2, 2), (1, 2), 0),
        CallOperator(Call("aten::mm.out", (Ref(5), Ref(SECOND)), (("out", Ref(FIRST)),), (-1,))),
        Release((SECOND,)),
        CallOperator(Call("aten::topk.default", (Ref(FIRST), 1), (), (THIRD, 9))),
        Release((FIRST,)),
        Window(8, THIRD, (2,), (1,), 0),
        Release((THIRD,)),
    )
    slots = {5: torch.rand(2, 2), 6: torch.rand(2, 2)}
    interpret(found, slots)
    values, places = (slots[5] @ slots[6].T).topk(1)
    assert torch.equal(slots[8], values.flatten())
    assert torch.equal(slots[9], places)
    assert slots.keys() == {5, 6, 8, 9}
    with pytest.raises(Unexpected):
        interpret(found, {5: torch.rand(4, 4), 6: torch.rand(2, 2)})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("buf0 = empty_strided_cuda((2, ), (1, ), torch.float32)", "no registered operator"),
        ("buf0 = empty_strided_cpu((s0, ), (1, ), torch.float32)", "shapes must be static"),
        ("buf0 = torch.ops.aten.relu.default(_frozen_param0)", "no literal"),
        ("buf0 = torch.ops.aten.relu.default(slots[0] + 1)", "no literal"),
        ("buf0 = torch.ops.aten.nothing.default(slots[0])", "no registered operator"),
        ("buf0 = aten.add(slots[0], 1)", "overloads"),
        ("buf0 = torch.ops.aten.relu.default(slots[0], 1)", "other arguments"),
        ("buf0 = torch.ops.aten.relu.default()", "other arguments"),
        ("buf0 = torch.ops.aten.add.Tensor(slots[0], other=1, *slots[1])", "no literal"),
        ("buf0 = torch.ops.aten.topk.default(slots[0], 2)", "does not make one tensor"),
        ("buf0 = torch.ops.aten.size.int(slots[0], 0)", "does not make one tensor"),
        ("extern_kernels.conv1x1_via_mm(slots[0], slots[1], out=slots[2])", "no operator"),
        ("extern_kernels.nothing(slots[0], out=slots[1])", "no operator"),
        ("for item in slots: pass", "no form"),
        ("buf0 = slots[0].view(2)", "no registered operator"),
        ("slots[1] = buf7", "no tensor"),
        ("del buf7", "deleted before"),
        ("buf0, buf1 = slots[0], slots[1]", "no form"),
        ("return (buf0, )", "returns 1 tensors"),
        ("assert_size_stride(slots[0], (2, ))", "no form"),
        ("assert_size_stride_grouped((slots[0], slots[1]), ((2, ), (2, )), ((1, ), ), 'input')", "no form"),
        ("assert_size_stride_grouped((slots[0], slots[1]), ((2, ), (s0, )), ((1, ), (1, )), 'input')", "shapes must be static"),
        ("assert_tensor_metadata(slots[0], (2, ), (1, ), 'input', None)", "not a dtype"),
        ("assert_tensor_metadata(slots[0], (2, ), (1, ), torch.float32)", "no form"),
    ],
)
def test_what_is_not_known_is_refused(line: str, why: str) -> None:
    with pytest.raises(Unrecognised, match=why):
        unit(line)


def test_kernels_that_cannot_be_called_with_addresses_are_refused() -> None:
    def kernel(parameters: tuple[str, ...], signature: str, body: str = "") -> dict[str, Kernel]:
        return {"cpp_0": Kernel(Kind.CPP, parameters, frozenset(), f'extern "C" void kernel({signature})\n{{{body}}}')}

    pointers = ("const float*", "float*")
    for kernels, why in (
        (kernel(pointers, "const float* in_ptr0,\n  float* out_ptr0"), "not bound"),
        (kernel(pointers, "const float* in_ptr0, int64_t ks0"), "takes"),
        (kernel(("const float*", "int64_t"), "const float* in_ptr0, int64_t ks0"), "numbers beside pointers"),
        (kernel(pointers, "const float* in_ptr0, float* out_ptr0", "auto x = mod(a, b);"), "divides integers"),
        (kernel(("const float*",), "const float* in_ptr0"), "C\\+\\+ kernel of 2 arguments"),
    ):
        with pytest.raises(Unrecognised, match=why):
            unit("cpp_0(slots[0], slots[1])", kernels=kernels)


class Net(nn.Module):
    """A packed convolution, packed products, attention, a concatenation of windows, and C++ that reduces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 8)
        self.head = nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.relu(self.conv(x)).flatten(2).transpose(1, 2)
        query, key = (part(made).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.q, self.k))
        mixed = functional.scaled_dot_product_attention(query, key, query).transpose(1, 2).flatten(2)
        return torch.softmax(self.head(torch.cat([torch.tanh(mixed), made.cumsum(1)], -1)), -1)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiling(tmp_path_factory.mktemp("cache"), threads=1):
        yield


@pytest.fixture(scope="module", params=[Lowering.INDUCTOR, Lowering.MAX_AUTOTUNE])
def whole(request: pytest.FixtureRequest) -> BoundProgram:
    """The net, compiled as a whole in either mode."""
    program, constants = build_program(draft_of(Net().eval(), (torch.randn(2, 3, 8, 8),)), "aten")
    recording = record(program, constants, CPU, Mode(request.param))
    assert isinstance(recording, Recording), recording.reason
    return bound_of(recording, program, constants, CPU)


@needs_compiler
def test_a_whole_model_does_the_same_as_its_instructions(whole: BoundProgram) -> None:
    known = [items for kernel in whole.kernels if (items := instructions_of(kernel)) is not None]
    assert len(known) == len(whole.kernels)
    assert any(isinstance(item, RunKernel) for items in known for item in items)
    for seed in range(2):
        inputs = random_inputs(whole.program, seed, CPU)
        wanted = whole.slots_after(inputs, keep=range(len(whole.constants)))
        got = slots_after(whole, known, inputs)
        assert min(got) >= 0, "an operator left tensors of its own behind"
        for value, tensor in enumerate(wanted):
            if tensor is not None and tensor.layout is torch.strided:
                assert tensor.stride() == got[value].stride()
                assert torch.equal(tensor, got[value])


@needs_compiler
@pytest.mark.usefixtures("native")
def test_a_whole_model_runs_without_the_interpreter(whole: BoundProgram) -> None:
    graph = whole.program.graph
    for schedule in (sequential(graph), random_schedule(graph, lanes=2, seed=0)):
        executor = LaneExecutor(whole, make_plan(graph, schedule))
        assert executor.engine is Engine.NATIVE
        for seed in range(2):
            inputs = random_inputs(whole.program, seed, CPU)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(executor.run(inputs), whole.run(inputs), strict=True))
