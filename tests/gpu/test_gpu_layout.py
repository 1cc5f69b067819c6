"""Layouts that operators give on a GPU: what a capture on a CPU notes must be what runs, or compiled code would refuse it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from autosched.capture.export import capture
from autosched.capture.passes.channels_last import group_norm_keeps_order, in_channels_last_order
from autosched.capture.passes.identities import same_layout
from autosched.core.schedule import sequential
from autosched.core.specs import spec_of
from autosched.core.variants import Lowering, Variant
from autosched.runtime.calls import compile_call
from autosched.runtime.float32 import full_float32
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.numerics import compare
from autosched.runtime.plan import make_plan
from autosched.runtime.regions.library import RegionLibrary
from tests.capture.test_channels_last import _Net
from tests.gpu import gpu_rig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.gpu_only(reason="a CPU's kernels give other layouts")]

Function = Callable[[torch.Tensor, Callable[..., torch.Tensor]], torch.Tensor]
LAST = torch.channels_last

# Each is given an image in channels-last order, and something that makes more tensors like it.
KEEPERS: dict[str, Function] = {
    "conv": lambda x, new: functional.conv2d(x, new(32, 16, 3, 3)),
    "conv_weight_in_order": lambda x, new: functional.conv2d(x.contiguous(), new(32, 16, 3, 3).to(memory_format=LAST)),
    "conv_1x1": lambda x, new: functional.conv2d(x, new(32, 16, 1, 1)),
    "conv_one_pixel": lambda x, new: functional.conv2d(x.mean((2, 3), keepdim=True), new(16, 16, 1, 1)),
    "depthwise": lambda x, new: functional.conv2d(x, new(16, 1, 3, 3).to(memory_format=LAST), padding=1, groups=16),
    "grouped": lambda x, new: functional.conv2d(x, new(16, 4, 3, 3).to(memory_format=LAST), groups=4),
    "dilated": lambda x, new: functional.conv2d(x, new(8, 16, 3, 3).to(memory_format=LAST), dilation=2),
    "same": lambda x, new: functional.conv2d(x, new(8, 16, 2, 2).to(memory_format=LAST), padding="same"),
    "transposed": lambda x, new: functional.conv_transpose2d(x, new(16, 8, 2, 2).to(memory_format=LAST), stride=2),
    "batch_norm": lambda x, new: functional.batch_norm(x, new(16), new(16).square() + 1, new(16), new(16)),
    "gate": lambda x, new: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "add_row_major": lambda x, new: x + new(2, 16, 8, 8),
    "row_major_add": lambda x, new: new(2, 16, 8, 8) + x,
    "bias": lambda x, new: x * new(1, 16, 1, 1),
    "max_pool": lambda x, new: functional.max_pool2d(x, 3, 2, 1),
    "avg_pool": lambda x, new: functional.avg_pool2d(x, 3, 1, 1),
    "adaptive_avg_pool_1": lambda x, new: functional.adaptive_avg_pool2d(x, 1),
    "adaptive_avg_pool_3": lambda x, new: functional.adaptive_avg_pool2d(x, 3),
    "adaptive_max_pool": lambda x, new: functional.adaptive_max_pool2d(x, 3),
    "cat": lambda x, new: torch.cat([x, x], 1),
    "cat_mixed": lambda x, new: torch.cat([x, new(2, 16, 8, 8)], 1),
    "cat_mixed_row_major_first": lambda x, new: torch.cat([new(2, 16, 8, 8), x], 1),
    "part": lambda x, new: x[:, :8].relu(),
    "pad": lambda x, new: functional.pad(x, (1, 1, 1, 1)),
    "nearest": lambda x, new: functional.interpolate(x, scale_factor=2.0),
    "bilinear": lambda x, new: functional.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "bicubic": lambda x, new: functional.interpolate(x, scale_factor=2.0, mode="bicubic"),
    "softmax": lambda x, new: x.softmax(1),
    "layer_norm": lambda x, new: functional.layer_norm(x.permute(0, 2, 3, 1), [16]),
    "prelu": lambda x, new: functional.prelu(x, new(16)),
    "glu": lambda x, new: functional.glu(x, 1),
    "clone": lambda x, new: x.clone(),
    "product": lambda x, new: x @ x,
    "sum": lambda x, new: x.sum(1, keepdim=True),
    "repeat": lambda x, new: x.repeat(1, 2, 1, 1),
    "flip": lambda x, new: x.flip(3),
    "reshape": lambda x, new: x.reshape(2, -1),
    "instance_norm": lambda x, new: functional.instance_norm(x, new(16), new(16).square() + 1, use_input_stats=False),
}
ROW_MAJOR: dict[str, Function] = {
    "reflect": lambda x, new: functional.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replicate": lambda x, new: functional.pad(x, (1, 1, 1, 1), mode="replicate"),
    "pixel_shuffle": lambda x, new: functional.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x, new: functional.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x, new: functional.channel_shuffle(x, 4),
    "roll": lambda x, new: x.roll(1, 2),
    "max_unpool": lambda x, new: functional.max_unpool2d(*functional.max_pool2d(x.contiguous(), 2, return_indices=True), 2),
}


def _made(function: Function, device: str, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    with torch.inference_mode():
        return function(new(2, 16, 8, 8).to(memory_format=LAST), new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KEEPERS)
def test_the_layout_on_a_gpu_is_the_one_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    here, there = spec_of(_made(KEEPERS[name], "cpu", dtype)), spec_of(_made(KEEPERS[name], "cuda", dtype))
    assert same_layout(here, there), (here, there)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_gives_heads_in_the_order_they_came_in(packed: bool, dtype: torch.dtype) -> None:
    """Each of PyTorch's kernels for it has a rule of its own; cuDNN's, which a Hopper prefers in half precision, looks at the query."""

    def made(device: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(2, 128, 3, 4, 64, generator=generator).to(device, dtype)
        q, k, v = rows.permute(2, 0, 3, 1, 4).unbind(0) if packed else (rows[:, :, place].clone().transpose(1, 2) for place in range(3))
        with torch.inference_mode():
            return functional.scaled_dot_product_attention(q, k, v)

    here, there = spec_of(made("cpu")), spec_of(made("cuda"))
    assert same_layout(here, there), (here, there)


@pytest.mark.parametrize("name", ROW_MAJOR)
def test_what_is_given_row_major_writes_nothing_else_on_a_gpu(name: str) -> None:
    there = _made(ROW_MAJOR[name], "cuda", torch.float32)
    assert there.is_contiguous()
    assert not in_channels_last_order(spec_of(there))


def test_a_norm_of_groups_keeps_the_order_on_a_gpu_where_it_is_said_to() -> None:
    there = _made(lambda x, new: functional.group_norm(x, 4), "cuda", torch.float32)
    assert in_channels_last_order(spec_of(there)) == group_norm_keeps_order()
    assert there.is_contiguous() != group_norm_keeps_order()


class _Between(nn.Module):
    """A net with what keeps the order and what loses it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.deep, self.point = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 16, 1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.pad(torch.relu(self.norm(self.first(x))), (1, 1, 1, 1), mode="reflect")
        y = self.point(self.deep(x))
        y = y * y.mean((2, 3), keepdim=True).sigmoid() + x
        return functional.pixel_shuffle(self.up(functional.interpolate(y, scale_factor=2.0)), 2)


