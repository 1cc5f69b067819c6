"""Code that Inductor 2.11, 2.13 and 2.15 wrote for an H200 (``generated/``), taken apart and run on a CPU: kernels are stand-ins."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import library
from torch.nn import functional

from autosched.capture import rewrite
from autosched.capture.export import Captured, capture
from autosched.core.errors import ArtifactCorrupt
from autosched.core.graph import EdgeKind
from autosched.core.in_place import chains_of, is_copy
from autosched.core.schedule import sequential
from autosched.core.variants import Variant
from autosched.device.cuda.screen import require_capturable
from autosched.runtime.in_place import granted, in_place
from autosched.runtime.inductor import bind as inductor_bind
from autosched.runtime.inductor.bind import Recording, bound_of, record, source_of
from autosched.runtime.inductor.common import Compiled, Refused
from autosched.runtime.inductor.source import Kind, Module, read_module
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.numerics import compare
from autosched.runtime.plan import make_plan
from autosched.runtime.regions import compile as region_compile
from autosched.runtime.regions.library import RegionLibrary
from autosched.runtime.regions.pieces import offered_variants
from tests.conformance.graphs import random_placement
from tests.conformance.programs import assert_same_in_any_order
from tests.conformance.stateful_programs import random_run_order, run_in
from tests.runtime.inductor.generated import nets

_VERSIONS = ("2.11", "2.13", "2.15")
_TEXTS = {
    f"{path.name.partition('.')[0]}-{version}": path
    for version in _VERSIONS
    for path in (Path(__file__).parent / "generated").glob(f"*.torch{version}.*.py.txt")
}
_WHOLE = sorted(name for name in _TEXTS if not name.startswith("epilogue"))
_STREAM = 7
_KNOWN_PARAMETERS = ("in_ptr", "out_ptr", "in_out_ptr", "arg_", "ws_ptr", "xnumel", "ynumel", "r0_numel", "XBLOCK", "YBLOCK", "R0_BLOCK")


class _Kernel:
    """Computes with PyTorch what a Triton kernel of one of the texts computes; takes the same arguments."""

    def __init__(self, body: Callable[..., None]) -> None:
        self._body = body

    def run(self, *args: Any, stream: int) -> None:
        assert stream == _STREAM
        self._body(*(item for item in args if isinstance(item, torch.Tensor)))


def _prepared(x: torch.Tensor, pooled: torch.Tensor, *copies: torch.Tensor) -> None:
    pooled.copy_(functional.max_pool2d(x, 3, 1, 1))
    for made in copies:
        made.copy_(x)


def _joined(a: torch.Tensor, bias_a: torch.Tensor, b: torch.Tensor, bias_b: torch.Tensor, c: torch.Tensor, *made: torch.Tensor) -> None:
    parts = [(a + bias_a.view(1, -1, 1, 1)).relu(), (b + bias_b.view(1, -1, 1, 1)).relu(), c]
    made[0].copy_(torch.cat(parts, 1))
    made[1].copy_(made[0].mean((2, 3)))


def _normed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, made: torch.Tensor) -> None:
    made.copy_(functional.layer_norm(x, (32,), weight, bias))


def _added_and_normed(x: torch.Tensor, bias: torch.Tensor, y: torch.Tensor, *rest: torch.Tensor) -> None:
    _normed(x + bias + y.view_as(x), *rest)


def _biased_gelu(bias: torch.Tensor, x: torch.Tensor, made: torch.Tensor) -> None:
    made.copy_(functional.gelu(x + bias).view_as(made))


def _added(x: torch.Tensor, a: torch.Tensor, y: torch.Tensor, b: torch.Tensor, z: torch.Tensor, made: torch.Tensor) -> None:
    made.copy_(x + (a + y + b + z).view_as(x))


def _scanned(given: torch.Tensor, made: torch.Tensor, workspace: torch.Tensor) -> None:
    assert not workspace.any()
    workspace.fill_(1)
    made.copy_(given.cumsum(0))


def _sorted(given: torch.Tensor, values: torch.Tensor, order: torch.Tensor) -> None:
    found, places = given[:64].sort(stable=True)
    values.copy_(found + 1)
    order.copy_(places)


def _pointwise(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, made: torch.Tensor) -> None:
    """A convolution of one by one, as a product of rows."""
    made.view(2, 8, 8, 8).copy_(functional.conv2d(x, weight, bias).permute(0, 2, 3, 1))


def _joined_after_bias(a: torch.Tensor, b: torch.Tensor, bias_b: torch.Tensor, c: torch.Tensor, *made: torch.Tensor) -> None:
    _joined(a.view(2, 8, 8, 8).permute(0, 3, 1, 2), torch.zeros(8), b, bias_b, c, *made)


def _combined(x: torch.Tensor, weight: torch.Tensor, pooled: torch.Tensor, *copies: torch.Tensor) -> None:
    """Two kernels in one launch."""
    _prepared(x, pooled, *copies[:2])
    copies[2].copy_(weight)


def _wide(x: torch.Tensor, weight: torch.Tensor, made: torch.Tensor) -> None:
    made.copy_(functional.conv2d(x, weight, padding=1))


def _placed(place: torch.Tensor, row: torch.Tensor, made: torch.Tensor) -> None:
    made.index_copy_(0, place.reshape(1), row)


def _softmax(given: torch.Tensor, made: torch.Tensor) -> None:
    made.copy_(given.softmax(-1))


def _product(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, made: torch.Tensor) -> None:
    made.copy_(functional.linear(x, weight, bias))


_STAND_INS: Mapping[str, Callable[..., Any]] = {
    "triton_poi_fused_convolution_max_pool2d_with_indices_0": _prepared,
    "triton_poi_fused_convolution_1": lambda given, made: made.copy_(given),
    "triton_per_fused_cat_convolution_mean_relu_2": _joined,
    "triton_per_fused_native_layer_norm_0": _normed,
    "triton_per_fused_add_addmm_native_layer_norm_view_1": _added_and_normed,
    "triton_per_fused__unsafe_view_add_addmm_native_layer_norm_1": _added_and_normed,
    "triton_poi_fused_addmm_gelu_view_2": _biased_gelu,
    "triton_poi_fused__unsafe_view_addmm_gelu_2": _biased_gelu,
    "triton_poi_fused_add_addmm_view_3": _added,
    "triton_poi_fused__unsafe_view_add_addmm_3": _added,
    "triton_red_fused_mul_sum_0": lambda given, made: made.copy_((given * given).view(16, -1).sum(1)),
    "triton_per_fused_mul_sum_1": lambda given, made: made.copy_(given.sum()),
    "triton_poi_fused_embedding_index_add_2": lambda given, made: made.copy_(given),
    "triton_poi_fused_embedding_index_add_3": lambda index, table, made: made.index_add_(0, index, table[index]),
    "triton_per_fused__softmax_exp_prepare_softmax_online_sub_4": _softmax,
    "triton_per_fused__softmax_prepare_softmax_online_4": _softmax,
    "triton_spl_fused_cumsum_5": _scanned,
    "triton_per_fused_add_slice_sort_6": _sorted,
    # What is changed: a cache, a state, a counter.
    "triton_poi_fused_index_copy_view_0": _placed,
    "triton_per_fused__softmax_prepare_softmax_online_1": _softmax,
    "triton_per_fused__softmax_exp_prepare_softmax_online_sub_1": _softmax,
    "triton_poi_fused_mul_2": lambda given, made: made.copy_(given * 0.5),
    "triton_poi_fused_copy__3": lambda given, made: made.copy_(given),
    "triton_poi_fused_add_copy__4": lambda given, made: made.copy_(given + 1),
    # max_autotune: templates; and with combined kernels.
    "triton_tem_fused_convolution_1": _pointwise,
    "triton_poi_fused_convolution_2": lambda given, made: made.copy_(given),
    "triton_tem_fused_convolution_3": _wide,
    "triton_per_fused_cat_convolution_mean_relu_4": _joined_after_bias,
    "triton_tem_fused_addmm_mean_t_5": _product,
    "triton_poi_fused_0": _combined,
    "triton_tem_fused_convolution_2": _wide,
    "triton_per_fused_cat_convolution_mean_relu_3": _joined_after_bias,
    "triton_tem_fused_addmm_mean_t_4": _product,
    "triton_tem_fused_addmm_gelu_t_0": lambda x, weight, bias, made: made.copy_(functional.gelu(functional.linear(x, weight, bias))),
}


def _namespace(module: Module, asked: list[int]) -> dict[str, Any]:
    """The globals of a generated module, allocating on the CPU."""
    from torch._inductor.select_algorithm import extern_kernels

    def get_raw_stream(index: int) -> int:
        asked.append(index)
        return _STREAM

    guards = torch._C._dynamo.guards
    return {
        "torch": torch,
        "aten": torch.ops.aten,
        "extern_kernels": extern_kernels,
        "get_raw_stream": get_raw_stream,
        "reinterpret_tensor": guards._reinterpret_tensor,
        "empty_strided_cuda": guards._empty_strided_cpu,
        "empty_strided_cpu": guards._empty_strided_cpu,
        **{name: _Kernel(_STAND_INS[name]) for name in module.kernels},
    }


@pytest.fixture
def attention() -> Iterator[None]:
    """The operator that attention becomes on a GPU, on the CPU."""

    def attend(query: Any, key: Any, value: Any, bias: Any, statistics: bool, *rest: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        # In the layout of the GPU's kernel: heads inside.
        made = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2).contiguous().transpose(1, 2)
        return made, made.new_empty(0), made.new_empty((), dtype=torch.int64), made.new_empty((), dtype=torch.int64)

    with library._scoped_library("aten", "IMPL") as implementations:
        implementations.impl("_scaled_dot_product_efficient_attention", attend, "CPU")
        yield


def _taken_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Captured, Recording, list[int]]:
    model, args = getattr(nets, name.partition("-")[0].partition("_")[0])()
    # The texts are of programs in row-major order.
    monkeypatch.setattr(rewrite, "PASSES", tuple(item for item in rewrite.PASSES if item.name != "channels_last"))
    captured = capture(model, args, target="cuda")
    source = _TEXTS[name].read_text()
    bound = bind(captured.program, captured.constants, "cpu")
    graph = captured.program.graph
    read = {value for operator in graph.operators for call in operator.calls for value in call.reads()} | set(graph.outputs)
    constants = [value.index for value in graph.values if value.index in read and bound.constants[value.index] is not None]
    asked: list[int] = []
    compiled = Compiled(source, _namespace(read_module(source), asked), (), (*constants, *graph.inputs))
    monkeypatch.setattr(inductor_bind, "compile_whole", lambda *given, **options: compiled)
    found = record(captured.program, captured.constants, "cpu")
    assert isinstance(found, Recording), found.reason
    return captured, found, asked


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize("name", _WHOLE)
def test_the_code_computes_what_the_model_does_in_any_legal_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, found, _ = _taken_apart(name, monkeypatch)
    inputs = random_inputs(captured.program, 11)
    wanted = bind(captured.program, captured.constants, "cpu").run(inputs)
    bound = bound_of(found, captured.program, captured.constants, torch.device("cpu"))
    first = bound.run(inputs)
    for mine, theirs in zip(first, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert_same_in_any_order(bound, found.program.graph, inputs, first, random.Random(9), 20)


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize("name", _WHOLE)
def test_every_kernel_is_given_the_stream_of_the_moment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, found, asked = _taken_apart(name, monkeypatch)
    graph = found.program.graph
    bound = bound_of(found, captured.program, captured.constants, torch.device("cpu"))
    inputs = random_inputs(captured.program, 12)
    slots = bound.new_slots(inputs)
    for operator in graph.operators:
        asked.clear()
        with torch.inference_mode():
            bound.kernels[operator.index](slots)
        assert asked == ([0] if operator.name.startswith("triton_") else [])


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize("version", _VERSIONS)
@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("block", ["mm", "mm.1", "mm.2"]),
        # The last one adds a matrix.
        ("cache", ["mm", "mm.1", "addmm.2"]),
        ("branches", []),
        ("branches_max_autotune", []),
    ],
)
def test_products_that_pytorch_gives_to_cublas_may_go_to_cublaslt(
    name: str, products: list[str], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, found, _ = _taken_apart(f"{name}-{version}", monkeypatch)
    program, graph = found.program, found.program.graph
    offered = offered_variants(program, "cuda")
    assert [operator.name for operator, row in zip(graph.operators, offered, strict=True) if row != (Variant.CALLS,)] == products
    assert {row for row in offered if row != (Variant.CALLS,)} <= {(Variant.CALLS, Variant.CUBLASLT)}
    assert not any(Variant.CUBLASLT in row for row in offered_variants(program, "cpu"))
    asked: list[str] = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda library="": asked.append(library) or "default")
    bound = bound_of(found, captured.program, captured.constants, torch.device("cpu"))
    library = RegionLibrary(program, torch.device("cuda:0"), "scope", bound=bound.kernels)
    schedule = dataclasses.replace(sequential(graph), variant=tuple(int(row[-1]) for row in offered))
    changed = library.apply(bound, make_plan(graph, schedule))
    assert library.refusals == ()
    inputs = random_inputs(captured.program, 14)
    asked.clear()
    wanted = bound.run(inputs)
    assert asked == []
    assert compare(changed.run(inputs), wanted).bitwise
    assert asked.count("cublaslt") == len(products)


@pytest.mark.parametrize("version", _VERSIONS)
@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("branches_max_autotune", ["triton_poi", "triton_tem", "triton_poi", "triton_tem", "triton_per", "triton_tem", "topk"]),
        ("branches_max_autotune_combo", ["triton_poi", "triton_tem", "triton_tem", "triton_per", "triton_tem", "topk"]),
    ],
)
def test_templates_and_combined_kernels_are_launches_like_others(
    name: str, launches: list[str], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found, _ = _taken_apart(f"{name}-{version}", monkeypatch)
    graph = found.program.graph
    assert ["_".join(operator.name.split("_")[:2]) for operator in graph.operators] == launches
    first, second = [operator.index for operator in graph.operators if operator.name.startswith("triton_tem_fused_convolution")]
    assert graph.independent(first, second)
    # Every launch of several kernels makes what each of them makes.
    assert len(graph.operators[0].writes) == (4 if name.endswith("combo") else 3)


@pytest.mark.parametrize("version", _VERSIONS)
def test_branches_stay_apart_and_a_result_in_two_parts_is_one_launch(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, found, _ = _taken_apart(f"branches-{version}", monkeypatch)
    graph = found.program.graph
    place = {operator.name: operator.index for operator in graph.operators}
    assert list(place) == [
        "triton_poi_fused_convolution_max_pool2d_with_indices_0", "convolution", "triton_poi_fused_convolution_1", "convolution.1",
        "triton_per_fused_cat_convolution_mean_relu_2", "addmm", "topk",
    ]  # fmt: skip
    assert graph.independent(place["convolution"], place["convolution.1"])
    assert graph.independent(place["convolution"], place["triton_poi_fused_convolution_1"])
    assert len(graph.operators[place["topk"]].writes) == 2


@pytest.mark.parametrize("version", _VERSIONS)
def test_what_is_changed_in_place_is_changed_in_order(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, found, _ = _taken_apart(f"odds-{version}", monkeypatch)
    graph = found.program.graph
    place = {operator.name: operator.index for operator in graph.operators}
    kinds = {(edge.before, edge.after): edge.kind for edge in graph.edges}
    copied, added = place["triton_poi_fused_embedding_index_add_2"], place["triton_poi_fused_embedding_index_add_3"]
    # Atomic additions go into what was copied; the scan finds its workspace zeroed.
    assert graph.operators[added].mutates == graph.operators[copied].writes
    assert (copied, added) in kinds
    assert place["zero_"] in graph.predecessors[place["triton_spl_fused_cumsum_5"]]
    (softmax,) = (index for name, index in place.items() if name.startswith("triton_per_fused__softmax"))
    assert added in graph.predecessors[softmax]
    assert EdgeKind.MUTATION in kinds.values()
    assert graph.independent(added, place["triton_spl_fused_cumsum_5"])


@pytest.mark.parametrize("version", _VERSIONS)
def test_what_the_code_overwrites_is_copied_once_and_in_place_not_at_all(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, found, _ = _taken_apart(f"cache-{version}", monkeypatch)
    program = found.program
    copies = [operator for operator in program.graph.operators if is_copy(operator.calls[0])]
    chains = chains_of(program)
    assert [chain.links[0].operator for chain in chains] == [operator.index for operator in copies]
    assert [program.graph.inputs.index(chain.links[0].before) for chain in chains] == [1, 2, 3]
    # The keys and the state are read before they are changed, and the counter counts.
    assert not any(chain.repeatable for chain in chains)
    bound = bound_of(found, captured.program, captured.constants, torch.device("cpu"))
    inputs = [*random_inputs(captured.program, 13)[:-1], torch.tensor(5)]
    wanted = bound.run(inputs)
    rng, most = random.Random(3), 0
    for _ in range(30):
        plan = make_plan(program.graph, random_placement(rng, program.graph, rng.randrange(1, 4)))
        allowed = granted(program, plan)
        most = max(most, len(allowed))
        given = [tensor.clone() for tensor in inputs]
        got = run_in(random_run_order(rng, plan), in_place(bound, allowed), given)
        assert compare(got, wanted).bitwise
        changed = {program.graph.inputs.index(chain.links[0].before) for chain in allowed}
        assert [place for place in range(4) if not torch.equal(given[place], inputs[place])] == sorted(changed)
    assert most == 3


def test_launches_may_be_captured_and_other_baselines_get_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, found, _ = _taken_apart("odds-2.13", monkeypatch)
    require_capturable(found.program.graph)
    pairs = zip(captured.program.bindings, found.program.bindings, strict=True)
    given = {ours.value: captured.constants[theirs.value] for theirs, ours in pairs}
    source, constants = source_of(found.program, given)
    assert source == captured.program
    assert set(constants) == set(captured.constants)
    del given[found.program.bindings[0].value]
    with pytest.raises(ArtifactCorrupt, match="missing"):
        source_of(found.program, given)


@pytest.mark.parametrize("name", sorted(_TEXTS))
def test_every_form_of_the_texts_is_known(name: str) -> None:
    source = _TEXTS[name].read_text()
    module = read_module(source)
    # Where a region is compiled, a block that tunes its kernels is kept above the code.
    code = source.rpartition("async_compile = AsyncCompile()")[2]
    assert len(module.kernels) == code.count("= async_compile.triton(") > 0
    assert module.devices == {0}
    for launch in module.launches:
        if launch.kind is Kind.TRITON:
            assert all(item.startswith(_KNOWN_PARAMETERS) for item in module.kernels[launch.callee].parameters)


@pytest.mark.parametrize("version", _VERSIONS)
def test_a_kept_region_launches_on_the_stream_of_the_moment(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would be loaded on a GPU, from the text alone; what is missing here is put in its place."""
    import sys
    from types import ModuleType

    # All that the text imports, before it seems that there is a Triton.
    import torch._inductor.codecache
    import torch._inductor.runtime.triton_heuristics
    import torch._inductor.select_algorithm
    from torch._inductor.async_compile import AsyncCompile

    source = next(path for name, path in _TEXTS.items() if name.startswith("epilogue") and name.endswith(version)).read_text()
    imported = [name for name in ("copy_if_misaligned", "assert_size_stride_grouped") if name in source]
    if any(not hasattr(torch._C._dynamo.guards, name) for name in imported):
        pytest.skip(f"torch {torch.__version__} lacks what the text imports; a region is compiled anew for another version")
    streams = iter([_STREAM, _STREAM, 8])
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.language = language  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    monkeypatch.setattr(AsyncCompile, "triton", lambda self, name, text, device_str="cuda": _Kernel(_STAND_INS[name]))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: next(streams), raising=False)
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(torch.cuda, "_exchange_device", lambda index: index)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", lambda index: index)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    code = region_compile.load_source(source, "test")
    assert not isinstance(code, Refused), code.reason
    entry = code.entry
    model, (x,) = nets.epilogue()
    weight, bias = model.linear.weight.detach(), model.linear.bias.detach()
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(entry([x, weight, bias])[0], model(x))
        with pytest.raises(AssertionError):
            entry([x, weight, bias])
