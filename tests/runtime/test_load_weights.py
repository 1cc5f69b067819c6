"""What ``load`` says of a model whose weights are not all here: on the meta device, or spread over several processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autosched
from autosched.capture.export import capture
from autosched.core.errors import IncompatibleArtifact, UnsupportedGraph
from autosched.core.wrappers import spread_over_processes
from autosched.export.bundle import encode_bundle
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches

needs_gloo = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="PyTorch is built without gloo")


def reason_of(model: nn.Module) -> str:
    bundle = encode_bundle(two_branches_bundle(TwoBranches().eval()))
    with pytest.raises(IncompatibleArtifact) as raised:
        autosched.load(bundle, model, strict=True)
    assert len(raised.value.differences) == 1
    return str(raised.value)


def test_a_model_without_values_is_told_to_load_them() -> None:
    with torch.device("meta"):
        model = TwoBranches().eval()
    assert "is on the meta device, which holds no values" in reason_of(model)


def test_a_weight_without_values_is_named() -> None:
    """As of a part that accelerate keeps elsewhere until it is called."""
    model = TwoBranches().eval()
    name = [name for name, _ in model.named_parameters()][-1]
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, nn.Parameter(model.get_parameter(name).to("meta")))
    assert f"weight {name} is on the meta device" in reason_of(model)


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@needs_gloo
@pytest.mark.usefixtures("one_process")
def test_weights_that_processes_share_are_refused_by_name() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    model = distribute_module(nn.Sequential(TwoBranches()).eval(), init_device_mesh("cpu", (1,)))
    name = spread_over_processes(model).split()[1]
    assert name in model.state_dict()
    assert f"weight {name} is a DTensor, which several processes share" in reason_of(model)
    with pytest.raises(UnsupportedGraph, match=f"weight {name} is a DTensor, .* as it was before it was sharded"):
        capture(model, (torch.randn(2, 4),))


@needs_gloo
@pytest.mark.usefixtures("one_process")
def test_a_part_that_processes_share_is_refused_by_name() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model = nn.Sequential(
        FullyShardedDataParallel(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu"))
    ).eval()
    assert "part 0 is a FullyShardedDataParallel, which several processes share" in reason_of(model)
    with pytest.raises(UnsupportedGraph, match=r"part 0 is a FullyShardedDataParallel, .* as it was before it was sharded"):
        capture(model, (torch.randn(2, 4),))
    assert "the model is a Fully" in reason_of(model[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_whole_weights_are_spread_over_nothing() -> None:
    model = nn.Sequential(TwoBranches(), torch.jit.script(nn.Linear(2, 2)))
    assert spread_over_processes(model) == ""
