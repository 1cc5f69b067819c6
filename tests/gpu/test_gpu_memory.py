"""What is only true of real memory: workspaces of the libraries, pools that many graphs share, and constants behind bare addresses."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autosched.capture.export import capture
from autosched.core.program import ConstantSource
from autosched.core.records import Failure
from autosched.core.schedule import Schedule, sequential
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.runtime.cuda.key import cuda_device_key, cuda_software_key
from autosched.runtime.cuda.load import prepare_runner
from autosched.runtime.load import LoadedModel, load
from autosched.runtime.numerics import compare
from autosched.runtime.plan import make_plan
from tests.conformance.bundles import evidence_for
from tests.conformance.graphs import random_placement
from tests.conformance.programs import branches_program
from tests.gpu.gpu_rig import Rig, without_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_only(reason="the double with tensors has no allocator of its own")]


@pytest.fixture
def rig() -> Iterator[Rig]:
    program, constants = branches_program(branches=4, depth=3, size=64 if without_gpu() else 512)
    made = Rig(program, constants)
    yield made
    made.close()


def spread(rig: Rig, seed: int) -> Schedule:
    return random_placement(random.Random(seed), rig.program.graph, 3)


def fill_what_is_free(rig: Rig) -> None:
    """Give NaN to whatever the allocator hands out again."""
    rig.backend.release_cached()
    held = [torch.full((size,), torch.nan, device=rig.backend.device) for size in (1 << 10, 1 << 16, 1 << 20, 8 << 20, 8 << 20)]
    rig.backend.synchronize()
    del held


def fill_the_device(rig: Rig) -> None:
    """Let the allocator cache, for a stream that nobody else uses, all that the driver gives."""
    # Two pages are left: what is allocated before a capture begins would give all of it back.
    left = (torch.cuda.mem_get_info()[0] >> 21) - 2
    held, pages = [], left
    with rig.backend.on(rig.capturer.streams.named("noise")):
        while pages > 0:
            try:
                held.append(torch.empty(pages << 21, dtype=torch.uint8, device=rig.backend.device))
            except torch.OutOfMemoryError:
                # A driver need not give all that it says is free, nor in one piece.
                pages //= 2
            else:
                left -= pages
                pages = min(pages, left)


def test_a_graph_outlives_the_graphs_that_were_captured_beside_it(rig: Rig) -> None:
    """Trap 4: the workspaces of cuBLAS that it reads must not go with another graph, nor when PyTorch clears them all."""
    plan = make_plan(rig.program.graph, spread(rig, 1))
    # Tests before this one have left workspaces on these streams, in pools that are gone.
    assert rig.capturer.hold_workspaces(plan) is None
    kept = rig.capture(plan)
    inputs = rig.inputs(1)
    wanted = [item.clone() for item in rig.measurer.reference(inputs)]
    for seed in range(2, 6):
        other = rig.capture(make_plan(rig.program.graph, spread(rig, seed)))
        assert rig.backend.same(other(inputs), wanted)
        other.close()
        del other
        gc.collect()
        fill_what_is_free(rig)
        assert rig.backend.same(kept(inputs), wanted)
    torch._C._cuda_clearCublasWorkspaces()
    fill_what_is_free(rig)
    for _ in range(5):
        assert rig.backend.same(kept(inputs), wanted)


def test_a_served_graph_reads_no_workspaces_that_somebody_made_on_its_streams(rig: Rig) -> None:
    """Trap 4: a user's products on a stream that PyTorch handed out twice leave memory there that goes when all are cleared."""
    graph, inputs = rig.program.graph, rig.inputs(1)
    plan = make_plan(graph, spread(rig, 1))
    for lane in range(plan.lanes):
        with rig.backend.on(rig.capturer.streams.lane(lane)):
            rig.backend.multiply()
    rig.backend.synchronize()
    wanted = [item.clone() for item in rig.measurer.reference(inputs)]
    kept = prepare_runner(rig.capturer, rig.bound, graph, plan, inputs)
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    fill_what_is_free(rig)
    for _ in range(5):
        assert rig.backend.same(kept(inputs), wanted)
    kept.close()


