"""Compiled regions on a GPU: captured in any variant, audited, bitwise equal to the same variants on one stream."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.records import Failure, FailureKind, PairRecord, Samples
from autosched.core.schedule import sequential
from autosched.core.variants import Lowering, Variant
from autosched.device.cuda.profile import OperatorProfile, profile_operator
from autosched.runtime.cuda import cudnn_fused, sm_share
from autosched.runtime.cuda.audit import audit_graph
from autosched.runtime.cuda.captured import NodeKind
from autosched.runtime.cuda.lanes import CaptureOptions
from autosched.runtime.cuda.runner import GraphRunner
from autosched.runtime.inductor.common import Refused
from autosched.runtime.numerics import compare
from autosched.runtime.plan import make_plan
from autosched.runtime.regions.library import RegionLibrary
from autosched.runtime.regions.store import RegionStore
from tests.conformance.graphs import random_placement
from tests.gpu import gpu_rig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.gpu_only(reason="Triton writes kernels for a GPU")]


class _Branches(nn.Module):
    """Two products with epilogues that may run at the same time, and a normalisation of both."""

    def __init__(self, size: int = 256) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Sums around zero: of large ones bfloat16 keeps no fraction, and another order of summing would change the answer by its size.
        left, right = torch.relu(self.a(x)) * 2.0, torch.sigmoid(self.b(x)) - 0.5
        return torch.softmax(left @ right.t(), -1)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gpu_rig.Rig]:
    torch.manual_seed(1)
    size = 64 if gpu_rig.without_gpu() else 256
    found = capture(_Branches(size).eval(), (torch.randn(size // 2, size),), target="cuda", lowering=Lowering.FUSED)
    made = gpu_rig.Rig(found.program, found.constants)
    store = RegionStore(Path(tmp_path_factory.mktemp("regions")) / "kept")
    regions = RegionLibrary(found.program, made.bound.device, "test", store)
    made.measurer.variants.regions = regions
    yield made
    made.close()


@pytest.mark.parametrize("variant", [Variant.COMPILED, Variant.TUNED_TEMPLATES, Variant.TEMPLATES])
def test_a_variant_is_captured_in_any_schedule_with_the_same_bits(rig: gpu_rig.Rig, variant: Variant) -> None:
    graph, measurer = rig.program.graph, rig.measurer
    regions = measurer.variants.regions
    assert regions is not None
    chosen = tuple(int(variant) if variant in regions.variants(index) else 0 for index in range(len(graph)))
    assert any(chosen)
    inputs = rig.inputs(1)
    in_order = make_plan(graph, dataclasses.replace(sequential(graph), variant=chosen))
    wanted = measurer.reference(inputs, in_order)
    assert compare([item.cpu() for item in wanted], [item.cpu() for item in measurer.reference(inputs)]).within_tolerance
    rng = random.Random(3)
    for _ in range(4):
        schedule = dataclasses.replace(random_placement(rng, graph, 2, extra_edges=1), variant=chosen)
        runner = measurer.capture(schedule, private=True)
        assert isinstance(runner, GraphRunner), runner
        for mine, theirs in zip(measurer.outputs(runner, inputs), wanted, strict=True):
            assert torch.equal(mine, theirs)
        if runner.captured is not None:
            assert audit_graph(graph, make_plan(graph, schedule), runner.captured).problems == ()
        runner.close()


def test_a_region_is_timed_alone_and_in_a_pair(rig: gpu_rig.Rig) -> None:
    from autosched.device.base import Pair
    from autosched.device.cuda.pairs import measure_pair

    regions = rig.measurer.variants.regions
    assert regions is not None
    graph = rig.program.graph
    both = [index for index in range(len(graph)) if Variant.COMPILED in regions.variants(index)]
    assert isinstance(rig.measurer.solo_samples(both[0], 5, Variant.COMPILED), Samples)
    first, last = next((a, b) for a in both for b in both if a < b and graph.independent(a, b))
    record = measure_pair(rig.measurer, Pair(first, last, 1, 1, int(Variant.COMPILED), int(Variant.COMPILED)), 5)
    assert isinstance(record, PairRecord), record
    assert record.first.endswith("+compiled")


def test_an_operator_is_profiled_in_the_variant_that_is_asked_for(rig: gpu_rig.Rig) -> None:
    regions, bindings = rig.measurer.variants.regions, rig.reader
    assert regions is not None
    if bindings is None:
        pytest.skip("cuda-bindings is not installed")
    index = next(index for index in range(len(rig.program.graph)) if Variant.COMPILED in regions.variants(index))
    calls, compiled = (
        profile_operator(rig.measurer, index, variant, bindings=bindings, flush=None) for variant in (Variant.CALLS, Variant.COMPILED)
    )
    assert isinstance(calls, OperatorProfile), calls
    assert isinstance(compiled, OperatorProfile), compiled
    assert compiled.signature == f"{calls.signature}+compiled"
    # A product, and what follows it in one kernel instead of two or three.
    assert 0 < len(compiled.kernels) < len(calls.kernels)


def test_a_second_library_finds_everything_kept(rig: gpu_rig.Rig) -> None:
    first = rig.measurer.variants.regions
    assert first is not None
    again = RegionLibrary(rig.program, rig.bound.device, "test", first._store)
    index = next(index for index in range(len(rig.program.graph)) if Variant.COMPILED in again.variants(index))
    first.kernel(index, 1, Variant.COMPILED)
    again.kernel(index, 1, Variant.COMPILED)
    assert (again.compiled, again.reused) == (0, 1)


def test_products_without_a_bias_are_captured_through_cublaslt_with_the_same_bits() -> None:
    torch.manual_seed(4)
    model, x = _Unbiased().eval(), torch.randn(16, 64)
    found = capture(model, (x,), target="cuda", lowering=Lowering.REWRITTEN)
    made = gpu_rig.Rig(found.program, found.constants)
    try:
        graph, measurer = made.program.graph, made.measurer
        regions = RegionLibrary(found.program, made.bound.device, "test")
        measurer.variants.regions = regions
        offered = [index for index in range(len(graph)) if Variant.CUBLASLT in regions.variants(index)]
        assert len(offered) >= 3
        chosen = tuple(int(Variant.CUBLASLT) if index in offered else 0 for index in range(len(graph)))
        before = torch.backends.cuda.preferred_blas_library()
        inputs = made.inputs(1)
        wanted = measurer.reference(inputs, make_plan(graph, dataclasses.replace(sequential(graph), variant=chosen)))
        assert compare([item.cpu() for item in wanted], [item.cpu() for item in measurer.reference(inputs)]).within_tolerance
        for number in range(3):
            placed = random_placement(random.Random(number), graph, 2)
            runner = measurer.capture(dataclasses.replace(placed, variant=chosen), private=True)
            assert isinstance(runner, GraphRunner), runner
            for mine, theirs in zip(measurer.outputs(runner, inputs), wanted, strict=True):
                assert torch.equal(mine, theirs)
            runner.close()
        assert all(isinstance(measurer.solo_samples(index, 5, Variant.CUBLASLT), Samples) for index in offered)
        assert torch.backends.cuda.preferred_blas_library() == before
    finally:
        made.close()


class _Unbiased(nn.Module):
    """Two branches of linear layers without a bias, and a product of both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.left(x)) @ torch.tanh(self.right(x)).t()


