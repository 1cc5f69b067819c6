"""A convolution and the depthwise one behind it by one kernel: which are taken, what it computes, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autosched
from autosched.capture.export import Captured, capture
from autosched.core.graph import OpGraph, TensorSpec, Value, ValueRole
from autosched.core.program import Call
from autosched.core.variants import Lowering, Variant
from autosched.runtime.bundle.format import read_bundles
from autosched.runtime.bundle.values import schema_for
from autosched.runtime.cpu_kernels import chain
from autosched.runtime.cpu_kernels.convolution import Convolution, Follows
from autosched.runtime.cpu_kernels.library import Library, kernel_library
from autosched.runtime.cpu_kernels.weights import in_blocks
from autosched.runtime.inductor.common import Refused
from autosched.runtime.instructions import RunKernel, instructions_of
from autosched.runtime.kernels import bind
from autosched.runtime.regions.pieces import offered_variants
from tests.conformance.own_kernels import (
    assert_degraded_without,
    assert_instructions_and_lanes_agree,
    assert_switched_off_by,
    bound_with,
    error_of,
    having,
    library_of,
    save_with,
)

OWN = Variant.OWN_CHAIN
Body = Callable[[nn.Module, torch.Tensor], torch.Tensor]

pytestmark = pytest.mark.usefixtures("kernel")


class Net(nn.Module):
    """Convolutions of 40 channels, called by ``body``; 40 do not fill whole vectors of every processor."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.one, self.bare = nn.Conv2d(3, 40, 3, stride=2), nn.Conv2d(3, 40, 1), nn.Conv2d(40, 40, 1, bias=False)
        self.many, self.narrow = nn.Conv2d(40, 40, 5, padding=2), nn.Conv2d(40, 7, 1)
        self.deep, self.down = nn.Conv2d(40, 40, 3, padding=1, groups=40), nn.Conv2d(40, 40, 5, stride=2, padding=2, groups=40)
        self.large, self.plain = nn.Conv2d(40, 40, 7, groups=40), nn.Conv2d(40, 40, 3, stride=2, groups=40, bias=False)
        self.uneven = nn.Conv2d(40, 40, (2, 3), stride=(3, 1), padding=(1, 2), groups=40)
        self.spaced, self.huge = nn.Conv2d(40, 40, 3, dilation=2, groups=40), nn.Conv2d(40, 40, 9, padding=4, groups=40)
        self.pairs, self.fours = nn.Conv2d(40, 40, 3, groups=20), nn.Conv2d(40, 40, 3, groups=10)
        self.third, self.row = nn.Conv2d(40, 40, 3, stride=3, groups=40), nn.Conv2d(40, 40, (1, 9), padding=(0, 4), groups=40)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def captured(body: Body, *size: int, lowering: Lowering = Lowering.REWRITTEN) -> tuple[nn.Module, torch.Tensor, Captured]:
    model, x = Net(body).eval(), torch.randn(*(size or (1, 3, 23, 27)), generator=torch.Generator().manual_seed(1))
    return model, x, capture(model, (x,), lowering=lowering)


COMPUTED: dict[str, Body] = {
    "channels apart": lambda m, x: m.deep(m.first(x)),
    "channels apart, one by one": lambda m, x: m.deep(m.one(x)),
    "no bias": lambda m, x: m.plain(m.bare(torch.tanh(m.one(x)))),
    "long sums": lambda m, x: m.deep(m.many(torch.tanh(m.one(x)))),
    "every second pixel": lambda m, x: F.relu6(m.down(F.relu6(m.one(x)))),
    "every second pixel, no bias": lambda m, x: m.plain(F.relu(m.one(x))),
    "seven by seven, no padding": lambda m, x: m.large(F.hardtanh(m.one(x), -0.25, 0.125)),
    "uneven": lambda m, x: m.uneven(m.first(x)),
    "silu": lambda m, x: F.silu(m.deep(F.silu(m.first(x)))),
    "hardswish": lambda m, x: F.hardswish(m.down(F.hardswish(m.one(x)))),
    "sigmoid": lambda m, x: torch.sigmoid(m.deep(F.hardsigmoid(m.first(x)))),
    "an activation that libraries have": lambda m, x: torch.tanh(m.deep(F.relu(m.first(x)))),
    "what reads it follows": lambda m, x: m.narrow(F.silu(m.deep(F.silu(m.one(x))))),
}