def test_whether_libraries_keep_their_workspaces_is_seen(rig: Rig) -> None:
    torch._C._cuda_clearCublasWorkspaces()
    with rig.backend.on(rig.capturer.streams.named("fresh")):
        before = rig.backend.allocated_bytes()
        rig.backend.multiply()
        left = rig.backend.allocated_bytes() - before
        assert rig.backend.keeps_workspaces() == (left > 0)


def test_a_served_graph_outlives_the_one_that_was_prepared_first(rig: Rig) -> None:
    """Trap 4: the first graph with products on some lanes must not have made their workspaces in its own pool."""
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    fill_what_is_free(rig)
    graph, inputs = rig.program.graph, rig.inputs(1)
    wanted = [item.clone() for item in rig.measurer.reference(inputs)]
    first, kept = (prepare_runner(rig.capturer, rig.bound, graph, make_plan(graph, spread(rig, 1)), inputs) for _ in range(2))
    assert (rig.capturer._workspaces.pool is not None) == rig.backend.keeps_workspaces()
    workspaces = {item["address"] for item in torch.cuda.memory_snapshot() if item["segment_pool_id"] not in ((0, 0), first.pool)}
    first.close()
    del first
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    fill_what_is_free(rig)
    assert workspaces <= {item["address"] for item in torch.cuda.memory_snapshot()}
    for _ in range(5):
        assert rig.backend.same(kept(inputs), wanted)
    kept.close()


def test_graphs_that_serve_one_after_the_other_do_not_grow_memory(rig: Rig) -> None:
    graph, inputs = rig.program.graph, rig.inputs(1)
    plan = make_plan(graph, spread(rig, 1))
    reserved: list[int] = []
    for _ in range(8):
        served = prepare_runner(rig.capturer, rig.bound, graph, plan, inputs)
        served(inputs)
        served.close()
        reserved.append(torch.cuda.memory_reserved())
    assert max(reserved[4:]) <= max(reserved[:4])


def test_candidates_in_one_pool_do_not_grow_memory(rig: Rig) -> None:
    """Trap 8."""
    pool = rig.capturer.scratch_pool()
    reserved: list[int] = []
    for turn in range(30):
        plan = make_plan(rig.program.graph, spread(rig, turn % 5))
        made = rig.capturer.capture(rig.bound, plan, rig.measurer.static, graph=rig.program.graph, pool=pool)
        assert not isinstance(made, Exception)
        assert rig.backend.same(made(rig.inputs(1)), rig.measurer.reference(rig.inputs(1)))  # type: ignore[operator]
        made.close()  # type: ignore[union-attr]
        reserved.append(torch.cuda.memory_reserved())
    assert max(reserved[15:]) <= max(reserved[:15])


@pytest.mark.gpu_alone
@pytest.mark.parametrize("broken_before", [False, True])
def test_memory_that_is_only_cached_is_given_back_for_a_capture(rig: Rig, broken_before: bool) -> None:
    inputs = rig.inputs(1)
    wanted = [item.clone() for item in rig.measurer.reference(inputs)]
    plan = make_plan(rig.program.graph, spread(rig, 1))
    if broken_before:
        waiting = replace(rig.bound, kernels=(lambda slots: rig.backend.synchronize(), *rig.bound.kernels[1:]))
        assert isinstance(rig.capturer.capture(waiting, plan, rig.measurer.static, graph=rig.program.graph), Failure)
    # A driver may have no memory left for a stream.
    for lane in range(plan.lanes):
        rig.capturer.streams.lane(lane)
    rig.backend.release_cached()
    fill_the_device(rig)
    reserved = torch.cuda.memory_reserved()
    runner = rig.capture(plan)
    assert rig.backend.same(runner(inputs), wanted)
    runner.close()
    rig.backend.release_cached()
    assert torch.cuda.memory_reserved() < reserved


