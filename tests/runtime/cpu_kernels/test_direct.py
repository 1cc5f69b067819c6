"""Convolutions summed by the kernel of our own: which are taken, what they compute, and what is refused."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autosched
from autosched.capture.export import Captured, capture
from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole
from autosched.core.program import Call, Ref
from autosched.core.schedule import sequential
from autosched.core.variants import Lowering, Variant
from autosched.pipeline.inductor_capture import capture_inductor
from autosched.runtime.cpu_kernels import steps, ways
from autosched.runtime.cpu_kernels.convolution import Convolution, Follows, read_convolution
from autosched.runtime.cpu_kernels.direct import geometry, read_direct, read_scaled
from autosched.runtime.cpu_kernels.library import Library, kernel_library
from autosched.runtime.cpu_kernels.weights import summed
from autosched.runtime.inductor.common import Refused
from autosched.runtime.instructions import RunKernel, instructions_of
from autosched.runtime.kernels import bind
from autosched.runtime.lane_pool import LanePool
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.plan import make_plan
from autosched.runtime.regions.pieces import offered_variants
from tests.conformance.own_kernels import (
    assert_degraded_without,
    assert_instructions_and_lanes_agree,
    assert_switched_off_by,
    bound_with,
    error_of,
    library_of,
    save_with,
    with_value,
)

OWN = Variant.OWN_CONVOLUTION
Body = Callable[[nn.Module, torch.Tensor], torch.Tensor]

pytestmark = pytest.mark.usefixtures("kernel")


class Net(nn.Module):
    """Some convolutions of 40 channels, called by ``body``; 40 do not fill whole vectors of every processor."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.large = nn.Conv2d(3, 40, 3, stride=2), nn.Conv2d(3, 70, 7, stride=2, padding=3)
        self.one, self.bare, self.many = nn.Conv2d(40, 24, 1), nn.Conv2d(40, 40, 1, bias=False), nn.Conv2d(40, 70, 5, padding=2)
        self.second, self.uneven = nn.Conv2d(40, 33, 1, stride=2), nn.Conv2d(40, 40, (1, 7), padding=(0, 3))
        self.spread = nn.Conv2d(40, 40, 3, stride=(2, 1), padding=(3, 2), dilation=(2, 3))
        self.deep, self.spaced = nn.Conv2d(40, 40, 3, padding=1, groups=40), nn.Conv2d(40, 40, 3, dilation=2, groups=40, bias=False)
        self.down = nn.Conv2d(40, 40, 5, stride=2, padding=2, groups=40)
        self.pairs, self.fours = nn.Conv2d(40, 40, 3, groups=20, bias=False), nn.Conv2d(40, 40, 3, stride=2, padding=1, groups=10)
        self.eights, self.halves = nn.Conv2d(40, 40, 3, padding=1, groups=5), nn.Conv2d(40, 96, (2, 5), stride=(1, 3), padding=2, groups=2)
        self.fives, self.twice = nn.Conv2d(40, 40, 3, groups=8), nn.Conv2d(40, 80, 3, groups=40)
        self.back = nn.ConvTranspose2d(40, 20, 3)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def captured(body: Body, *size: int, lowering: Lowering = Lowering.REWRITTEN) -> tuple[nn.Module, torch.Tensor, Captured]:
    model, x = Net(body).eval(), torch.randn(*(size or (1, 3, 23, 27)), generator=torch.Generator().manual_seed(1))
    return model, x, capture(model, (x,), lowering=lowering)


