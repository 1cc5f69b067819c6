"""Reading generated code, on samples in the style of each device and version: no compiler and no GPU needed."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from autosched.core.graph import EdgeKind
from autosched.core.program import Many, Program
from autosched.runtime.inductor import bind as inductor_bind
from autosched.runtime.inductor.bind import Recording, bound_of, record
from autosched.runtime.inductor.common import Compiled, Refused
from autosched.runtime.inductor.source import Kind, Unrecognised, read_module
from tests.conformance.graphs import Recorder
from tests.conformance.programs import assert_same_in_any_order

_TRITON = """
{name} = async_compile.triton('{name}', '''
import triton
import triton.language as tl
from torch._inductor.runtime import triton_heuristics

@triton.jit
def _triton_helper_fn_add0(arg0_0, arg1_0):
    return arg0_0 + arg1_0

@triton_heuristics.pointwise(
    size_hints={{'x': 32}},
    filename=__file__,
    triton_meta={{'signature': {{'in_ptr0': '*fp32'}}, 'device': DeviceProperties(type='cuda', index=0), 'constants': {{}}}},
    inductor_meta={{'grid_type': 'Grid1D', 'kernel_name': '{name}', 'mutated_arg_names': {changed}, 'no_x_dim': False}},
    min_elem_per_thread=0
)
@triton.jit
def {name}({parameters}, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')
"""

_KERNELS = (
    ("triton_poi_fused_relu_0", "in_ptr0, out_ptr0", []),
    ("triton_poi_fused_cat_1", "in_ptr0, out_ptr0", []),
    ("triton_poi_fused_cat_2", "in_ptr0, out_ptr0", []),
    ("triton_poi_fused_add_3", "in_out_ptr0, in_ptr0", ["in_out_ptr0"]),
    ("triton_red_fused_sum_4", "in_ptr0, ws_ptr, out_ptr0", []),
)

# Four arguments; a concatenation whose three windows come from three branches; a buffer changed in place; a workspace; two results.
_BODY = """
def call(args):
    arg0_1, arg1_1, arg2_1, arg3_1 = args
    args.clear()
    {inputs}
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        {align}
        buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        # Topologically Sorted Source Nodes: [relu], Original ATen: [aten.relu]
        {stream} = get_raw_stream(0)
        triton_poi_fused_relu_0.run(arg0_1, buf0, 32, stream={stream})
        buf1 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        extern_kernels.mm(buf0, arg1_1, out=buf1)
        buf2 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        extern_kernels.mm(buf0, reinterpret_tensor(arg2_1, (8, 8), (1, 8), 0), out=buf2)
        buf6 = empty_strided_cuda((4, 24), (24, 1), torch.float32)
        buf3 = reinterpret_tensor(buf6, (4, 8), (24, 1), 0)  # alias
        triton_poi_fused_cat_1.run(buf1, buf3, 32, stream={stream})
        buf4 = reinterpret_tensor(buf6, (4, 8), (24, 1), 8)  # alias
        triton_poi_fused_cat_2.run(buf2, buf4, 32, stream={stream})
        buf5 = reinterpret_tensor(buf6, (4, 8), (24, 1), 16)  # alias
        extern_kernels.mm(arg0_1, arg1_1, out=buf5)
        del buf3
        del buf4
        del buf5
        buf7 = torch.ops.aten.topk.default(buf6, 3, -1, True, True)
        buf8 = buf7[0]
        {result}
        buf9 = buf7[1]
        del buf7
        buf10 = buf1; del buf1  # reuse
        triton_poi_fused_add_3.run(buf10, buf2, 32, stream={stream})
        workspace_0 = empty_strided_cuda((16, ), (1, ), torch.uint8)
        workspace_0.zero_()
        buf11 = empty_strided_cuda((4, ), (1, ), torch.float32)
        triton_red_fused_sum_4.run(buf10, workspace_0, buf11, 4, stream={stream})
        del workspace_0
        aten.index_put_(buf11, [arg3_1], reinterpret_tensor(buf2, (4, ), (1, ), 0), False)
    return (buf8, buf9, buf10, reinterpret_tensor(buf6, (4, 8), (24, 1), 8), buf11, )
"""


# Of the inputs, and of an operator's result.
_ASSERTED = {
    "2.11": ("assert_size_stride(arg0_1, (4, 8), (8, 1))", "assert_size_stride(buf8, (4, 3), (3, 1))"),
    "2.13": ("assert_size_stride(arg0_1, (4, 8), (8, 1), 'input')", "assert_size_stride(buf8, (4, 3), (3, 1), 'topk')"),
    "2.15": (
        "assert_size_stride_grouped((arg0_1, arg1_1), ((4, 8), (8, 8)), ((8, 1), (8, 1)), 'input')",
        "assert_tensor_metadata(buf8, (4, 3), (3, 1), torch.float32, 'topk')",
    ),
}


def _cuda_sample(version: str) -> str:
    kernels = "".join(_TRITON.format(name=name, parameters=parameters, changed=changed) for name, parameters, changed in _KERNELS)
    old = version == "2.11"
    align = "pass" if old else "arg0_1 = copy_if_misaligned(arg0_1)"
    inputs, result = _ASSERTED[version]
    body = _BODY.format(stream="stream0" if old else "raw_stream0", inputs=inputs, result=result, align=align)
    return "# AOT ID: ['0_inference']\nasync_compile = AsyncCompile()\n" + kernels + "\nasync_compile.wait(globals())\n" + body


class _Triton:
    """A stand-in with the calling convention of a Triton kernel."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def run(self, *args: Any, stream: int) -> None:
        assert stream == 7
        self._run(*args)


def _sum(given: torch.Tensor, workspace: torch.Tensor, made: torch.Tensor, _: int) -> None:
    assert not workspace.any()
    workspace.fill_(1)
    made.copy_(given.sum(1))


def _namespace(asked: list[int]) -> dict[str, Any]:
    """What the generated module would hold on a GPU, on the CPU."""

    class Extern:
        mm = staticmethod(torch.mm)

    def get_raw_stream(index: int) -> int:
        asked.append(index)
        return 7

    def reinterpret(base: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
        return base.as_strided(size, stride, base.storage_offset() + offset)

    return {
        "torch": torch,
        "aten": torch.ops.aten,
        "extern_kernels": Extern,
        "get_raw_stream": get_raw_stream,
        "reinterpret_tensor": reinterpret,
        "empty_strided_cuda": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
        "triton_poi_fused_relu_0": _Triton(lambda given, made, _: made.copy_(given.relu())),
        "triton_poi_fused_cat_1": _Triton(lambda given, made, _: made.copy_(given + 1)),
        "triton_poi_fused_cat_2": _Triton(lambda given, made, _: made.copy_(given + 2)),
        "triton_poi_fused_add_3": _Triton(lambda made, given, _: made.add_(given)),
        "triton_red_fused_sum_4": _Triton(_sum),
    }


def _source_program() -> Program:
    """Any program with the inputs of the sample and as many outputs, the fourth a part of a wider one."""
    recorder = Recorder()
    generator = torch.Generator().manual_seed(3)
    given = recorder.input(torch.randn(4, 8, generator=generator))
    weights = [recorder.input(torch.randn(8, 8, generator=generator)) for _ in range(2)]
    index = recorder.input(torch.tensor([0, 2, 1, 3]))
    made = [recorder.run("aten::relu.default", given) for _ in range(4)]
    made.insert(3, recorder.run("aten::slice.Tensor", recorder.run("aten::repeat.default", given, Many((1, 3))), 1, 8, 16))
    recorder.run("aten::mm.default", given, weights[0])
    recorder.run("aten::mm.default", given, weights[1])
    recorder.run("aten::neg.default", index)
    return recorder.build([*made, given])


def _record(monkeypatch: pytest.MonkeyPatch, source: str, asked: list[int] | None = None) -> tuple[Recording | Refused, Program]:
    program = _source_program()
    compiled = Compiled(source, _namespace([] if asked is None else asked), (), program.graph.inputs)
    monkeypatch.setattr(inductor_bind, "compile_whole", lambda *given, **options: compiled)
    return record(program, {}, "cpu"), program


@pytest.mark.parametrize("version", list(_ASSERTED))
def test_code_for_a_gpu_is_taken_apart(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    recording, _ = _record(monkeypatch, _cuda_sample(version), asked)
    assert isinstance(recording, Recording), recording
    graph = recording.program.graph
    names = [operator.name for operator in graph.operators]
    place = {name: index for index, name in enumerate(names)}
    assert names == [
        "triton_poi_fused_relu_0", "mm", "mm.1", "allocate_buf6", "triton_poi_fused_cat_1", "triton_poi_fused_cat_2", "mm.2", "topk",
        "triton_poi_fused_add_3", "zero_", "triton_red_fused_sum_4", "index_put_", "view",
    ]  # fmt: skip
    # The three branches write windows of one buffer and stay independent; what reads the buffer waits for all three.
    windows = [place["triton_poi_fused_cat_1"], place["triton_poi_fused_cat_2"], place["mm.2"]]
    assert all(graph.independent(a, b) for a in windows for b in windows if a != b)
    assert set(graph.predecessors[place["topk"]]) >= set(windows)
    # A view of one window waits for its writer alone.
    assert place["triton_poi_fused_cat_2"] in graph.predecessors[place["view"]]
    assert place["triton_poi_fused_cat_1"] not in graph.predecessors[place["view"]]
    # In place: after whoever reads the old contents.
    kinds = {(edge.before, edge.after): edge.kind for edge in graph.edges}
    assert kinds[place["triton_poi_fused_cat_1"], place["triton_poi_fused_add_3"]] is EdgeKind.MUTATION
    assert kinds[place["triton_red_fused_sum_4"], place["index_put_"]] is EdgeKind.MUTATION
    # Each Triton launch asks for the stream that is current when it runs: twice here, once for the shapes and once for the audit.
    assert asked == [0] * 2 * sum(name.startswith("triton") for name in names)


@pytest.mark.parametrize("version", list(_ASSERTED))
def test_any_legal_order_computes_the_same(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, source = _record(monkeypatch, _cuda_sample(version))
    assert isinstance(recording, Recording)
    bound = bound_of(recording, source, {}, torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    x, a, b = (torch.randn(size, generator=generator) for size in ((4, 8), (8, 8), (8, 8)))
    inputs = [x, a, b, torch.tensor([3, 1, 0, 2])]
    expected = bound.run(inputs)
    wide = torch.cat([x.relu() @ a + 1, x.relu() @ b.t() + 2, x @ a], 1)
    torch.testing.assert_close(expected[0], wide.topk(3)[0])
    torch.testing.assert_close(expected[3], wide[:, 8:16])
    total = x.relu() @ a + x.relu() @ b.t()
    torch.testing.assert_close(expected[2], total)
    assert_same_in_any_order(bound, recording.program.graph, inputs, expected, random.Random(8), 40)


_CPP = """
cpp_fused_add_0 = async_compile.cpp_pybinding(['const float*', 'float*', 'float*', 'const int64_t'], r'''
#pragma omp parallel num_threads({threads})
extern "C" void kernel(const float* in_ptr0, float* out_ptr0, float* out_ptr1, const int64_t ks0) {{}}
''')

async_compile.wait(globals())
del async_compile

def call(args):
    arg0_1, = args
    args.clear()
    buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
    buf1 = empty_strided_cpu((4, ), (1, ), torch.float32)
    cpp_fused_add_0(arg0_1, buf0, buf1, 8)
    buf2 = extern_kernels.convolution(buf0, _frozen_param3, _frozen_param4, stride=(1, 1), groups=1)
    {extra}
    return (buf2, )
"""


def test_code_for_a_cpu_is_read() -> None:
    module = read_module(_CPP.format(threads=2, extra="buf3 = buf2"))
    assert module.arguments == ["arg0_1"]
    assert [launch.kind for launch in module.launches] == [Kind.CPP, Kind.EXTERN]
    assert module.kernels["cpp_fused_add_0"].parameters == ("const float*", "float*", "float*", "const int64_t")
    assert module.view(module.returned[0], frozenset()).base == "buf2"


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ("for item in args: pass", "line 17"),
        ("if arg0_1: pass", "line 17"),
        ("u0 = buf2.item()", "line 17"),
        ("something_new(buf2)", "something_new"),
        ("buf2 = empty_strided_cpu((4, ), (1, ), torch.float32)", "assigned twice"),
        ("with torch.cuda.stream(stream1): pass", "line 17"),
        ("arg0_1 = copy_if_misaligned(arg1_1)", "assigned twice"),
        ("return (buf0, )", "after the return"),
        ("buf9 = [buf0 for buf0 in args]", "line 17"),
    ],
)
def test_unknown_forms_are_named(extra: str, why: str) -> None:
    with pytest.raises(Unrecognised, match=why):
        read_module(_CPP.format(threads=1, extra=extra))


_APART = """
def product_1(args):
    product_1_arg0_1, product_1_arg1_1 = args
    args.clear()
    assert_size_stride(product_1_arg0_1, (4, 8), (8, 1))
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        product_1_buf0 = empty_strided_cuda((2, 4, 16), (64, 16, 1), torch.float32)
        extern_kernels.bmm(reinterpret_tensor(product_1_arg0_1, (2, 4, 4), (4, 8, 1), 0), product_1_arg1_1, out=product_1_buf0)
        del product_1_arg0_1
    return (reinterpret_tensor(product_1_buf0, (4, 16), (16, 1), 64), )

def call(args):
    arg0_1, arg1_1 = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        extern_kernels.mm(arg0_1, arg0_1, out=buf0)

        # subgraph: product_1
        product_1_args = [buf0, arg1_1]
        {results} = product_1(product_1_args)
        del buf0
    return (buf1, )
"""


def test_a_function_beside_the_code_is_read_where_it_is_called() -> None:
    module = read_module(_APART.format(results="(buf1,)"))
    assert module.arguments == ["arg0_1", "arg1_1"]
    assert [launch.callee for launch in module.launches] == ["extern_kernels.mm", "extern_kernels.bmm"]
    bmm = module.launches[1].call
    assert [(view.base, view.stride) for view in module.tensors(bmm.args[0], frozenset())] == [("buf0", (4, 8, 1))]
    assert [view.base for view in module.tensors(bmm.args[1], frozenset())] == ["arg1_1"]
    returned = module.view(module.returned[0], frozenset())
    assert (returned.base, returned.size, returned.offset) == ("product_1_buf0", (4, 16), 64)


def test_a_function_that_returns_something_else_is_not_read() -> None:
    with pytest.raises(Unrecognised, match="product_1_args"):
        read_module(_APART.format(results="(buf1, buf2)"))


@pytest.mark.parametrize("source", ["def call(:", "x = 1", "class Runner:\n    pass\n"])
def test_what_is_no_generated_module_is_refused(source: str) -> None:
    with pytest.raises(Unrecognised):
        read_module(source)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (("extern_kernels.mm(buf0, arg1_1, out=buf1)", "brand_new_runtime.mm(buf0, arg1_1, out=buf1)"), "not understood"),
        (("torch.ops.aten.topk.default", "torch.ops.aten.no_such_operator.default"), "not understood"),
        (("_DeviceGuard(0)", "_DeviceGuard(1)"), "devices"),
        (("triton_poi_fused_relu_0.run(arg0_1, buf0", "triton_poi_fused_relu_0.run(buf0, arg0_1"), "arg0_1 is overwritten"),
        (("args.clear()", "args.clear(); s0 = 4; buf99 = empty_strided_cuda((s0, ), (1, ), torch.float32)"), "not understood"),
        (("return (buf8, buf9,", "return (buf8,"), "returns 4"),
    ],
)
def test_what_is_not_understood_is_a_reason(edit: tuple[str, str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _cuda_sample("2.13")
    assert edit[0] in source
    recording, _ = _record(monkeypatch, source.replace(*edit))
    assert isinstance(recording, Refused)
    assert why in recording.reason


def test_memory_that_the_code_lies_about_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    program = _source_program()
    lying = _namespace([])
    lying["triton_poi_fused_cat_1"] = _Triton(lambda given, made, _: given.add_(1))
    compiled = Compiled(_cuda_sample("2.13"), lying, (), program.graph.inputs)
    monkeypatch.setattr(inductor_bind, "compile_whole", lambda *given, **options: compiled)
    recording = record(program, {}, "cpu")
    assert isinstance(recording, Refused)
    assert "in place" in recording.reason


def test_another_number_of_threads_is_the_same_graph() -> None:
    from autosched.runtime.inductor.units import make_units

    made = []
    for threads in (1, 2):
        module = read_module(_CPP.format(threads=threads, extra=""))
        made.append(make_units(module, ("_frozen_param3", "_frozen_param4")).units)
    assert [dataclasses.asdict(unit) for unit in made[0]] == [dataclasses.asdict(unit) for unit in made[1]]