def test_a_graph_keeps_the_constants_whose_addresses_it_holds() -> None:
    """Trap 9."""
    program, constants = branches_program(branches=2, depth=2, size=64)
    rig = Rig(program, constants)
    kept = rig.capture(make_plan(program.graph, spread(rig, 1)))
    inputs = rig.inputs(1)
    wanted = [item.clone() for item in rig.measurer.reference(inputs)]
    backend = rig.backend
    rig.close()
    del rig, constants
    gc.collect()
    backend.release_cached()
    held = [torch.full((64, 64), torch.nan, device=backend.device) for _ in range(64)]
    backend.synchronize()
    assert backend.same(kept(inputs), wanted)
    del held
    kept.close()


class Folding(torch.nn.Module):
    """Convolutions whose batch norms are folded into them."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3, padding=1, bias=False), torch.nn.BatchNorm2d(16)) for _ in range(3)]
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).relu()


def folding_shapes(model: torch.nn.Module, *rows: int) -> bytes:
    made = []
    device, software = cuda_device_key(0), cuda_software_key(0)
    for count in rows:
        captured = capture(model, (torch.randn(count, 16, 8, 8, device="cuda"),), rewrite=True)
        graph, program = captured.program.graph, captured.program
        literals = {item.name: captured.constants[item.value] for item in program.bindings if item.source is ConstantSource.LITERAL}
        made.append(make_bundle(program, sequential(graph), evidence_for(len(graph), device, graph.hash), literals, device, software))
    return encode_bundle(*made)


def require_same(loaded: LoadedModel, model: torch.nn.Module, *rows: int) -> None:
    for count in rows:
        x = torch.randn(count, 16, 8, 8, device="cuda")
        with torch.no_grad():
            assert compare([loaded(x).cpu()], [model(x).cpu()], rounded=torch.float16).within_tolerance


def test_what_several_shapes_fold_alike_is_in_memory_once() -> None:
    torch.manual_seed(0)
    model = Folding().eval().cuda()
    data = folding_shapes(model, 1, 2, 4)
    loaded = load(data, model, max_shapes=2, prepare="first-use", strict=True)
    folded = 3 * 16 * 16 * 9 * 4
    require_same(loaded, model, 1)
    # Shapes may be made ready on any streams.
    with torch.cuda.stream(torch.cuda.Stream()):
        require_same(loaded, model, 2)
    assert loaded.report().shared_bytes == folded
    # The one whose weights the others took goes; they stay.
    require_same(loaded, model, 4)
    assert (loaded.report().evictions, loaded.report().shared_bytes) == (1, folded)
    torch.cuda.empty_cache()
    held = [torch.full((16, 16, 3, 3), torch.nan, device="cuda") for _ in range(64)]
    require_same(loaded, model, 2, 4)
    del held
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    require_same(loaded, model, 2)
    assert loaded.report().shared_bytes == 0, "one has the new weights, and one the old"
    require_same(loaded, model, 4, 1)
    assert loaded.report().shared_bytes == folded
    with torch.no_grad():
        model.layers[0][0].weight.data.mul_(1.5)
    loaded.refresh()
    require_same(loaded, model, 1, 2, 4)
    assert not loaded.report().stepped_aside


_UNDER_SETTINGS = """
import torch
import autosched
from tests.gpu.test_gpu_memory import Folding, folding_shapes, require_same

# Of which little is enough for the allocator to collect what the eager runs before a capture have left.
torch.cuda.set_per_process_memory_fraction(0.05)
model = Folding().eval().cuda()
loaded = autosched.load(folding_shapes(model, 1, 1024), model)
require_same(loaded, model, 1, 1024, 1)
print(*(shape.ready for shape in loaded.report().shapes), loaded.report().reason)
"""


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.01", "True True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:21,roundup_power2_divisions:4", "True True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "True True"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "remove"),
    ],
)
def test_under_settings_of_the_allocator_schedules_run_or_say_why_not(name: str, value: str, said: str) -> None:
    if "expandable" in value and without_gpu():
        pytest.skip("the emulator has no virtual memory")
    code = f"import sys; sys.path.append({str(Path(__file__).resolve().parents[2])!r})\n{_UNDER_SETTINGS}"
    environment = {**os.environ, name: value}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert said in done.stdout, done.stdout + done.stderr[-2000:]