COMPUTED: dict[str, Body] = {
    "channels apart": lambda m, x: m.first(x),
    "channels apart, padding": lambda m, x: torch.relu(m.large(x)),
    "one by one": lambda m, x: m.one(m.first(x)),
    "no bias": lambda m, x: m.bare(m.first(x)),
    "long sums": lambda m, x: m.many(m.first(x)),
    "every second pixel": lambda m, x: m.second(m.first(x)),
    "rows alone": lambda m, x: m.uneven(m.first(x)),
    "stride, padding and dilation": lambda m, x: m.spread(m.first(x)),
    "each channel": lambda m, x: m.deep(m.first(x)),
    "each channel, dilation": lambda m, x: m.spaced(m.first(x)),
    "each channel, every second pixel": lambda m, x: F.relu6(m.down(m.first(x))),
    "groups of two": lambda m, x: m.pairs(m.first(x)),
    "groups of four, every second pixel": lambda m, x: F.relu6(m.fours(m.first(x))),
    "groups of eight, residual": lambda m, x: torch.relu(m.eights(torch.tanh(m.first(x))) + m.first(x)),
    "groups of eight, silu": lambda m, x: F.silu(m.eights(m.first(x))),
    "two groups": lambda m, x: torch.sigmoid(m.halves(m.first(x))),
    "one pixel": lambda m, x: torch.sigmoid(m.one(F.relu(m.bare(m.first(x).mean((2, 3), keepdim=True))))),
    "residual": lambda m, x: m.uneven(torch.tanh(m.first(x))) + m.first(x),
    "residual, relu": lambda m, x: torch.relu(m.deep(torch.tanh(m.first(x))) + m.first(x)),
    "relu6": lambda m, x: F.relu6(m.bare(m.first(x))),
    "hardtanh": lambda m, x: F.hardtanh(m.one(m.first(x)), -0.25, 0.125),
    "silu": lambda m, x: F.silu(m.deep(F.silu(m.first(x)))),
    "hardswish": lambda m, x: F.hardswish(m.one(m.first(x))),
    "gelu": lambda m, x: F.gelu(m.deep(F.gelu(m.first(x), approximate="tanh"))),
    "tanh": lambda m, x: torch.tanh(m.one(m.first(x))),
    "one weight twice": lambda m, x: m.bare(torch.relu(m.bare(m.first(x)))),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_it_computes_what_the_model_does(name: str) -> None:
    model, x, found = captured(COMPUTED[name], 2, 3, 23, 27)
    bound, offered = bound_with(found, OWN)
    run = [item for index in offered for item in instructions_of(bound.kernels[index]) or () if isinstance(item, RunKernel)]
    assert all(item.name.startswith("autosched_direct") for item in run)
    assert len(run) == sum("convolution" in call.target for operator in found.program.graph.operators for call in operator.calls)
    [got] = bound.run([x])
    with torch.no_grad():
        wanted = model(x)
    assert got.shape == wanted.shape
    assert error_of(got, model, x) < 2e-6


@pytest.mark.parametrize("name", COMPUTED)
def test_no_bit_depends_on_the_number_of_threads(name: str) -> None:
    """Whether threads divide pixels or features; the pictures are so large that threads are used at all."""
    _, x, found = captured(COMPUTED[name], 1, 3, 65, 67)
    outputs = [bound_with(found, OWN, width)[0].run([x])[0] for width in (1, 2, 3, 8)]
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("name", ["residual, relu", "silu", "channels apart", "relu6", "groups of eight, residual"])
def test_instructions_do_what_the_kernel_does(name: str) -> None:
    _, x, found = captured(COMPUTED[name])
    bound, _ = bound_with(found, OWN)
    assert_instructions_and_lanes_agree(bound, x)


def test_lanes_without_the_interpreter_run_it() -> None:
    _, x, found = captured(COMPUTED["residual, relu"], 2, 3, 40, 41)
    bound, _ = bound_with(found, OWN)
    graph = found.program.graph
    executor = LaneExecutor(bound, make_plan(graph, sequential(graph)), LanePool())
    assert executor.engine.value == "native"
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(executor.run([x]), bound.run([x]), strict=True))


def _library() -> Library:
    library = kernel_library()
    assert isinstance(library, Library)
    return library