def test_products_on_half_of_the_multiprocessors_are_captured_with_the_same_bits() -> None:
    if sm_share.refusal(torch.device("cuda:0")):
        pytest.skip(sm_share.refusal(torch.device("cuda:0")))
    torch.manual_seed(2)
    model, x = _Branches().eval().bfloat16(), torch.randn(512, 256).bfloat16()
    found = capture(model, (x,), target="cuda", lowering=Lowering.FUSED)
    made = gpu_rig.Rig(found.program, found.constants)
    try:
        graph, measurer = made.program.graph, made.measurer
        measurer.variants.regions = RegionLibrary(found.program, made.bound.device, "test")
        chosen = tuple(int(Variant.HALF_SMS) if sm_share.is_product(operator, graph) else 0 for operator in graph.operators)
        assert any(chosen)
        before = torch._C._get_sm_carveout_experimental(), torch.backends.cuda.preferred_blas_library()
        inputs = made.inputs(1)
        wanted = measurer.reference(inputs, make_plan(graph, dataclasses.replace(sequential(graph), variant=chosen)))
        assert compare([item.cpu() for item in wanted], [item.cpu() for item in measurer.reference(inputs)]).within_tolerance
        runner = measurer.capture(dataclasses.replace(random_placement(random.Random(3), graph, 2), variant=chosen), private=True)
        assert isinstance(runner, GraphRunner), runner
        for mine, theirs in zip(measurer.outputs(runner, inputs), wanted, strict=True):
            assert torch.equal(mine, theirs)
        runner.close()
        assert isinstance(measurer.solo_samples(chosen.index(int(Variant.HALF_SMS)), 5, Variant.HALF_SMS), Samples)
        assert (torch._C._get_sm_carveout_experimental(), torch.backends.cuda.preferred_blas_library()) == before
    finally:
        made.close()


