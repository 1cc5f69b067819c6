"""Inductor's modes as lowerings on a GPU: captured, audited, and any schedule bitwise equal to the order of the generated code."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autosched
from autosched.capture.export import Captured
from autosched.core.graph import ValueRole
from autosched.core.in_place import chains_of
from autosched.core.records import SoloRecord
from autosched.core.schedule import sequential
from autosched.core.variants import Lowering, Variant
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.pipeline.inductor_capture import capture_inductor
from autosched.runtime.cuda.audit import audit_graph
from autosched.runtime.cuda.key import cuda_device_key, cuda_software_key
from autosched.runtime.cuda.lanes import CaptureOptions
from autosched.runtime.cuda.runner import GraphRunner
from autosched.runtime.in_place import granted, in_place
from autosched.runtime.inductor.common import Refused
from autosched.runtime.inductor.modes import Mode
from autosched.runtime.kernels import bind
from autosched.runtime.numerics import compare
from autosched.runtime.plan import make_plan
from autosched.runtime.regions.library import RegionLibrary
from autosched.runtime.trees import output_tensors, unflatten_inputs, unflatten_outputs
from tests.conformance.bundles import evidence_for
from tests.conformance.graphs import random_placement
from tests.gpu import gpu_rig
from tests.runtime.inductor.generated import nets

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


class _Inception(nn.Module):
    """Branches that are concatenated: each writes its window of one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.one = nn.Sequential(nn.Conv2d(32, 16, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.three = nn.Sequential(nn.Conv2d(32, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.five = nn.Sequential(nn.Conv2d(32, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.stem(x)
        wide = torch.cat([self.one(y), self.three(y), self.five(y)], 1)
        scores = self.head(functional.avg_pool2d(wide, 16).flatten(1))
        return scores, torch.topk(scores, 3)[1]


class _Block(nn.Module):
    """A transformer layer: library products, attention, fused norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


class _Linears(nn.Module):
    """Two branches of linear layers whose biases Inductor adds in what follows, and a product of both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 128), nn.Linear(64, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.left(x)) @ torch.tanh(self.right(x)).t()


class _Narrow(nn.Module):
    """Two products of few rows and columns over many elements: what Inductor may take apart along those, as a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2048, 16), nn.Linear(2048, 8, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(self.left(torch.sigmoid(x))) * 2, torch.tanh(self.right(x * 2)) + 1


_MODELS = {
    "inception": (_Inception, (2, 3, 16, 16)),
    "block": (_Block, (2, 16, 64)),
    "narrow": (_Narrow, (4, 2048)),
    "cache": (nets.Cache, (4, 16)),
}
_CHOICES = {
    "narrow": tuple((f"mm float32[4, 2048], float32[2048, {columns}]", "decompose_k_mm_4_split k_split=4") for columns in (16, 8)),
}
"""What is taken, whatever is fastest here."""
_CASES = [
    ("inception", Lowering.INDUCTOR),
    ("block", Lowering.INDUCTOR),
    ("cache", Lowering.INDUCTOR),
    # Combined kernels come with all that max-autotune does, and each such case compiles for long.
    ("inception", Lowering.MAX_AUTOTUNE_COMBO),
    ("block", Lowering.MAX_AUTOTUNE),
    ("narrow", Lowering.MAX_AUTOTUNE),
]


@pytest.fixture(scope="module", params=_CASES, ids=[f"{name}-{lowering}" for name, lowering in _CASES])
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, Captured, gpu_rig.Rig]]:
    torch.manual_seed(3)
    name, lowering = request.param
    if gpu_rig.rehearsing() and lowering is not Lowering.INDUCTOR:
        pytest.skip("cannot be rehearsed: the templates are a GPU's")
    make, shape = _MODELS[name]
    model, x = make(), torch.randn(shape)
    device = torch.device("cpu" if gpu_rig.rehearsing() else "cuda")
    model = model.eval().to(device)
    found = capture_inductor(model, (x.to(device),), mode=Mode(lowering, choices=_CHOICES.get(name, ())))
    assert not isinstance(found, Refused), found.reason
    assert found.program.choices == _CHOICES.get(name, found.program.choices)
    rig = gpu_rig.Rig(found.program, found.constants)
    yield model, found, rig
    rig.close()


def test_it_computes_what_the_model_does(opened: tuple[nn.Module, Captured, gpu_rig.Rig]) -> None:
    model, found, rig = opened
    inputs = rig.inputs(1)
    args, kwargs = unflatten_inputs(found.program, inputs[: len(found.program.given)])
    with torch.no_grad():
        for state in found.program.state:
            model.get_buffer(state.name).copy_(inputs[found.program.graph.inputs.index(state.value)])
        wanted = output_tensors(model(*args, **kwargs))
    got = output_tensors(unflatten_outputs(found.program, rig.bound.run(inputs)))
    for mine, theirs in zip(got, wanted, strict=True):
        if mine.dtype.is_floating_point:
            torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu_only(reason="the double sees no memory behind the weights that Inductor packs for a CPU")
def test_any_captured_schedule_gives_the_same_bits_and_passes_the_audit(opened: tuple[nn.Module, Captured, gpu_rig.Rig]) -> None:
    _, found, rig = opened
    graph = found.program.graph
    inputs = rig.inputs(2)
    wanted = [item.clone() for item in rig.capture(make_plan(graph, sequential(graph)))(inputs)]
    rng = random.Random(7)
    for _ in range(8):
        plan = make_plan(graph, random_placement(rng, graph, 3, extra_edges=1))
        runner = rig.capture(plan, observe=True)
        if runner.captured is not None:
            assert audit_graph(graph, plan, runner.captured).problems == ()
        for mine, theirs in zip(runner(inputs), wanted, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.gpu_only(reason="the double sees no memory behind the weights that Inductor packs for a CPU")
@pytest.mark.parametrize("opened", [("cache", Lowering.INDUCTOR)], indirect=True, ids=["cache"])
def test_what_the_code_overwrites_is_overwritten_where_it_lies(opened: tuple[nn.Module, Captured, gpu_rig.Rig]) -> None:
    """Captured in place where a plan grants it; where it does not, the audit says why."""
    _, found, rig = opened
    graph = found.program.graph
    rng = random.Random(5)
    most = refused = 0
    for _ in range(6):
        plan = make_plan(graph, random_placement(rng, graph, 3))
        chains = granted(found.program, plan)
        most = max(most, len(chains))
        for chain in chains_of(found.program):
            if chain not in chains and rig.reader is not None:
                # Done all the same, the audit sees it.
                runner = rig.capturer.capture(
                    in_place(rig.bound, [chain]), plan, rig.measurer.static, graph=graph, options=CaptureOptions(observe=True)
                )
                assert isinstance(runner, GraphRunner), runner
                assert runner.captured is not None
                assert "overwritten too early" in " ".join(audit_graph(graph, plan, runner.captured).problems)
                runner.close()
                refused += 1
        rig.assert_sound_in_place(plan, chains, 5)
    assert most == 3
    assert refused > 0 or rig.reader is None


@pytest.mark.gpu_only(reason="weights are packed on a CPU")
def test_no_launch_works_on_constants_alone(opened: tuple[nn.Module, Captured, gpu_rig.Rig]) -> None:
    _, found, _ = opened
    values = found.program.graph.values
    for operator in found.program.graph.operators:
        assert not operator.reads or any(values[value].role is not ValueRole.CONSTANT for value in operator.reads), operator.name


def test_what_was_chosen_is_in_the_program(opened: tuple[nn.Module, Captured, gpu_rig.Rig]) -> None:
    program = opened[1].program
    assert all(answer for _, answer in program.choices)
    kernels = [question for question, _ in program.choices if not question.startswith("pad ")]
    assert bool(kernels) == (program.lowering != Lowering.INDUCTOR)


@pytest.mark.gpu_only(reason="products are padded on GPUs alone")
@pytest.mark.parametrize("answer", ["yes", "no"])
def test_whether_a_product_is_padded_is_asked_once(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Sigmoid(), nn.Linear(514, 518), nn.ReLU()).eval().cuda()
    choices = (("pad aten.addmm float32[510, 514], float32[514, 518]", answer),)
    found = capture_inductor(model, (torch.randn(510, 514, device="cuda"),), mode=Mode(choices=choices))
    assert not isinstance(found, Refused), found.reason
    assert found.program.choices == choices
    # Elsewhere nothing is known of it, and timing it would say the opposite.
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))
    monkeypatch.setattr("torch._inductor.fx_passes.pad_mm._should_pad", lambda *_, **__: answer == "no")
    bound = bind(found.program, {value: tensor.cuda() for value, tensor in found.constants.items()}, "cuda")
    assert bound.program.choices == choices


def test_branches_stay_apart(opened: tuple[nn.Module, Captured, gpu_rig.Rig]) -> None:
    model, found, _ = opened
    if isinstance(model, _Inception):
        assert found.program.graph.width >= 3


@pytest.mark.gpu_only(reason="the templates are a GPU's")
@pytest.mark.parametrize("pays", [True, False])
def test_what_follows_a_template_is_fused_into_it_again_only_if_it_was(pays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one template is left of a choice, Inductor fuses whatever it can without timing it."""
    from torch._inductor import config

    if not gpu_rig.without_gpu():
        pytest.skip("which time is shorter is made up here: a GPU would say no more than the emulator, and compile for a minute")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU()).eval().cuda()
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "here"))
    with config.patch(max_autotune_gemm_backends="TRITON"):
        with monkeypatch.context() as patch:
            timed = "torch._inductor.scheduler.Scheduler.benchmark_codegened_module"
            patch.setattr(timed, lambda *_, **__: (0.0 if pays else float("inf"), ""))
            found = capture_inductor(model, (torch.randn(48, 64, device="cuda"),), mode=Mode(Lowering.MAX_AUTOTUNE))
        assert not isinstance(found, Refused), found.reason
        assert len(found.program.graph) == (1 if pays else 2)
        # Elsewhere nothing is known of it.
        monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "there"))
        bound = bind(found.program, {value: tensor.cuda() for value, tensor in found.constants.items()}, "cuda")
    assert bound.program.choices == found.program.choices


