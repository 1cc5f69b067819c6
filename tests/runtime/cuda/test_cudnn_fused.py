"""Convolutions that cuDNN ends with relu: which calls become one, what is refused, and what the kernel hands to PyTorch's operators."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import library, nn
from torch.nn import functional as F

from autosched.capture.export import Captured, capture
from autosched.core.graph import Operator
from autosched.core.program import Call
from autosched.core.schedule import sequential
from autosched.core.variants import WHOLE, Lowering, Variant
from autosched.runtime.cuda import cudnn_fused
from autosched.runtime.inductor.common import Refused
from autosched.runtime.kernels import bind
from autosched.runtime.numerics import compare
from autosched.runtime.plan import make_plan
from autosched.runtime.regions import library as regions
from autosched.runtime.regions import pieces as region_pieces
from autosched.runtime.regions.library import RegionLibrary, region_library
from autosched.runtime.regions.pieces import offered_variants, variants_of

CPU = torch.device("cpu")
Body = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Some convolutions, called by ``body``."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.bare = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.grouped, self.strided = nn.Conv2d(4, 8, (3, 1), groups=2, padding=(1, 0)), nn.Conv2d(4, 4, 3, stride=2, dilation=2)
        self.named, self.back = nn.Conv2d(4, 4, 4, padding="same"), nn.ConvTranspose2d(4, 4, 3, padding=1)
        self.line, self.cube = nn.Conv1d(4, 4, 3), nn.Conv3d(4, 4, 3, padding=1)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def captured(body: Body, lowering: Lowering = Lowering.FUSED, x: torch.Tensor | None = None) -> Captured:
    model = Net(body).eval()
    example = torch.randn(2, 4, 8, 8) if x is None else x
    return capture(model.to(example.dtype), (example,), target="cuda", lowering=lowering)


def fusions(found: Captured) -> list[cudnn_fused.Fusion]:
    graph = found.program.graph
    return [item for operator in graph.operators for item in cudnn_fused.fusions_of(operator, graph)]


MATCHED: dict[str, tuple[Body, int]] = {
    "relu": (lambda m, x: torch.relu(m.a(x)), 2),
    "relu in place": (lambda m, x: F.relu(m.a(x), inplace=True), 2),
    "clamp_min": (lambda m, x: m.a(x).clamp_min(0), 2),
    "no bias": (lambda m, x: torch.relu(m.bare(x)), 2),
    "groups": (lambda m, x: torch.relu(m.grouped(x)), 2),
    "stride and dilation": (lambda m, x: torch.relu(m.strided(x)), 2),
    "residual": (lambda m, x: torch.relu(m.a(x) + x), 3),
    "residual first": (lambda m, x: torch.relu(x + m.a(x)), 3),
    "scaled residual": (lambda m, x: torch.relu(torch.add(m.a(x), x, alpha=0.5)), 3),
    "more after it": (lambda m, x: F.max_pool2d(torch.relu(m.a(x)), 2), 2),
    "two convolutions": (lambda m, x: torch.relu(m.a(x) + m.b(torch.sin(x))), 3),
    "number added": (lambda m, x: torch.relu(m.a(x) + 2.0), 2),
}


@pytest.mark.parametrize("name", MATCHED)
def test_a_convolution_becomes_one_with_the_relu_that_follows(name: str) -> None:
    body, calls = MATCHED[name]
    found = captured(body)
    [fusion] = fusions(found)
    assert len(fusion.calls) == calls
    assert (fusion.residual is not None) == (calls == 3)
    assert (fusion.bias is None) == (name == "no bias")
    if name == "groups":
        assert (fusion.groups, fusion.padding) == (2, (1, 0))
    if name == "stride and dilation":
        assert (fusion.stride, fusion.dilation, fusion.padding) == ((2, 2), (2, 2), (0, 0))
    assert fusion.alpha == (0.5 if name == "scaled residual" else 1.0)


UNMATCHED: dict[str, Body] = {
    "no activation": lambda m, x: m.a(x) + 1.0,
    "silu": lambda m, x: F.silu(m.a(x)),
    "relu6": lambda m, x: F.relu6(m.a(x)),
    "clamp at one": lambda m, x: m.a(x).clamp_min(1.0),
    "read again": lambda m, x: (lambda y: torch.relu(y) * y)(m.a(x)),
    "added to itself": lambda m, x: (lambda y: torch.relu(y + y))(m.a(x)),
    "sum read again": lambda m, x: (lambda y: torch.relu(y) * y)(m.a(x) + x),
    "broadcast residual": lambda m, x: torch.relu(m.a(x) + x[:, :, :1]),
    "factor on the convolution": lambda m, x: torch.relu(torch.add(x, m.a(x), alpha=0.5)),
    "relu of another": lambda m, x: m.a(x) * torch.relu(x),
    "more padding on one side": lambda m, x: torch.relu(m.named(x)),
    "transposed": lambda m, x: torch.relu(m.back(x)),
    "one dimension": lambda m, x: torch.relu(m.line(x[..., 0])),
    "three dimensions": lambda m, x: torch.relu(m.cube(x[:, :, None])),
    "no batch": lambda m, x: torch.relu(m.a(x[0])),
}


@pytest.mark.parametrize("name", UNMATCHED)
def test_what_is_something_else_stays_as_it_is(name: str) -> None:
    assert fusions(captured(UNMATCHED[name])) == []


def test_other_dtypes_stay_as_they_are() -> None:
    body = MATCHED["relu"][0]
    assert fusions(captured(body, x=torch.randn(2, 4, 8, 8, dtype=torch.float64))) == []
    assert len(fusions(captured(body, x=torch.randn(2, 4, 8, 8, dtype=torch.bfloat16)))) == 1


def test_numbers_of_a_file_that_do_not_fit_together_are_no_fusion() -> None:
    graph = captured(MATCHED["residual"][0]).program.graph
    [operator] = [item for item in graph.operators if cudnn_fused.fusions_of(item, graph)]
    convolution = operator.calls[0]
    stretched = Call(convolution.target, convolution.args[:3], (("padding", 3),), convolution.outputs)
    changed = Operator(**{name: getattr(operator, name) for name in operator.__slots__} | {"calls": (stretched, *operator.calls[1:])})
    assert cudnn_fused.fusions_of(changed, graph) == ()


class Double:
    """PyTorch's two operators on the CPU: convolution, addition, relu; ``calls`` is what they were given beside tensors."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float, bool]] = []
        self.wrong = 0.0
        self.broken = ""
        self.noise = itertools.repeat(0.0)
        self.turned = False

    def relu(self, x: Any, w: Any, b: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> torch.Tensor:
        self.calls.append(("relu", 0.0, b is not None))
        return self._made(x, w, b, stride, padding, dilation, groups)

    def add_relu(self, x: Any, w: Any, z: Any, alpha: Any, b: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> torch.Tensor:
        self.calls.append(("add_relu", float(alpha), b is not None))
        return self._made(x, w, b, stride, padding, dilation, groups, alpha * z)

    def _made(self, x: Any, w: Any, b: Any, stride: Any, padding: Any, dilation: Any, groups: int, z: Any = 0.0) -> torch.Tensor:
        if self.broken:
            raise RuntimeError(self.broken)
        made = torch.relu(torch.ops.aten.conv2d(x, w, b, stride, padding, dilation, groups) + z) + self.wrong + next(self.noise)
        if not self.turned:
            return made
        here = made.is_contiguous()
        return made.contiguous(memory_format=torch.channels_last if here else torch.contiguous_format)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    made = Double()
    monkeypatch.setattr(cudnn_fused, "refusal", lambda device: "")
    monkeypatch.setattr(cudnn_fused, "supported", lambda: True)
    with library._scoped_library("aten", "IMPL") as scoped:
        scoped.impl("cudnn_convolution_relu", made.relu, "CPU")
        scoped.impl("cudnn_convolution_add_relu", made.add_relu, "CPU")
        yield made


def library_of(found: Captured, monkeypatch: pytest.MonkeyPatch) -> RegionLibrary:
    """A library on the CPU that takes it for a GPU where variants are concerned."""
    monkeypatch.setattr(regions, "variants_of", lambda operator, graph, kind, lowering: variants_of(operator, graph, "cuda", lowering))
    return RegionLibrary(found.program, CPU, "scope")


@pytest.mark.parametrize("name", MATCHED)
def test_the_variant_computes_what_the_calls_compute(name: str, double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    found = captured(MATCHED[name][0])
    graph = found.program.graph
    library = library_of(found, monkeypatch)
    chosen = [int(Variant.CUDNN_FUSED) if Variant.CUDNN_FUSED in library.variants(index) else 0 for index in range(len(graph))]
    assert sum(map(bool, chosen)) == 1
    bound = bind(found.program, found.constants, CPU)
    plan = make_plan(graph, dataclasses.replace(sequential(graph), variant=tuple(chosen)))
    fused = library.apply(bound, plan)
    assert library.refusals == ()
    double.calls.clear()
    x = torch.randn(2, 4, 8, 8)
    answers = []
    for program in (bound, fused):
        slots = program.new_slots([x])
        with torch.inference_mode():
            for kernel in program.kernels:
                kernel(slots)
        answers.append(list(program.outputs(slots)))
    assert compare(answers[1], answers[0]).within_tolerance
    alpha = 0.5 if name == "scaled residual" else 1.0
    expected = ("relu", 0.0) if MATCHED[name][1] == 2 else ("add_relu", alpha)
    assert double.calls == [(*expected, name != "no bias")]


def refused(body: Body, monkeypatch: pytest.MonkeyPatch) -> str:
    found = captured(body)
    library = library_of(found, monkeypatch)
    index = next(index for index in range(len(found.program.graph)) if Variant.CUDNN_FUSED in library.variants(index))
    made = library.kernel(index, 1, Variant.CUDNN_FUSED)
    assert isinstance(made, Refused)
    assert [item.reason for item in library.refusals] == [made.reason]
    return made.reason


def test_a_shape_without_an_engine_is_a_refusal(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    double.broken = "GET was unable to find an engine to execute this computation"
    assert "unable to find an engine" in refused(MATCHED["relu"][0], monkeypatch)
    assert torch.backends.cudnn.allow_tf32


def test_other_numbers_other_bits_and_other_strides_are_refusals(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    double.wrong = 0.5
    assert "computes something else" in refused(MATCHED["relu"][0], monkeypatch)
    double.wrong = 0.0
    double.noise = itertools.cycle((0.0, 1e-6))
    assert "other bits at every run" in refused(MATCHED["relu"][0], monkeypatch)
    double.noise = itertools.repeat(0.0)
    double.turned = True
    # Of two, the first: whatever layout they work in, the last one's operator may end with a copy into the model's.
    assert "strides" in refused(lambda m, x: torch.relu(m.a(torch.relu(m.a(x)))), monkeypatch)


def test_equal_operators_are_tried_once(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    found = captured(lambda m, x: torch.relu(m.a(torch.relu(m.a(torch.relu(m.a(x)))))))
    library = library_of(found, monkeypatch)
    offered = [item for item in found.program.graph.operators if Variant.CUDNN_FUSED in library.variants(item.index)]
    # In whichever layout: the first two of three, at least, are alike.
    first, second = offered[:2]
    assert first.signature == second.signature
    library.kernel(first.index, 1, Variant.CUDNN_FUSED)
    before = len(double.calls)
    library.kernel(second.index, 1, Variant.CUDNN_FUSED)
    assert before > 0
    assert len(double.calls) == before


def test_tensors_of_another_shape_never_reach_the_operator(double: Double) -> None:
    found = captured(MATCHED["residual"][0])
    graph = found.program.graph
    [operator] = [item for item in graph.operators if cudnn_fused.fusions_of(item, graph)]
    [fusion] = cudnn_fused.fusions_of(operator, graph)
    slots: list[Any] = [None] * len(graph.values)
    for value in fusion.reads():
        slots[value] = torch.ones(graph.values[value].spec.shape)
    slots[fusion.bias or 0] = torch.ones(1)
    with pytest.raises(RuntimeError, match="expected"):
        cudnn_fused.fused_steps(operator, graph, CPU)[0](slots)
    assert double.calls == []


def test_it_is_offered_on_a_gpu_and_to_operators_of_rewritten_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def offered(lowering: Lowering, kind: str) -> int:
        found = captured(MATCHED["residual"][0], lowering)
        return sum(Variant.CUDNN_FUSED in row for row in offered_variants(found.program, kind))

    monkeypatch.setattr(region_pieces.cudnn_fused, "supported", lambda: False)  # as in a build for the CPU
    assert offered(Lowering.REWRITTEN, "cuda") == 0
    assert "has no fused convolutions" in cudnn_fused.refusal(CPU)
    monkeypatch.setattr(region_pieces.cudnn_fused, "supported", lambda: True)
    assert offered(Lowering.FUSED, "cuda") == 1
    assert offered(Lowering.REWRITTEN, "cuda") == 1
    assert offered(Lowering.REWRITTEN, "cpu") == 0
    assert offered(Lowering.ATEN, "cuda") == 0
    graph = captured(MATCHED["residual"][0], Lowering.REWRITTEN).program.graph
    assert {item for operator in graph.operators for item in variants_of(operator, graph, "cuda", Lowering.REWRITTEN)} == {
        Variant.CALLS, Variant.CUDNN_FUSED,
    }  # fmt: skip


def test_settings_that_speak_against_it_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_fused, "supported", lambda: True)
    gpu = torch.device("cuda:0")
    assert cudnn_fused.refusal(gpu) == ""
    with torch.backends.cudnn.flags(enabled=False):
        assert "enabled is False" in cudnn_fused.refusal(gpu)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        assert "deterministic" in cudnn_fused.refusal(gpu)


def test_where_it_cannot_be_had_a_plan_runs_by_its_calls() -> None:
    found = captured(MATCHED["relu"][0], Lowering.REWRITTEN)
    graph = found.program.graph
    library = RegionLibrary(found.program, CPU, "scope")
    bound = bind(found.program, found.constants, CPU)
    plan = make_plan(graph, dataclasses.replace(sequential(graph), variant=(int(Variant.CUDNN_FUSED),) * len(graph)))
    assert library.apply(bound, plan).kernels == bound.kernels
    assert {item.variant for item in library.refusals} == {Variant.CUDNN_FUSED}


def test_a_library_exists_where_operators_may_have_variants() -> None:
    from autosched.runtime.host_key import cpu_device_key, software_key

    keys = cpu_device_key(), software_key()
    gpu = torch.device("cuda:0")
    made = {lowering: captured(MATCHED["relu"][0], lowering).program for lowering in (Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED)}
    assert [region_library(made[Lowering.REWRITTEN], device, *keys) is None for device in (CPU, gpu)] == [True, False]
    assert [region_library(made[Lowering.FUSED], device, *keys) is None for device in (CPU, gpu)] == [False, False]
    for lowering in WHOLE:
        whole = dataclasses.replace(made[Lowering.REWRITTEN], lowering=lowering.value)
        assert [region_library(whole, device, *keys) is None for device in (CPU, gpu)] == [True, False]
    assert region_library(made[Lowering.ATEN], gpu, *keys) is None