@pytest.mark.parametrize("lowering", [Lowering.REWRITTEN, Lowering.FUSED])
@pytest.mark.parametrize("name", COMPUTED)
def test_it_computes_what_the_model_does(name: str, lowering: Lowering) -> None:
    model, x, found = captured(COMPUTED[name], 2, 3, 23, 27, lowering=lowering)
    bound, offered = bound_with(found, OWN)
    [index] = offered
    run = [item.name for item in instructions_of(bound.kernels[index]) or () if isinstance(item, RunKernel)]
    assert run == ["autosched_chain"]
    [got] = bound.run([x])
    with torch.no_grad():
        assert got.shape == model(x).shape
    assert error_of(got, model, x) < 2e-6


@pytest.mark.parametrize("name", COMPUTED)
def test_no_bit_depends_on_the_number_of_threads(name: str) -> None:
    """The pictures are so large that threads are used at all."""
    _, x, found = captured(COMPUTED[name], 1, 3, 65, 67)
    outputs = [bound_with(found, OWN, width)[0].run([x])[0] for width in (1, 2, 3, 8)]
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("name", ["silu", "hardswish", "uneven", "channels apart, one by one", "every second pixel"])
def test_it_computes_what_the_two_kernels_do(name: str) -> None:
    _, x, found = captured(COMPUTED[name], 1, 3, 65, 67)
    together, apart = (bound_with(found, variant, 2)[0].run([x])[0] for variant in (OWN, Variant.OWN_CONVOLUTION))
    assert torch.equal(together, apart)


@pytest.mark.parametrize("name", ["silu", "channels apart", "an activation that libraries have"])
def test_instructions_and_lanes_without_the_interpreter_do_what_the_kernel_does(name: str) -> None:
    _, x, found = captured(COMPUTED[name])
    assert_instructions_and_lanes_agree(bound_with(found, OWN)[0], x)


def _library() -> Library:
    library = kernel_library()
    assert isinstance(library, Library)
    return library


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), "float32", tensor.stride())