def _computed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None, over: bool, threads: int, **shape: object
) -> torch.Tensor:
    """What the kernel makes of a picture, between guards that it must not touch; ``over`` the residual, if asked for."""
    item = Convolution(
        0, 1, 2, None, 3, follows=Follows(least=-1.0, most=1.5), after=None, turned=x.stride(1) != 1 and x.shape[1] > 1, **shape
    )  # type: ignore[arg-type]
    wanted = F.conv2d(x, weight, bias, item.stride, item.padding, item.dilation, item.groups)
    size = wanted.shape[0], *wanted.shape[2:], wanted.shape[1]
    memory = torch.full((wanted.numel() + 64,), 7.0)
    made = memory[32:-32].view(size).permute(0, 3, 1, 2)
    added = made if over else residual
    if over and residual is not None:
        made.copy_(residual)
    specs = [TensorSpec(tuple(each.shape), "float32", each.stride()) for each in (x, weight, bias, made)]
    graph = OpGraph((), tuple(Value(place, spec, ValueRole.INPUT, place) for place, spec in enumerate(specs)), (), ())
    factors = summed(weight, _library().lanes, groups=item.groups, turned=item.turned).contiguous()
    tensors = [each for each in (x, made, bias, added, factors, geometry(item, graph, threads)) if each is not None]
    _library().direct[True, added is not None].call(*(each.data_ptr() for each in tensors))
    assert (memory[:32] == 7.0).all()
    assert (memory[-32:] == 7.0).all()
    return made


@pytest.mark.parametrize("seed", range(120))
def test_any_geometry(seed: int) -> None:
    """Against float64; the picture a part of a larger one in some."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    deep = rng.random() < 0.4
    channels = rng.choice([1, 2, 3, 7, 16, 17, 33, 48, 64, 130])
    features = channels if deep else rng.choice([1, 5, 15, 16, 17, 31, 32, 33, 48, 100])
    tall, wide = (rng.choice([1, 1, 2, 3, 3, 5, 7, 9]) for _ in range(2))
    stride, dilation = (rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 3])), (rng.choice([1, 1, 2]), rng.choice([1, 1, 2]))
    padding = rng.randrange(tall * dilation[0] + 1), rng.randrange(wide * dilation[1] + 1)
    batch, height, width = rng.choice([1, 1, 2, 3]), rng.randrange(1, 20), rng.randrange(1, 40)
    height, width = max(height, (tall - 1) * dilation[0] + 1), max(width, (wide - 1) * dilation[1] + 1)
    groups = channels if deep and channels > 1 else 1
    if groups > 1 or rng.random() < 0.6:
        x = torch.randn(batch, height + 2, width + 3, channels + 4)[:, 1:-1, 2:-1, 3:-1].permute(0, 3, 1, 2)
        if rng.random() < 0.5:
            x = x.contiguous(memory_format=torch.channels_last)
    else:
        x = torch.randn(batch, channels, height + 1, width + 2)[:, :, 1:, 1:-1]
    weight = torch.randn(features, channels // groups, tall, wide) / (channels // groups * tall * wide) ** 0.5
    bias = torch.randn(features)
    shape = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    wanted = F.conv2d(x.double(), weight.double(), bias.double(), **shape)  # type: ignore[arg-type]
    residual = None if rng.random() < 0.5 else torch.randn(wanted.shape).contiguous(memory_format=torch.channels_last)
    for over in (False, True) if residual is not None else (False,):
        made = [_computed(x, weight, bias, residual, over, threads, **shape) for threads in (1, 2, 5)]
        assert float((made[0] - (wanted if residual is None else wanted + residual).clamp(-1.0, 1.5)).abs().max()) < 1e-5
        assert all(torch.equal(made[0], other) for other in made[1:])


@pytest.mark.parametrize("seed", range(120))
def test_any_groups(seed: int) -> None:
    """Against float64, also of groups that would leave most of a vector empty."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    groups, channels = rng.choice([2, 3, 4, 5, 7, 8, 9, 16, 33]), rng.choice([1, 2, 2, 4, 4, 8, 8, 16, 16, 3, 5, 20, 24, 33])
    features = channels if rng.random() < 0.6 else rng.choice([1, 2, 4, 8, 15, 16, 17, 24, 32, 33])
    tall, wide = rng.choice([(3, 3), (3, 3), (3, 3), (1, 1), (2, 5), (1, 7), (4, 1), (5, 3)])
    stride, dilation = (rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 3])), (rng.choice([1, 1, 2]), rng.choice([1, 1, 1, 2]))
    padding = rng.randrange(tall * dilation[0] + 2), rng.randrange(wide * dilation[1] + 2)
    batch, height, width = rng.choice([1, 1, 2, 3]), rng.randrange(1, 16), rng.randrange(1, 34)
    height, width = max(height, (tall - 1) * dilation[0] + 1), max(width, (wide - 1) * dilation[1] + 1)
    x = torch.randn(batch, height + 2, width + 3, groups * channels + 4)[:, 1:-1, 2:-1, 3:-1].permute(0, 3, 1, 2)
    if rng.random() < 0.5:
        x = x.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(groups * features, channels, tall, wide) / (channels * tall * wide) ** 0.5
    bias = torch.randn(groups * features)
    shape = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    wanted = F.conv2d(x.double(), weight.double(), bias.double(), **shape)  # type: ignore[arg-type]
    residual = None if rng.random() < 0.5 else torch.randn(wanted.shape).contiguous(memory_format=torch.channels_last)
    for over in (False, True) if residual is not None else (False,):
        made = [_computed(x, weight, bias, residual, over, threads, **shape) for threads in (1, 2, 5)]
        assert float((made[0] - (wanted if residual is None else wanted + residual).clamp(-1.0, 1.5)).abs().max()) < 1e-5
        assert all(torch.equal(made[0], other) for other in made[1:])


