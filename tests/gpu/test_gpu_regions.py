"""Compiled regions on a GPU: captured in any variant, audited, bitwise equal to the same variants on one stream."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.records import PairRecord, Samples
from autosched.core.schedule import sequential
from autosched.core.variants import Lowering, Variant
from autosched.runtime import sm_share
from autosched.runtime.graph_runner import GraphRunner
from autosched.runtime.numerics import compare
from autosched.runtime.plan import make_plan
from autosched.runtime.region_store import RegionStore
from autosched.runtime.regions import RegionLibrary
from autosched.verify.graph_audit import audit_graph
from tests.conformance.graphs import random_placement
from tests.gpu import gpu_rig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.gpu_only(reason="Triton writes kernels for a GPU")]


class _Branches(nn.Module):
    """Two products with epilogues that may run at the same time, and a normalisation of both."""

    def __init__(self, size: int = 256) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = torch.relu(self.a(x)) * 2.0, torch.sigmoid(self.b(x)) + 1.0
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


def test_a_second_library_finds_everything_kept(rig: gpu_rig.Rig) -> None:
    first = rig.measurer.variants.regions
    assert first is not None
    again = RegionLibrary(rig.program, rig.bound.device, "test", first._store)
    index = next(index for index in range(len(rig.program.graph)) if Variant.COMPILED in again.variants(index))
    first.kernel(index, 1, Variant.COMPILED)
    again.kernel(index, 1, Variant.COMPILED)
    assert (again.compiled, again.reused) == (0, 1)


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
