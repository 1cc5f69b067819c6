"""Regions compiled for real on the CPU: numbers, sharing, the cache, refusals. Few, because a C++ compiler runs for each."""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from autosched.capture.export import Captured, capture
from autosched.core.records import Engine
from autosched.core.schedule import Schedule, canonical_key, sequential
from autosched.core.variants import Lowering, Variant, variant_signature
from autosched.runtime.inductor.common import Refused
from autosched.runtime.instructions import Expect, RunKernel, instructions_of
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.numerics import compare
from autosched.runtime.plan import make_plan
from autosched.runtime.regions import compile as region_compile
from autosched.runtime.regions.callers import caller_on_cpu
from autosched.runtime.regions.library import RegionLibrary
from autosched.runtime.regions.pieces import piece_digest, pieces_of
from autosched.runtime.regions.store import RegionStore
from autosched.runtime.widths import WidePrograms
from autosched.zoo_models.decoder_int8 import EightBitLinear
from tests.capture.test_cpu_rows import Experts
from tests.conformance.interpreter import slots_after

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")


class Twins(nn.Module):
    """Two equal products with a normalisation, and a packed convolution with an epilogue that oneDNN does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: torch.Tensor, y: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        made = self.conv(image)
        return (self._norm(self.a(x)).cumsum(0) @ self._norm(self.b(y)).cumsum(0))[0, 0] + torch.sigmoid(made) * torch.tanh(made)

    @staticmethod
    def _norm(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x - x.mean(-1, keepdim=True)) * 2.0


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    inputs = torch.randn(16, 16), torch.randn(16, 16), torch.randn(1, 2, 8, 8)
    return capture(Twins().eval(), inputs, lowering=Lowering.FUSED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "regions"


def library(captured: Captured, folder: Path | None) -> RegionLibrary:
    return RegionLibrary(captured.program, CPU, "scope", RegionStore(folder) if folder is not None else None)


def compiled_schedule(captured: Captured, regions: RegionLibrary, width: int = 1) -> Schedule:
    graph = captured.program.graph
    variant = tuple(int(Variant.COMPILED if Variant.COMPILED in regions.variants(index) else 0) for index in range(len(graph)))
    return dataclasses.replace(sequential(graph, width=width), variant=variant)


@needs_compiler
def test_compiled_regions_compute_what_their_calls_compute_and_are_kept(captured: Captured, folder: Path) -> None:
    graph = captured.program.graph
    regions = library(captured, folder)
    schedule = compiled_schedule(captured, regions)
    chosen = [operator for operator in graph.operators if schedule.variant[operator.index]]
    digests = {piece_digest(piece, graph) for operator in chosen for piece in pieces_of(operator, graph) if piece.compiled}
    assert sum(schedule.variant) > len(digests)
    programs = WidePrograms(captured.program, captured.constants, regions=regions)
    bound = programs.for_plan(make_plan(graph, schedule))
    for seed in range(2):
        inputs = random_inputs(captured.program, seed)
        assert compare(bound.run(inputs), programs.at(1).run(inputs)).within_tolerance
    assert regions.refusals == ()
    assert regions.compiled == len(digests)  # the twins share one
    assert canonical_key(graph, schedule, lanes_matter=True) != canonical_key(graph, sequential(graph), lanes_matter=True)
    # Again, from what was kept; and once more, where one entry was damaged.
    again = library(captured, folder)
    assert compare(again.apply(programs.at(1), make_plan(graph, schedule)).run(inputs), bound.run(inputs)).bitwise
    assert (again.compiled, again.reused) == (0, len(digests))
    victim = sorted(folder.iterdir())[0]
    victim.write_bytes(victim.read_bytes().replace(b"empty_strided_cpu", b"empty_strided_gpu"))
    mended = library(captured, folder)
    mended.apply(programs.at(1), make_plan(graph, schedule))
    assert (mended.compiled, mended.reused) == (1, len(digests) - 1)


@needs_compiler
def test_compiled_regions_do_the_same_as_their_instructions(captured: Captured, folder: Path) -> None:
    graph = captured.program.graph
    regions = library(captured, folder)
    bound = WidePrograms(captured.program, captured.constants, regions=regions).for_plan(
        make_plan(graph, compiled_schedule(captured, regions))
    )
    carried = [instructions_of(kernel) for kernel in bound.kernels]
    known = [items for items in carried if items is not None]
    assert len(known) == len(graph)
    # Memory is indexed only by shapes that were looked at.
    assert {Expect, RunKernel} <= {type(item) for items in known for item in items}
    inputs = random_inputs(captured.program, 0)
    wanted, got = bound.slots_after(inputs, keep=range(len(graph.values))), slots_after(bound, known, inputs)
    assert min(got) >= 0
    for operator in graph.operators:
        assert all(torch.equal(wanted[value], got[value]) for value in operator.writes)
    # A region that holds tensors of its own is called.
    code = regions._codes.popitem()[1]
    assert isinstance(code, region_compile.Code)
    piece = next(piece for operator in graph.operators for piece in pieces_of(operator, graph) if piece.compiled)
    assert instructions_of(caller_on_cpu(dataclasses.replace(code, source=""), piece, "region")) is None


@needs_compiler
@pytest.mark.usefixtures("native")
def test_compiled_regions_run_without_the_interpreter_and_look_at_shapes(captured: Captured, folder: Path) -> None:
    graph = captured.program.graph
    regions = library(captured, folder)
    plan = make_plan(graph, compiled_schedule(captured, regions))
    bound = WidePrograms(captured.program, captured.constants, regions=regions).for_plan(plan)
    executor = LaneExecutor(bound, plan)
    assert executor.engine is Engine.NATIVE
    inputs = random_inputs(captured.program, 0)
    assert compare(executor.run(inputs), bound.run(inputs)).bitwise
    with pytest.raises(RuntimeError, match="expected \\[16, 16\\]"):
        executor.run([inputs[0][:8], *inputs[1:]])


def test_only_products_and_convolutions_may_be_rounded(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured.program.graph
    pieces = [piece for operator in graph.operators for piece in pieces_of(operator, graph)]
    monkeypatch.setattr(region_compile, "rounded_as", {"cuda": torch.float16, "cpu": torch.bfloat16}.get)
    for device, dtype in ((torch.device("cuda"), torch.float16), (CPU, torch.bfloat16)):
        rounded = [region_compile.rounding_of(piece, device) for piece in pieces]
        assert rounded == [dtype if piece.calls[0].target != "aten::cumsum.default" else None for piece in pieces]
        assert len(set(rounded)) == 2
    monkeypatch.setattr(region_compile, "rounded_as", lambda kind: None)
    assert not any(region_compile.rounding_of(piece, torch.device("cuda")) for piece in pieces)


@needs_compiler
def test_two_compiled_regions_run_at_the_same_time(captured: Captured, folder: Path) -> None:
    from autosched.runtime.lanes import LaneExecutor

    regions = library(captured, folder)
    graph = captured.program.graph
    schedule = compiled_schedule(captured, regions)
    first = next(index for index, variant in enumerate(schedule.variant) if variant)
    lanes = dataclasses.replace(schedule, lane=tuple(int(index != first) for index in range(len(graph))))
    programs = WidePrograms(captured.program, captured.constants, regions=regions)
    plan = make_plan(graph, lanes)
    inputs = random_inputs(captured.program, 0)
    outputs = LaneExecutor(programs.for_plan(plan), plan).run(inputs)
    assert compare(outputs, programs.for_plan(make_plan(graph, schedule)).run(inputs)).bitwise


def test_equal_regions_have_one_digest_and_others_another(captured: Captured) -> None:
    graph = captured.program.graph
    digests = [piece_digest(piece, graph) for operator in graph.operators for piece in pieces_of(operator, graph) if piece.compiled]
    assert len(set(digests)) < len(digests)
    assert variant_signature("a", Variant.CALLS) == "a" != variant_signature("a", Variant.COMPILED)


def test_code_for_one_gpu_is_not_taken_for_another(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor writes the GPU's index into it, and two GPUs of one model share the cache."""
    monkeypatch.setattr(RegionLibrary, "_settings_digest", lambda self: "settings")
    keys = [RegionLibrary(captured.program, torch.device(name), "scope")._key("digest", 1, 1) for name in ("cuda", "cuda:0", "cuda:1")]
    assert keys[0] == keys[1] != keys[2]