GATED: dict[str, tuple[str, Body]] = {
    "one by one": ("_bias", lambda m, x: m.one((y := F.silu(m.first(x))) * torch.sigmoid(m.bare(y.mean((2, 3), keepdim=True))))),
    "the gate first": ("_bias", lambda m, x: m.one(F.hardsigmoid(m.bare((y := F.silu(m.first(x))).mean((2, 3), keepdim=True))) * y)),
    "no bias": ("", lambda m, x: m.bare((y := F.silu(m.first(x))) * torch.tanh(y.mean((2, 3), keepdim=True)))),
    "residual": ("_bias_residual", lambda m, x: m.uneven((y := torch.tanh(m.first(x))) * torch.sigmoid(y.amax((2, 3), keepdim=True))) + y),
    "long sums": ("_bias", lambda m, x: F.relu(m.many((y := F.silu(m.first(x))) * torch.sigmoid(y.mean((2, 3), keepdim=True))))),
}


@pytest.mark.parametrize("name", GATED)
def test_a_gate_is_multiplied_with_while_the_picture_is_read(name: str) -> None:
    ending, body = GATED[name]
    model, x, found = captured(body, 2, 3, 23, 27)
    bound, offered = bound_with(found, OWN)
    run = [item.name for index in offered for item in instructions_of(bound.kernels[index]) or () if isinstance(item, RunKernel)]
    assert run[-1] == f"autosched_scaled{ending}"
    graph = found.program.graph
    gated = [operator for operator in graph.operators if operator.calls[0].target == "aten::mul.Tensor"]
    assert [operator.index for operator in gated] == [offered[-1]]
    assert "aten::mul.Tensor" not in {
        item.call.target for item in instructions_of(bound.kernels[offered[-1]]) or () if hasattr(item, "call")
    }
    with torch.no_grad():
        assert torch.allclose(bound.run([x])[0], model(x), atol=1e-5)
    assert error_of(bound.run([x])[0], model, x) < 2e-6
    plain = bind(found.program, found.constants, "cpu").run([x])[0]
    assert torch.allclose(plain, bound.run([x])[0], atol=1e-5)