class _Convolutions(nn.Module):
    """Convolutions that relu follows, two with a residual, and two branches that may run at the same time."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.a = nn.Conv2d(4, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
        self.b, self.c = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.d = nn.Conv2d(channels, 2 * channels, 3, stride=2, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        left, right = torch.relu(self.a(x) + x), torch.relu(self.b(x))
        return torch.relu(self.d(torch.relu(self.c(left * right) + left)))


@pytest.mark.parametrize("lowering", [Lowering.FUSED, Lowering.REWRITTEN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_that_cudnn_ends_with_relu_are_captured_with_the_numbers_of_their_calls(
    dtype: torch.dtype, lowering: Lowering, record_property: Callable[[str, object], None]
) -> None:
    if why := cudnn_fused.refusal(torch.device("cuda:0")):
        pytest.skip(why)
    torch.manual_seed(2)
    channels, size = (8, 12) if gpu_rig.without_gpu() else (64, 56)
    model, x = _Convolutions(channels).eval().to(dtype), torch.randn(1, 4, size, size).to(dtype)
    found = capture(model, (x,), target="cuda", lowering=lowering)
    made = gpu_rig.Rig(found.program, found.constants)
    try:
        graph, measurer = made.program.graph, made.measurer
        regions = measurer.variants.regions = RegionLibrary(found.program, made.bound.device, "test")
        offered = [index for index in range(len(graph)) if Variant.CUDNN_FUSED in regions.variants(index)]
        assert len(offered) == 5
        refused = {index for index in offered if isinstance(regions.kernel(index, 1, Variant.CUDNN_FUSED), Refused)}
        record_property("refused", [item.reason for item in regions.refusals])
        # Which shapes cuDNN has engines for is its own affair (a grouped convolution may have none); the rest goes on all the same.
        assert len(refused) <= 1, regions.refusals
        offered = [index for index in offered if index not in refused]
        chosen = tuple(int(Variant.CUDNN_FUSED) if index in offered else 0 for index in range(len(graph)))
        inputs = made.inputs(1)
        wanted = measurer.reference(inputs, make_plan(graph, dataclasses.replace(sequential(graph), variant=chosen)))
        # In float32 a GPU rounds to TF32, and may do so in one of the two only.
        by_calls = measurer.reference(inputs)
        assert compare([item.cpu() for item in wanted], [item.cpu() for item in by_calls], rounded=torch.float16).within_tolerance
        observe = CaptureOptions(observe=measurer.capturer.can_observe)
        runner = measurer.capture(
            dataclasses.replace(random_placement(random.Random(3), graph, 2), variant=chosen), options=observe, private=True
        )
        assert isinstance(runner, GraphRunner), runner
        for mine, theirs in zip(measurer.outputs(runner, inputs), wanted, strict=True):
            assert torch.equal(mine, theirs)
        plain = measurer.capture(sequential(graph), options=observe, private=True)
        assert isinstance(plain, GraphRunner), plain
        if runner.captured is not None and plain.captured is not None:
            kernels = [sum(node.kind is NodeKind.KERNEL for node in item.captured.nodes) for item in (runner, plain)]
            record_property("kernels", kernels)
            # Of each convolution the bias and the relu are gone, and the additions; the one without a bias has zeros made for it. A real
            # cuDNN may add kernels that change the layout, to either.
            assert kernels[0] < kernels[1] or not gpu_rig.without_gpu()
        runner.close()
        plain.close()
        assert all(isinstance(measurer.solo_samples(index, 5, Variant.CUDNN_FUSED), Samples) for index in offered)
    finally:
        made.close()


def test_a_convolution_that_cudnn_has_no_engine_for_is_refused_and_runs_by_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    if why := cudnn_fused.refusal(torch.device("cuda:0")):
        pytest.skip(why)

    def without_engine(fusion: object, graph: object) -> Callable[[list[object]], None]:
        def run(slots: list[object]) -> None:
            raise RuntimeError("GET was unable to find an engine to execute this computation")

        return run

    monkeypatch.setattr(cudnn_fused, "_step", without_engine)
    found = capture(_Convolutions(8).eval(), (torch.randn(1, 4, 12, 12),), target="cuda", lowering=Lowering.FUSED)
    made = gpu_rig.Rig(found.program, found.constants)
    try:
        graph, measurer = made.program.graph, made.measurer
        regions = measurer.variants.regions = RegionLibrary(found.program, made.bound.device, "test")
        offered = [index for index in range(len(graph)) if Variant.CUDNN_FUSED in regions.variants(index)]
        alone = measurer.solo_samples(offered[0], 5, Variant.CUDNN_FUSED)
        assert isinstance(alone, Failure)
        assert alone.kind is FailureKind.UNAVAILABLE
        assert "unable to find an engine" in alone.detail
        chosen = tuple(int(Variant.CUDNN_FUSED) if index in offered else 0 for index in range(len(graph)))
        runner = measurer.capture(dataclasses.replace(sequential(graph), variant=chosen), private=True)
        assert isinstance(runner, GraphRunner), runner
        inputs = made.inputs(1)
        by_calls = measurer.reference(inputs)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(measurer.outputs(runner, inputs), by_calls, strict=True))
        runner.close()
    finally:
        made.close()