@pytest.mark.gpu_only(reason="cuBLAS and cuBLASLt are a GPU's")
def test_products_go_through_cublaslt_from_measuring_to_a_loaded_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))
    model, x = _Linears().eval().cuda(), torch.randn(16, 64, device="cuda")
    found = capture_inductor(model, (x,))
    assert not isinstance(found, Refused), found.reason
    program, graph = found.program, found.program.graph
    with gpu_rig.open_session(program, found.constants) as session:
        products = [index for index, row in enumerate(session.offered()) if Variant.CUBLASLT in row]
        assert [graph.operators[index].name for index in products] == ["mm", "mm.1", "mm.2"]
        assert session.compile_variant(1, Variant.CUBLASLT) == dict.fromkeys(products, "")
        rows = session.solo_variants([(1, Variant.CALLS), (1, Variant.CUBLASLT)], repeats=3)
        assert [isinstance(row[1], SoloRecord) for row in rows] == [index in products for index in range(len(graph))]
    placed = random_placement(random.Random(3), graph, 2)
    chosen = tuple(int(Variant.CUBLASLT) if index in products else 0 for index in range(len(graph)))
    schedule = dataclasses.replace(placed, variant=chosen)
    rig = gpu_rig.Rig(program, found.constants)
    try:
        measurer, inputs = rig.measurer, rig.inputs(1)
        measurer.variants.regions = RegionLibrary(program, rig.bound.device, "test", bound=rig.bound.kernels)
        wanted = measurer.reference(inputs, make_plan(graph, dataclasses.replace(sequential(graph), variant=chosen)))
        by_calls = [item.cpu() for item in measurer.reference(inputs)]
        assert compare([item.cpu() for item in wanted], by_calls, rounded=torch.float16).within_tolerance
        runner = measurer.capture(schedule, private=True)
        assert isinstance(runner, GraphRunner), runner
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(measurer.outputs(runner, inputs), wanted, strict=True))
        runner.close()
    finally:
        rig.close()

    device = cuda_device_key(0)
    bundle = make_bundle(program, schedule, evidence_for(len(graph), device, graph.hash), {}, device, cuda_software_key(0))
    data = encode_bundle(bundle)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert json.loads(archive.read("manifest.json"))["schema"] == 6
    asked: list[object] = []
    prefer = torch.backends.cuda.preferred_blas_library

    def preferred(library: Any = None) -> Any:
        asked.append(library)
        return prefer(library)

    before = prefer()
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    loaded = autosched.load(data, model, strict=True)
    with torch.no_grad():
        answer = compare([loaded(x).cpu()], [model(x).cpu()], rounded=torch.float16)
    assert answer.within_tolerance, answer.reason
    # Each is tried once when it is made, and then it runs.
    assert asked.count("cublaslt") >= 2 * len(products)
    assert prefer() == before