@pytest.mark.parametrize("lowering", [Lowering.REWRITTEN, Lowering.FUSED])
@pytest.mark.parametrize("build", [_Net, _Between])
def test_every_tensor_of_a_program_has_the_strides_it_was_captured_with(build: type[nn.Module], lowering: Lowering) -> None:
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(2, 3, 8, 8)
    found = capture(model, (x,), target="cuda", lowering=lowering)
    assert {item.name: item.applied for item in found.rewrites}["channels_last"] > 0
    device = torch.device("cuda:0")
    bound = bind(found.program, {value: tensor.to(device) for value, tensor in found.constants.items()}, device)
    values = found.program.graph.values
    with torch.inference_mode(), full_float32():
        slots = bound.new_slots([x.to(device)])
        for operator in found.program.graph.operators:
            for call in operator.calls:
                compile_call(call, device)(slots)
                for value in call.outputs:
                    if value >= 0:
                        assert same_layout(spec_of(slots[value]), values[value].spec), call.target
        wanted = torch.utils._pytree.tree_leaves(model(x))
    assert compare([item.cpu() for item in bound.outputs(slots)], wanted).within_tolerance


def test_regions_of_a_net_compile_with_the_layouts_of_its_program() -> None:
    torch.manual_seed(0)
    found = capture(_Net().eval(), (torch.randn(2, 3, 8, 8),), target="cuda", lowering=Lowering.FUSED)
    rig = gpu_rig.Rig(found.program, found.constants)
    try:
        graph = found.program.graph
        regions = RegionLibrary(found.program, rig.bound.device, "test")
        rig.measurer.variants.regions = regions
        chosen = tuple(int(Variant.COMPILED) if Variant.COMPILED in regions.variants(index) else 0 for index in range(len(graph)))
        assert any(chosen)
        inputs = random_inputs(found.program, 0, rig.bound.device)
        made = rig.measurer.reference(inputs, make_plan(graph, dataclasses.replace(sequential(graph), variant=chosen)))
        assert regions.refusals == ()
        by_calls = rig.measurer.reference(inputs)
        assert compare([item.cpu() for item in made], [item.cpu() for item in by_calls], rounded=torch.float16).within_tolerance
    finally:
        rig.close()