def test_what_is_written_over_the_picture_is_not_gated_meanwhile() -> None:
    _, _, found = captured(GATED["residual"][1])
    graph = found.program.graph
    before, call = next(operator.calls for operator in graph.operators if operator.calls[0].target == "aten::mul.Tensor")[:2]
    [picture, gate], makers = before.reads(), {before.outputs[0]: before}
    assert read_scaled(call, graph, makers).scale == gate
    source, *rest = call.args
    over = dataclasses.replace(call, target="mkldnn::_convolution_pointwise_.binary", args=(Ref(picture), source, *rest[1:]), outputs=(-1,))
    found_over = read_scaled(over, graph, makers)
    assert found_over.made == picture
    assert found_over.scale is None


@pytest.mark.parametrize("name", GATED)
def test_no_bit_of_what_is_gated_depends_on_the_number_of_threads(name: str) -> None:
    _, x, found = captured(GATED[name][1], 1, 3, 65, 67)
    outputs = [bound_with(found, OWN, width)[0].run([x])[0] for width in (1, 2, 3, 8)]
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("name", ["one by one", "residual"])
def test_instructions_and_lanes_without_the_interpreter_do_what_is_gated(name: str) -> None:
    _, x, found = captured(GATED[name][1])
    assert_instructions_and_lanes_agree(bound_with(found, OWN)[0], x)


UNGATED: dict[str, Body] = {
    "another reader": lambda m, x: m.one(z := (y := F.silu(m.first(x))) * torch.sigmoid(y.mean((2, 3), keepdim=True))) + z.mean(),
    "a number for each pixel": lambda m, x: m.one((y := F.silu(m.first(x))) * torch.sigmoid(y.mean(1, keepdim=True))),
    "a whole picture": lambda m, x: m.one((y := F.silu(m.first(x))) * torch.sigmoid(y)),
    "added to what comes of it": lambda m, x: m.uneven(z := (y := F.silu(m.first(x))) * torch.sigmoid(y.mean((2, 3), keepdim=True))) + z,
    "groups": lambda m, x: m.eights((y := F.silu(m.first(x))) * torch.sigmoid(y.mean((2, 3), keepdim=True))),
    "each channel by itself": lambda m, x: m.deep((y := F.silu(m.first(x))) * torch.sigmoid(y.mean((2, 3), keepdim=True))),
}


@pytest.mark.parametrize("name", UNGATED)
def test_other_products_are_computed_as_they_are(name: str) -> None:
    model, x, found = captured(UNGATED[name], 2, 3, 23, 27)
    bound, offered = bound_with(found, OWN)
    runs = [[item.name for item in instructions_of(bound.kernels[index]) or () if isinstance(item, RunKernel)] for index in offered]
    assert all(runs)
    assert not any("scaled" in item for run in runs for item in run)
    with torch.no_grad():
        assert torch.allclose(bound.run([x])[0], model(x), atol=1e-5)