@pytest.mark.parametrize("seed", range(120))
def test_any_geometry(seed: int) -> None:
    """Against float64, between guards that the kernel must not touch; the picture a part of a larger one in some."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    channels, features, batch = (
        rng.choice([1, 2, 3, 17, 32, 64]),
        rng.choice([2, 5, 15, 16, 17, 31, 32, 33, 48, 100]),
        rng.choice([1, 1, 2, 3]),
    )
    size, step = (rng.choice([1, 1, 2, 3, 5]), rng.choice([1, 1, 2, 3])), (rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2]))
    spread, edge = (rng.choice([1, 1, 2]), rng.choice([1, 1, 2])), (rng.randrange(3), rng.randrange(3))
    tall, wide = rng.choice([1, 2, 3, 3, 5, 6, 7]), rng.choice([3, 3, 5, 7])
    stride, padding = (rng.choice([1, 1, 2, 3, 9]), rng.choice([1, 1, 2])), (rng.randrange(tall + 3), rng.randrange(wide + 3))
    height, width = (
        max(rng.randrange(1, 30), (taps - 1) * apart + 1) + (least - 1) * by
        for taps, apart, by, least in zip(size, spread, step, (tall, wide), strict=True)
    )
    turned = channels > 1 and rng.random() < 0.4
    if turned:
        x = torch.randn(batch, channels, height + 1, width + 2)[:, :, 1:, 1:-1]
    else:
        x = torch.randn(batch, height + 2, width + 3, channels + 4)[:, 1:-1, 2:-1, 3:-1].permute(0, 3, 1, 2)
        x = x.contiguous(memory_format=torch.channels_last) if rng.random() < 0.5 else x
    weight, bias = torch.randn(features, channels, *size) / (channels * size[0] * size[1]) ** 0.5, torch.randn(features)
    deep, last = torch.randn(features, 1, tall, wide) / (tall * wide) ** 0.5, torch.randn(features)
    between = F.conv2d(x.double(), weight.double(), bias.double(), step, edge, spread).clamp(-1.0, 1.5)
    wanted = F.conv2d(between, deep.double(), last.double(), stride, padding, groups=features).clamp(-0.5, 2.0)
    memory = torch.full((wanted.numel() + 64,), 7.0)
    made = memory[32:-32].view(wanted.shape[0], *wanted.shape[2:], features).permute(0, 3, 1, 2)
    middle = torch.empty(between.shape).contiguous(memory_format=torch.channels_last)
    item = chain.Chain(
        Call("first", (), (), (3,)),
        Convolution(0, 1, 2, None, 3, step, edge, spread, 1, Follows(least=-1.0, most=1.5), None, turned),
        Convolution(3, 4, 5, None, 6, stride, padding, (1, 1), features, Follows(least=-0.5, most=2.0), None, False),
    )
    tensors = (x, weight, bias, middle, deep, last, made)
    graph = OpGraph((), tuple(Value(place, _spec(each), ValueRole.INPUT, place) for place, each in enumerate(tensors)), (), ())
    factors = chain.packed(item, [weight, bias, deep, last], _library().lanes)
    answers = []
    for threads in (1, 2, 5):
        made.fill_(float("nan"))
        given = (x, made, factors, chain.geometry(item, graph, threads))
        _library().chain.call(*(each.data_ptr() for each in given))
        answers.append(made.clone())
    assert float((answers[0] - wanted).abs().max()) < 1e-5
    assert all(torch.equal(answers[0], other) for other in answers[1:])
    assert (memory[:32] == 7.0).all()
    assert (memory[-32:] == 7.0).all()


LEFT_ALONE: dict[str, Body] = {
    "dilation": lambda m, x: m.spaced(m.one(x)),
    "nine by nine": lambda m, x: m.huge(m.one(x)),
    "nine of a line": lambda m, x: m.row(m.one(x)),
    "every third pixel": lambda m, x: m.third(m.one(x)),
    "an activation between them that libraries have": lambda m, x: m.deep(F.leaky_relu(m.one(x))),
    "a residual behind it": lambda m, x: torch.relu(m.deep(m.bare(y := torch.tanh(m.one(x)))) + y),
    "a residual between them": lambda m, x: m.deep(m.bare(y := torch.tanh(m.one(x))) + y),
    "another reader": lambda m, x: m.deep(y := m.one(x)) * y,
}


def test_groups_of_several_channels_behind_it_are_no_chain() -> None:
    """Though a kernel of our own computes them, too."""
    _, _, found = captured(lambda m, x: m.pairs(m.one(x)).sum() + m.fours(m.one(x)).sum() + m.deep(m.one(x)))
    graph = found.program.graph
    calls = [call for operator in graph.operators for call in operator.calls]
    makers = {value: call for call in calls for value in call.outputs if value >= 0}
    chains = [item for call in calls if (item := chain.read_chain(call, graph, makers)) is not None]
    assert [item.second.groups for item in chains] == [40]


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_others_stay_as_they_are(name: str) -> None:
    model, x, found = captured(LEFT_ALONE[name])
    bound, offered = bound_with(found, OWN)
    graph, plain = found.program.graph, bind(found.program, found.constants, "cpu")
    assert not offered
    for operator in graph.operators:
        assert isinstance(library_of(found).kernel(operator.index, 1, OWN, plain), Refused)
    with torch.no_grad():
        assert torch.allclose(bound.run([x])[0], model(x), atol=1e-5)


def test_not_a_number_stays_one() -> None:
    _, x, found = captured(lambda m, x: F.silu(m.deep(F.silu(m.one(x)))), 1, 3, 9, 9)
    bound, _ = bound_with(found, OWN)
    x[0, 0, 4, 4] = float("nan")
    [got] = bound.run([x])
    assert got[0, :, 3:6, 3:6].isnan().all()
    assert int(got[0, 0].isnan().sum()) == 9


def test_weights_that_nobody_reads_any_more_are_not_kept() -> None:
    model, x, found = captured(COMPUTED["silu"])
    bound, _ = bound_with(found, OWN)
    read = {value for operator in found.program.graph.operators for value in operator.reads}
    constants = [value.index for value in found.program.graph.values if value.role is ValueRole.CONSTANT and value.index in read]
    assert len(constants) == 4
    assert all(bound.constants[value] is None for value in constants)
    assert error_of(bound.run([x])[0], model, x) < 2e-6


def test_a_kernel_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, found = captured(COMPUTED["channels apart"])
    [index] = having(found, OWN)
    monkeypatch.setattr(chain, "in_blocks", lambda *args: 1.01 * in_blocks(*args))
    made = library_of(found).kernel(index, 1, OWN, bind(found.program, found.constants, "cpu"))
    assert isinstance(made, Refused)
    assert "computes something else" in made.reason


def test_it_is_offered_where_both_are_one_operator_and_not_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for lowering in (Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED):
        _, _, found = captured(COMPUTED["silu"], lowering=lowering)
        assert len(having(found, OWN)) == (0 if lowering is Lowering.ATEN else 1)
        assert not any(OWN in row for row in offered_variants(found.program, "cuda"))
    assert_switched_off_by("AUTOSCHED_CONVOLUTIONS", OWN, found, having(found, OWN)[0], monkeypatch)


def test_a_file_that_uses_it_is_loaded_and_follows_the_models_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, _ = captured(COMPUTED["silu"])
    count = save_with(tmp_path / "net.autosched", capture(model, (x,)), OWN)
    assert schema_for(read_bundles(tmp_path / "net.autosched")) == 11
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
