"""Pooling by the kernel of our own: which is taken, what it computes, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autosched
from autosched.capture.export import Captured, capture
from autosched.core.graph import OpGraph
from autosched.core.program import Call, Many, Ref
from autosched.core.variants import Lowering, Variant
from autosched.runtime.bundle.format import read_bundles
from autosched.runtime.bundle.values import schema_for
from autosched.runtime.cpu_kernels import pooling, steps
from autosched.runtime.cpu_kernels.pooling import Pooling, geometry, read_pooling
from autosched.runtime.inductor.common import Refused
from autosched.runtime.instructions import RunKernel, instructions_of
from autosched.runtime.kernels import bind
from autosched.runtime.regions.pieces import offered_variants
from tests.conformance.own_kernels import (
    assert_degraded_without,
    assert_instructions_and_lanes_agree,
    assert_switched_off_by,
    bound_with,
    having,
    library_of,
    save_with,
    with_value,
)

OWN = Variant.OWN_POOLING
Body = Callable[[torch.Tensor], torch.Tensor]

pytestmark = pytest.mark.usefixtures("kernel")


class Net(nn.Module):
    """A convolution and what is made of its picture of 20 channels, which do not fill whole vectors of every processor."""

    def __init__(self, body: Body, channels: int = 20) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.body = nn.Conv2d(3, channels, 3), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.first(x))


def captured(
    body: Body, *size: int, channels: int = 20, lowering: Lowering = Lowering.REWRITTEN
) -> tuple[nn.Module, torch.Tensor, Captured]:
    model, x = Net(body, channels).eval(), torch.randn(*(size or (2, 3, 20, 17)), generator=torch.Generator().manual_seed(1))
    return model, x, capture(model, (x,), lowering=lowering)


COMPUTED: dict[str, Body] = {
    "largest": lambda x: F.max_pool2d(x, 3, 2, 1),
    "largest, side by side": lambda x: F.max_pool2d(x, 2),
    "largest, overlapping": lambda x: F.max_pool2d(x, 3, 1, 1),
    "largest, beyond the edge": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    "largest, uneven": lambda x: F.max_pool2d(x, (5, 3), (1, 4), (2, 1)),
    "largest, apart": lambda x: F.max_pool2d(x, (5, 3), 1, (2, 1), (1, 3)),
    "largest, a line": lambda x: F.max_pool2d(x, (1, 9), 1, (0, 4)),
    "mean": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "mean, side by side": lambda x: F.avg_pool2d(x, 2),
    "mean, no padding counted": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "mean, beyond the edge": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "mean, beyond the edge, no padding counted": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "mean, divided by a number": lambda x: F.avg_pool2d(x, (3, 5), 2, 1, divisor_override=-4),
    "mean of all": lambda x: F.adaptive_avg_pool2d(x, 1),
    "mean of all, as a sum": lambda x: x.mean((2, 3)),
    "mean of all, as a sum that stays a picture": lambda x: x.mean((-1, -2), keepdim=True),
}


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("channels", [1, 20, 64, 83])
def test_it_computes_what_pytorch_does(name: str, channels: int) -> None:
    model, x, found = captured(COMPUTED[name], channels=channels)
    results = []
    for width in (1, 2, 3):
        bound, [index] = bound_with(found, OWN, width)
        kernels = [item.name for item in instructions_of(bound.kernels[index]) or () if isinstance(item, RunKernel)]
        assert kernels == ["autosched_pooling"]
        results.append(bound.run([x])[0])
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert_instructions_and_lanes_agree(bound, x)
    with torch.no_grad():
        wanted = model(x)
    assert results[0].shape == wanted.shape
    assert torch.allclose(results[0], wanted, rtol=1e-5, atol=1e-6)


def test_the_largest_are_taken_exactly_and_nothing_hides_a_number_that_is_none() -> None:
    body: Body = lambda x: F.max_pool2d(x * 1.0, 3, 2, 1)  # noqa: E731
    x = torch.randn(1, 20, 9, 9).contiguous(memory_format=torch.channels_last)
    x[0, 3, 3, 3], x[0, 4, 0, 0], x[0, 5], x[0, 6, 8, 8] = math.nan, math.inf, -math.inf, -math.nan

    class Bare(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return body(x)

    found = capture(Bare(), (x,), lowering=Lowering.ATEN)
    graph = found.program.graph
    [(operator, call)] = [(item, call) for item in graph.operators for call in item.calls if "pool" in call.target]
    assert read_pooling(call, graph) is not None
    bound = bind(found.program, found.constants, "cpu")
    made = steps.own_kernel(operator, bound, 1, OWN, {})
    assert not isinstance(made, Refused)
    slots = bound.new_slots([x])
    with torch.inference_mode():
        for kernel in bound.kernels:
            kernel(slots)
        made(slots)
    assert torch.equal(torch.nan_to_num(slots[operator.writes[0]], 7.0), torch.nan_to_num(body(x), 7.0))
    assert slots[operator.writes[0]].isnan().sum() == 5


def test_random_windows_are_as_pytorchs() -> None:
    rng, seen = random.Random(0), 0
    for _ in range(60):
        size = rng.randint(1, 6), rng.randint(1, 6)
        padding = rng.randint(0, size[0] // 2), rng.randint(0, size[1] // 2)
        stride, apart = (rng.randint(1, 4), rng.randint(1, 4)), (rng.randint(1, 2), rng.randint(1, 2))
        ceil, mean, counted = rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.5
        shape = rng.randint(1, 3), 3, rng.randint(14, 24), rng.randint(14, 24)

        def body(
            x: torch.Tensor,
            size: tuple[int, int] = size, stride: tuple[int, int] = stride, padding: tuple[int, int] = padding,
            apart: tuple[int, int] = apart, ceil: bool = ceil, mean: bool = mean, counted: bool = counted,
        ) -> torch.Tensor:  # fmt: skip
            return F.avg_pool2d(x, size, stride, padding, ceil, counted) if mean else F.max_pool2d(x, size, stride, padding, apart, ceil)

        model, x, found = captured(body, *shape, channels=rng.choice([5, 17, 70]))
        bound, indices = bound_with(found, OWN, 2)
        seen += len(indices)
        with torch.no_grad():
            assert torch.allclose(bound.run([x])[0], model(x), rtol=1e-5, atol=1e-6), (size, stride, padding, apart, ceil, mean, counted)
    assert seen == 60


NOT_TAKEN: dict[str, Body] = {
    "places as well": lambda x: F.max_pool2d(x, 2, return_indices=True)[1] * 1.0,
    "means of parts": lambda x: F.adaptive_avg_pool2d(x, 3),
    "means of lines": lambda x: x.mean((1, 3)),
    "another type": lambda x: F.max_pool2d(x.double(), 2),
    "channels apart": lambda x: F.max_pool2d(torch.sin(x.flatten(1)).view(2, 20, 18, 15), 2),
    "in another type": lambda x: x.mean((2, 3), dtype=torch.float64),
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_others_stay_pytorchs(name: str) -> None:
    _, _, found = captured(NOT_TAKEN[name])
    assert having(found, OWN) == []
    kernel = library_of(found).kernel(len(found.program.graph) - 1, 1, OWN, bind(found.program, found.constants, "cpu"))
    assert isinstance(kernel, Refused)


def test_what_does_not_fit_is_not_read() -> None:
    _, _, found = captured(COMPUTED["largest"])
    graph = found.program.graph
    [call] = [call for item in graph.operators for call in item.calls if "pool" in call.target]
    source, made = call.reads()[0], call.outputs[0]
    assert read_pooling(call, graph) is not None

    spec, result = graph.values[source].spec, graph.values[made].spec
    for slot, fields in (
        (source, {"dtype": "float16"}), (source, {"shape": spec.shape[1:], "strides": spec.strides[1:]}), (source, {"strides": ()}),
        (source, {"strides": (-1, *spec.strides[1:])}), (source, {"strides": (spec.strides[0], 2, *spec.strides[2:])}),
        (source, {"shape": (0, *spec.shape[1:])}), (source, {"shape": (spec.shape[0], 7, *spec.shape[2:])}), (made, {"dtype": "float64"}),
        (made, {"strides": (*result.strides[:2], result.strides[2] + 1, result.strides[3])}),
    ):  # fmt: skip
        assert read_pooling(call, with_value(graph, slot, **fields)) is None, fields
    assert read_pooling(dataclasses.replace(call, outputs=(-1,)), graph) is None
    assert read_pooling(dataclasses.replace(call, outputs=(made, made)), graph) is None
    assert read_pooling(dataclasses.replace(call, args=(Ref(-3), *call.args[1:])), graph) is None
    assert read_pooling(dataclasses.replace(call, args=(call.args[0], Many((0, 3)), *call.args[2:])), graph) is None
    assert read_pooling(dataclasses.replace(call, args=(*call.args[:2], Many((0, 1)))), graph) is None
    assert read_pooling(dataclasses.replace(call, args=(*call.args[:3], Many((-1, 1)))), graph) is None
    mean = Call(
        "aten::avg_pool2d.default", (call.args[0], Many((3, 3)), Many((2, 2)), Many((1, 1))), (("divisor_override", 0),), call.outputs
    )
    assert read_pooling(mean, graph) is None
    given = read_pooling(dataclasses.replace(mean, kwargs=(("divisor_override", 7), ("count_include_pad", False))), graph)
    assert given == Pooling(source, made, (3, 3), (2, 2), (1, 1), mean=True, divisor=7, padded=False)


def test_a_picture_that_is_part_of_another_is_pooled_where_it_lies() -> None:
    class Parts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.max_pool2d((x * 2.0)[:, 8:28, 1:, 2:], 3, 2)

    x = torch.randn(2, 40, 12, 13).contiguous(memory_format=torch.channels_last)
    found = capture(Parts(), (x,), lowering=Lowering.REWRITTEN)
    bound, _ = bound_with(found, OWN)
    assert torch.allclose(bound.run([x])[0], Parts()(x))


def test_an_operator_that_a_convolution_is_part_of_pools_so_whatever_its_way() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.second(F.max_pool2d(torch.relu(self.first(x)), 2)))

    model, x = Whole().eval(), torch.randn(1, 3, 24, 24)
    found = capture(model, (x,), lowering=Lowering.FUSED)
    for variant in (Variant.WINOGRAD_2, Variant.OWN_CONVOLUTION, OWN):
        bound, indices = bound_with(found, variant)
        names = [item.name for index in indices for item in instructions_of(bound.kernels[index]) or () if isinstance(item, RunKernel)]
        assert ("autosched_pooling" in names) == (variant is not Variant.WINOGRAD_2 or len(indices) == 2)
        with torch.no_grad():
            assert torch.allclose(bound.run([x])[0], model(x), atol=1e-5)


def test_a_kernel_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, found = captured(COMPUTED["mean"])
    [index] = having(found, OWN)

    def wrong(item: Pooling, graph: OpGraph, width: int) -> torch.Tensor:
        return geometry(dataclasses.replace(item, divisor=7), graph, width)

    monkeypatch.setattr(steps, "POOLING", dataclasses.replace(steps.WAYS[OWN], numbers=wrong))
    made = library_of(found).kernel(index, 1, OWN, bind(found.program, found.constants, "cpu"))
    assert isinstance(made, Refused)
    assert "computes something else" in made.reason


def test_it_is_offered_where_operators_have_variants_and_not_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for lowering in (Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED):
        _, _, found = captured(COMPUTED["largest"], lowering=lowering)
        assert len(having(found, OWN)) == (0 if lowering is Lowering.ATEN else 1)
        assert not any(OWN in row for row in offered_variants(found.program, "cuda"))
    assert_switched_off_by("AUTOSCHED_POOLING", OWN, found, having(found, OWN)[0], monkeypatch)
    monkeypatch.setenv("AUTOSCHED_POOLING", "0")
    assert not any(pooling.may_be_pooling(operator, found.program.graph) for operator in found.program.graph.operators)


def test_a_file_that_uses_it_is_loaded_and_follows_the_models_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, found = captured(COMPUTED["mean"], lowering=Lowering.FUSED)
    count = save_with(tmp_path / "net.autosched", found, OWN)
    assert schema_for(read_bundles(tmp_path / "net.autosched")) == 12
    fast = autosched.load(tmp_path / "net.autosched", model, strict=True)
    with torch.no_grad():
        first = fast(x)
        assert torch.allclose(first, model(x), atol=1e-5)
        for parameter in model.parameters():
            parameter.mul_(-0.5)
        assert torch.allclose(fast(x), model(x), atol=1e-5)
        assert not torch.allclose(fast(x), first, atol=1e-2)
    assert_degraded_without("AUTOSCHED_POOLING", "pooling", count, tmp_path / "net.autosched", model, monkeypatch)