def test_what_cannot_be_compiled_runs_call_by_call_with_a_reason(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("the compiler fell over")

    monkeypatch.setattr(region_compile, "_compile", broken)
    regions = library(captured, None)
    schedule = compiled_schedule(captured, regions)
    bound = bind(captured.program, captured.constants)
    made = regions.apply(bound, make_plan(captured.program.graph, schedule))
    inputs = random_inputs(captured.program, 0)
    assert compare(made.run(inputs), bound.run(inputs)).bitwise
    if region_compile.missing_compiler("cpu"):
        assert all("compiler" in item.reason for item in regions.refusals)
    else:
        assert {item.reason for item in regions.refusals} == {"Inductor could not compile it: RuntimeError: the compiler fell over"}
    assert len(regions.refusals) == sum(schedule.variant)


def test_code_that_computes_something_else_or_returns_its_input_is_refused(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured.program.graph
    piece = next(piece for operator in graph.operators for piece in pieces_of(operator, graph) if piece.compiled)

    def refused(entry) -> str:  # type: ignore[no-untyped-def]
        module = type(torch)("fake")
        module.call = entry
        monkeypatch.setattr(region_compile, "_compile", lambda *args: args[2].append(module))
        found = region_compile.compile_piece(piece, graph, CPU, width=1, variant=Variant.COMPILED)
        assert isinstance(found, Refused)
        return found.reason

    spec = graph.values[piece.writes[0]].spec
    assert "something else" in refused(lambda args: (torch.zeros(spec.shape),))
    assert "memory that it was given" in refused(lambda args: (args[0],))
    assert "returns 2 tensors" in refused(lambda args: (torch.zeros(spec.shape), torch.zeros(1)))
    assert "strides" in refused(lambda args: (torch.zeros(spec.shape).t(),))
    assert "does not run" in refused(lambda args: args[5])


def test_other_lowerings_have_one_variant_and_no_library() -> None:
    from autosched.runtime.host_key import cpu_device_key, software_key
    from autosched.runtime.regions.library import region_library

    plain = capture(Twins().eval(), (torch.randn(16, 16), torch.randn(16, 16), torch.randn(1, 2, 8, 8)), lowering=Lowering.ATEN)
    assert region_library(plain.program, CPU, cpu_device_key(), software_key()) is None
    assert library(plain, None).variants(0) == (Variant.CALLS,)


def test_without_a_compiler_every_variant_is_refused(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosched.runtime.regions.library.missing_compiler", lambda kind: "there is no C++ compiler")
    regions = library(captured, None)
    index = next(index for index in range(len(captured.program.graph)) if len(regions.variants(index)) > 1)
    found = regions.kernel(index, 1, Variant.COMPILED)
    assert isinstance(found, Refused)
    assert found.reason == "there is no C++ compiler"


def test_what_does_not_begin_at_16_bytes_is_moved_there_for_a_gpu():
    from autosched.runtime.regions.compile import aligned

    whole = torch.arange(40.0)
    window = whole[1:37].view(6, 6).t()[:, 1:5]
    expanded = whole[1:4, None].expand(3, 5)
    seen = []

    def entry(given):
        seen.extend(given)
        return [item + 1 for item in given]

    made = aligned(entry)([whole, window, expanded])
    assert seen[0] is whole
    for got, wanted in zip(seen, (whole, window, expanded), strict=True):
        assert got.data_ptr() % 16 == 0
        assert got.stride() == wanted.stride()
        assert torch.equal(got, wanted)
    assert torch.equal(made[1], window + 1)


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "numbers"),  # 256 are summed in blocks
    [(torch.float32, 37), (torch.float32, 256), (torch.bfloat16, 37), (torch.bfloat16, 256), (torch.float16, 256)],
)
def test_products_of_one_row_are_compiled_as_sums(dtype: torch.dtype, numbers: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(numbers, 61), nn.ReLU(), nn.Linear(61, 1, bias=False)).to(dtype).eval()
    captured = capture(model, (torch.randn(1, numbers).to(dtype),), lowering=Lowering.FUSED)
    graph = captured.program.graph
    offered = [library(captured, None).variants(index) for index in range(len(graph))]
    assert all(variants[:2] == (Variant.CALLS, Variant.COMPILED) for variants in offered)
    for width in (1, 2):
        regions = library(captured, None)
        programs = WidePrograms(captured.program, captured.constants, regions=regions)
        bound = programs.for_plan(make_plan(graph, compiled_schedule(captured, regions, width)))
        inputs = random_inputs(captured.program, 0)
        assert compare(bound.run(inputs), programs.at(1).run(inputs)).within_tolerance
        assert regions.refusals == ()
        assert all(instructions_of(kernel) is not None for kernel in bound.kernels)  # no library, no interpreter
    code = region_compile.compile_piece(pieces_of(graph.operators[0], graph)[0], graph, CPU, width=1, variant=Variant.COMPILED)
    assert isinstance(code, region_compile.Code)
    assert "extern_kernels" not in code.source.partition("def call")[2]


@needs_compiler
@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize(("dtype", "numbers"), [(torch.float32, 32), (torch.float32, 128), (torch.bfloat16, 128)])
def test_batches_of_products_of_one_row_are_compiled_with_the_gather_before_them(columns: bool, dtype: torch.dtype, numbers: int) -> None:
    torch.manual_seed(0)
    model = Experts(columns=columns, numbers=numbers).to(dtype).eval()
    captured = capture(model, (torch.randn(2, numbers).to(dtype), torch.tensor([4, 1])), lowering=Lowering.FUSED)
    graph, regions = captured.program.graph, library(captured, None)
    programs = WidePrograms(captured.program, captured.constants, regions=regions)
    bound = programs.for_plan(make_plan(graph, compiled_schedule(captured, regions)))
    inputs = [torch.randn(2, numbers).to(dtype), torch.tensor([0, 5])]
    assert compare(bound.run(inputs), programs.at(1).run(inputs)).within_tolerance
    assert regions.refusals == ()
    assert len(graph) == regions.compiled == 1


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bit_weights_are_read_in_the_loop_of_their_product(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = EightBitLinear(nn.Linear(256, 40)).eval()
    model.scale, model.bias = model.scale.to(dtype), nn.Parameter(model.bias.to(dtype))
    captured = capture(model, (torch.randn(1, 256).to(dtype),), lowering=Lowering.FUSED)
    graph, regions = captured.program.graph, library(captured, None)
    programs = WidePrograms(captured.program, captured.constants, regions=regions)
    bound = programs.for_plan(make_plan(graph, compiled_schedule(captured, regions)))
    inputs = random_inputs(captured.program, 0)
    assert compare(bound.run(inputs), programs.at(1).run(inputs)).within_tolerance
    assert regions.refusals == ()
    assert len(graph) == 1
    code = region_compile.compile_piece(pieces_of(graph.operators[0], graph)[0], graph, CPU, width=1, variant=Variant.COMPILED)
    assert isinstance(code, region_compile.Code)
    assert "int8_t*" in code.source
    assert "empty_strided_cpu((40, 256)" not in code.source


def test_a_compiler_that_pytorch_does_not_look_for_is_told_how_to_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_found() -> str:
        raise RuntimeError("no working C++ compiler")  # with clang++ alone, too, which PyTorch takes for macOS only

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none_found)
    assert region_compile.missing_compiler("cpu").endswith("install g++, or name another in CXX")


def test_to_load_kept_code_leaves_the_warnings_of_the_process_alone() -> None:
    """Another thread may put its own filters aside at that moment, and put back what it has found."""
    found = region_compile.load_source("import warnings; call = list(warnings.filters)", "test")
    assert isinstance(found, region_compile.Code)
    assert found.entry == list(warnings.filters)