LEFT_ALONE: dict[str, Body] = {
    "groups of few features": lambda m, x: m.fives(torch.tanh(x)),
    "several features of each channel": lambda m, x: m.twice(torch.tanh(x)),
    "transposed": lambda m, x: m.back(torch.tanh(x)),
    "each channel, channels apart": lambda m, x: m.deep(x),
    "groups, channels apart": lambda m, x: m.eights(x),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_convolutions_stay_as_they_are(name: str) -> None:
    _, _, found = captured(LEFT_ALONE[name], 1, 40, 9, 11)
    graph = found.program.graph
    assert not any(read_direct(call, graph) for operator in graph.operators for call in operator.calls)
    assert not any(OWN in row for row in offered_variants(found.program, "cpu"))
    bound = bind(found.program, found.constants, "cpu")
    for operator in graph.operators:
        assert isinstance(library_of(found).kernel(operator.index, 1, OWN, bound), Refused)


def test_sixteen_bits_stay_as_they_are() -> None:
    x = torch.randn(1, 20, 9, 9, dtype=torch.bfloat16)
    found = capture(nn.Sequential(nn.Conv2d(20, 20, 3)).eval().to(torch.bfloat16), (x,))
    assert not any(OWN in row for row in offered_variants(found.program, "cpu"))


def _call_and_graph(name: str) -> tuple[Call, OpGraph]:
    _, _, found = captured(COMPUTED[name])
    graph = found.program.graph
    calls = [call for operator in graph.operators for call in operator.calls if read_direct(call, graph)]
    return calls[-1], graph


@pytest.mark.parametrize(
    ("of", "changes"),
    [
        ("made", {"strides": (9 * 11 * 24, 9 * 11, 11, 1)}),
        ("made", {"dtype": "bfloat16"}),
        ("made", {"shape": (1, 24, 10, 13)}),
        ("source", {"strides": ()}),
        ("source", {"dtype": "float64"}),
        ("source", {"shape": (1, 41, 11, 13)}),
        ("weight", {"dtype": "bfloat16"}),
        ("bias", {"strides": (2,)}),
        ("bias", {"shape": (25,)}),
    ],
)
def test_forms_that_the_kernel_takes_for_granted(of: str, changes: dict[str, object]) -> None:
    call, graph = _call_and_graph("one by one")
    found = read_convolution(call, graph)
    assert found is not None
    assert read_convolution(call, with_value(graph, getattr(found, of), **changes)) is None


def test_a_residual_of_the_operators_own_is_not_taken_for_a_value() -> None:
    """Its number counts from the end of the operator's own: another value stands there in the table."""
    call, graph = _call_and_graph("residual")
    source, residual, *rest = call.args
    assert isinstance(residual, Ref)
    assert read_convolution(call, graph) is not None
    own = Ref(residual.value - len(graph.values))
    assert read_convolution(dataclasses.replace(call, args=(source, own, *rest)), graph) is None


class Sharing(nn.Module):
    """Two convolutions that have a weight in common, and other groups."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 4, 1, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.conv2d(x, self.weight), F.conv2d(y, self.weight, groups=2)


def test_a_weight_is_packed_anew_for_other_groups() -> None:
    """As files may have it that others have written; what was packed for one group is too short for two."""
    inputs = tuple(torch.randn(1, channels, 9, 9).contiguous(memory_format=torch.channels_last) for channels in (4, 8))
    found = capture(Sharing().eval(), inputs, lowering=Lowering.REWRITTEN)
    program, [plain] = found.program, [binding.value for binding in found.program.bindings]

    def unpacked(operator: Operator) -> Operator:
        call, *others = operator.calls
        given = tuple(Ref(plain) if place == 1 else argument for place, argument in enumerate(call.args))
        return dataclasses.replace(operator, calls=(dataclasses.replace(call, args=given), *others), reads=(operator.reads[0], plain))

    operators = tuple(unpacked(operator) if "convolution" in operator.calls[0].target else operator for operator in program.graph.operators)
    program = dataclasses.replace(program, graph=dataclasses.replace(program.graph, operators=operators))
    bound, weights = bind(program, found.constants, "cpu"), {}
    made = [steps.own_kernel(operator, bound, 1, OWN, weights) for operator in operators if operator.reads[-1] == plain]
    assert len(made) == 2
    assert not any(isinstance(kernel, Refused) for kernel in made), made
    assert len(weights) == 2


def test_limits_are_those_of_the_activation() -> None:
    call, graph = _call_and_graph("hardtanh")
    assert (read_convolution(call, graph) or pytest.fail("it is none")).follows == Follows(least=-0.25, most=0.125)
    assert (read_convolution(call, graph) or pytest.fail("it is none")).after is None
    unknown = tuple("mish" if item == "hardtanh" else item for item in call.args)
    assert read_convolution(dataclasses.replace(call, args=unknown), graph) is None


def test_not_a_number_stays_one_and_infinity_is_kept_within_limits() -> None:
    _, x, found = captured(lambda m, x: torch.relu(m.bare(x)), 1, 40, 9, 9)
    bound, _ = bound_with(found, OWN)
    x[0, :, 4, 4] = float("nan")
    x[0, 0, 2, 2] = float("inf")
    [got] = bound.run([x])
    assert got[0, :, 4, 4].isnan().all()
    assert set(got[0, :, 2, 2].tolist()) == {0.0, float("inf")}
    assert got[0, :, 0, 0].isfinite().all()


@pytest.mark.parametrize("name", ["residual, relu", "each channel", "one by one", "groups of eight, residual", "groups of two"])
def test_launches_of_inductors_code_have_it_too(name: str) -> None:
    model, x, _ = captured(COMPUTED[name])
    found = capture_inductor(model, (x,))
    assert isinstance(found, Captured)
    bound, offered = bound_with(found, OWN)
    run = [index for index in offered if any(isinstance(item, RunKernel) for item in instructions_of(bound.kernels[index]) or ())]
    assert run
    assert error_of(bound.run([x])[0], model, x) < 2e-6


def test_weights_that_nobody_reads_any_more_are_not_kept() -> None:
    _, x, found = captured(COMPUTED["one weight twice"])
    plain = bind(found.program, found.constants, "cpu")
    packed = [value for value, tensor in enumerate(plain.constants) if tensor is not None and tensor.layout is not torch.strided]
    bound, offered = bound_with(found, OWN)
    gone = [value for value in packed if bound.constants[value] is None]
    assert len(gone) == len(offered) == 3
    assert torch.allclose(bound.run([x])[0], plain.run([x])[0], atol=1e-5)


def test_tensors_of_another_form_are_refused_when_they_come() -> None:
    x = torch.randn(1, 20, 9, 9)
    found = capture(nn.Sequential(nn.Conv2d(20, 20, 3)).eval(), (x,))
    bound, [index] = bound_with(found, OWN)
    for wrong in (x.contiguous(memory_format=torch.channels_last), x[:, :, 1:], x.double()):
        with pytest.raises(RuntimeError, match=r"value 0 is .* expected"):
            bound.kernels[index](bound.new_slots([wrong]))


def test_a_kernel_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, x, found = captured(COMPUTED["channels apart"])
    monkeypatch.setattr(ways, "summed", lambda *args, **named: 1.01 * summed(*args, **named))
    bound, [index] = bound_with(found, OWN)
    made = library_of(found).kernel(index, 1, OWN, bind(found.program, found.constants, "cpu"))
    assert isinstance(made, Refused)
    assert "computes something else" in made.reason
    assert bound.run([x])[0].isfinite().all()


def test_it_is_offered_in_every_lowering_but_aten_and_not_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for lowering in (Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED):
        _, _, found = captured(COMPUTED["channels apart, padding"], lowering=lowering)
        having = [index for index, row in enumerate(offered_variants(found.program, "cpu")) if OWN in row]
        assert len(having) == (0 if lowering is Lowering.ATEN else 1)
        assert not any(OWN in row for row in offered_variants(found.program, "cuda"))
    assert_switched_off_by("AUTOSCHED_CONVOLUTIONS", OWN, found, having[0], monkeypatch)


def test_a_file_that_uses_it_is_loaded_and_follows_the_models_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, _ = captured(COMPUTED["each channel"])
    count = save_with(tmp_path / "net.autosched", capture(model, (x,)), OWN)
    fast = autosched.load(tmp_path / "net.autosched", model, strict=True)
    with torch.no_grad():
        first = fast(x)
        assert torch.allclose(first, model(x), atol=1e-5)
        for parameter in model.parameters():
            parameter.mul_(-0.5)
        assert torch.allclose(fast(x), model(x), atol=1e-5)
        assert not torch.allclose(fast(x), first, atol=1e-2)
    assert_degraded_without("AUTOSCHED_CONVOLUTIONS", "convolutions", count, tmp_path / "net.autosched", model, monkeypatch)
    with torch.no_grad():
        assert torch.allclose(autosched.load(tmp_path / "net.autosched", model)(x), model(x), atol=1e-5)
