"""Convolutions by Winograd's algorithm: which are taken, what they compute, with and without the interpreter, and what is refused."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autosched
from autosched.capture.export import Captured, capture
from autosched.core.errors import UsageError
from autosched.core.graph import OpGraph, ValueRole
from autosched.core.program import Call, Ref
from autosched.core.schedule import sequential
from autosched.core.variants import Lowering, Variant
from autosched.pipeline.inductor_capture import capture_inductor
from autosched.runtime.bundle.format import read_bundles
from autosched.runtime.cpu_kernels import library as libraries
from autosched.runtime.cpu_kernels import steps, ways
from autosched.runtime.cpu_kernels.library import Library, kernel_library
from autosched.runtime.cpu_kernels.weights import transformed
from autosched.runtime.cpu_kernels.winograd import read_winograd
from autosched.runtime.host_key import compiler_key, cpu_device_key, processor_digest, software_key
from autosched.runtime.inductor.common import Refused
from autosched.runtime.instructions import CallOperator, RunKernel, carrying, fixed_tensors, instructions_of
from autosched.runtime.kernels import bind
from autosched.runtime.lane_pool import LanePool
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.plan import make_plan
from autosched.runtime.regions.library import region_library
from autosched.runtime.regions.pieces import offered_variants
from autosched.runtime.verdict import Compatibility, check_bundle
from tests.conformance.own_kernels import (
    CPU,
    assert_instructions_and_lanes_agree,
    bound_with,
    error_of,
    having,
    library_of,
    save_with,
    with_value,
)

BOTH = (Variant.WINOGRAD_2, Variant.WINOGRAD_4)
Body = Callable[[nn.Module, torch.Tensor], torch.Tensor]

pytestmark = pytest.mark.usefixtures("kernel")


class Net(nn.Module):
    """Some convolutions of 20 channels, and some of four groups of 20, called by ``body``."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 20, 1)
        self.a, self.bare = nn.Conv2d(20, 20, 3, padding=1), nn.Conv2d(20, 20, 3, bias=False)
        self.to_wide = nn.Conv2d(20, 40, 3, padding=(2, 0))
        self.one, self.five, self.few = nn.Conv2d(20, 20, 1), nn.Conv2d(20, 20, 5), nn.Conv2d(20, 8, 3)
        self.strided, self.spread = nn.Conv2d(20, 20, 3, stride=2), nn.Conv2d(20, 20, 3, dilation=2, padding=2)
        self.four, self.groups = nn.Conv2d(20, 80, 1), nn.Conv2d(80, 80, 3, padding=1, groups=4)
        self.fewer, self.more = nn.Conv2d(80, 64, 3, groups=4, bias=False), nn.Conv2d(80, 100, 3, padding=(0, 2), groups=4)
        self.grouped, self.back = nn.Conv2d(20, 40, 3, groups=2), nn.ConvTranspose2d(20, 20, 3)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.first(x))


def captured(body: Body, *size: int, lowering: Lowering = Lowering.REWRITTEN) -> tuple[nn.Module, torch.Tensor, Captured]:
    model, x = Net(body).eval(), torch.randn(*(size or (1, 3, 9, 11)), generator=torch.Generator().manual_seed(1))
    return model, x, capture(model, (x,), lowering=lowering)


COMPUTED: dict[str, Body] = {
    "plain": lambda m, x: m.a(x),
    "no bias, no padding": lambda m, x: m.bare(x),
    "more features, uneven padding": lambda m, x: m.to_wide(x),
    "relu": lambda m, x: torch.relu(m.a(x)),
    "residual": lambda m, x: m.a(torch.tanh(x)) + x,
    "residual, relu": lambda m, x: torch.relu(m.a(torch.tanh(x)) + x),
    "residual without bias": lambda m, x: torch.relu(m.bare(x) + x[:, :, 1:-1, 1:-1].contiguous(memory_format=torch.channels_last)),
    "added to what it reads": lambda m, x: torch.relu(m.a(x) + x),
    "silu": lambda m, x: F.silu(m.a(x)),
    "sigmoid": lambda m, x: torch.sigmoid(m.a(x)),
    "tanh": lambda m, x: torch.tanh(m.a(x)),
    "hardswish": lambda m, x: F.hardswish(m.a(x)),
    "hardsigmoid": lambda m, x: F.hardsigmoid(m.a(x)),
    "relu6": lambda m, x: F.relu6(m.a(x)),
    "leaky relu": lambda m, x: F.leaky_relu(m.a(x), 0.3),
    "gelu": lambda m, x: F.gelu(m.a(x), approximate="tanh"),
    "groups": lambda m, x: m.groups(m.four(x)),
    "groups, residual": lambda m, x: torch.relu(m.groups(torch.tanh(m.four(x))) + m.four(x)),
    "groups, fewer and more features": lambda m, x: F.silu(m.fewer(m.four(x))).sum() + m.more(m.four(x)),
    "one after the other": lambda m, x: m.bare(torch.relu(m.a(x))),
    "one weight twice": lambda m, x: m.a(torch.relu(m.a(x))),
}


@pytest.mark.parametrize("variant", BOTH)
@pytest.mark.parametrize("name", COMPUTED)
def test_it_computes_what_the_model_does(name: str, variant: Variant) -> None:
    model, x, found = captured(COMPUTED[name])
    bound, offered = bound_with(found, variant)
    kernels = [bound.kernels[index] for index in offered]
    assert kernels
    assert all(any(isinstance(item, RunKernel) for item in instructions_of(kernel) or ()) for kernel in kernels)
    [got] = bound.run([x])
    with torch.no_grad():
        wanted = model(x)
    assert got.shape == wanted.shape
    assert error_of(got, model, x) < (2e-6 if variant is Variant.WINOGRAD_2 else 4e-5)


@pytest.mark.parametrize("variant", BOTH)
@pytest.mark.parametrize("size", [(1, 3, 4, 4), (3, 3, 5, 17), (2, 3, 40, 41), (1, 3, 64, 3)])
@pytest.mark.parametrize("name", ["one after the other", "groups"])
def test_no_bit_depends_on_the_number_of_threads(name: str, size: tuple[int, ...], variant: Variant) -> None:
    """Whether tiles are worked on block by block or by all threads together, and with more groups than threads or fewer."""
    model, x, found = captured(COMPUTED[name], *size)
    outputs = [bound_with(found, variant, width)[0].run([x])[0] for width in (1, 2, 3, 8)]
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    assert error_of(outputs[0], model, x) < 4e-5


@pytest.mark.parametrize("name", ["residual, relu", "silu", "one after the other"])
def test_instructions_do_what_the_kernel_does(name: str) -> None:
    _, x, found = captured(COMPUTED[name])
    bound, _ = bound_with(found, Variant.WINOGRAD_4)
    assert_instructions_and_lanes_agree(bound, x)


def test_lanes_without_the_interpreter_run_it() -> None:
    _, x, found = captured(COMPUTED["residual, relu"], 2, 3, 40, 41)
    bound, _ = bound_with(found, Variant.WINOGRAD_4)
    graph = found.program.graph
    executor = LaneExecutor(bound, make_plan(graph, sequential(graph)), LanePool())
    assert executor.engine.value == "native"
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(executor.run([x]), bound.run([x]), strict=True))


LEFT_ALONE: dict[str, Body] = {
    "one by one": lambda m, x: m.one(x),
    "five by five": lambda m, x: m.five(x),
    "few features": lambda m, x: m.few(x),
    "stride": lambda m, x: m.strided(x),
    "dilation": lambda m, x: m.spread(x),
    "groups of few channels": lambda m, x: m.grouped(x),
    "transposed": lambda m, x: m.back(x),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_convolutions_stay_as_they_are(name: str) -> None:
    _, _, found = captured(LEFT_ALONE[name])
    graph = found.program.graph
    assert not any(read_winograd(call, graph) for operator in graph.operators for call in operator.calls)
    bound = bind(found.program, found.constants, "cpu")
    assert not any(set(BOTH) & set(row) for row in offered_variants(found.program, "cpu"))
    for operator in graph.operators:
        assert isinstance(library_of(found).kernel(operator.index, 1, Variant.WINOGRAD_2, bound), Refused)


def _call_and_graph(body: Body) -> tuple[Call, OpGraph]:
    _, _, found = captured(body)
    [call] = [call for operator in found.program.graph.operators for call in operator.calls if read_winograd(call, found.program.graph)]
    return call, found.program.graph


@pytest.mark.parametrize("strides", [(0,), (2,), ()])
def test_a_bias_whose_numbers_are_apart_in_memory_is_not_read(strides: tuple[int, ...]) -> None:
    """The kernel would read behind the end of the only number of an expanded one."""
    call, graph = _call_and_graph(COMPUTED["plain"])
    found = read_winograd(call, graph)
    assert found is not None
    assert found.bias is not None
    assert read_winograd(call, with_value(graph, found.bias, strides=strides)) is None


@pytest.mark.parametrize("role", [ValueRole.INPUT, ValueRole.INTERMEDIATE])
def test_weights_that_are_not_constant_stay_as_they_are(role: ValueRole) -> None:
    call, graph = _call_and_graph(COMPUTED["plain"])
    found = read_winograd(call, graph)
    assert found is not None
    assert read_winograd(call, with_value(graph, found.weight, role=role)) is None


def test_where_a_result_is() -> None:
    """One that nobody reads is not written over the residual; one written there has no other name, and other tiles do not read it."""
    call, graph = _call_and_graph(COMPUTED["residual"])
    assert call.target.endswith("pointwise.binary")
    assert read_winograd(dataclasses.replace(call, outputs=(-1,)), graph) is None
    source, residual, *others = call.args
    over = Call("mkldnn::_convolution_pointwise_.binary", (residual, source, *others), (), (-1,))
    found = read_winograd(over, graph)
    assert found is not None
    assert found.made == found.residual
    assert read_winograd(dataclasses.replace(over, outputs=call.outputs), graph) is None
    assert read_winograd(dataclasses.replace(over, args=(source, source, *others)), graph) is None


def test_weights_that_another_call_of_the_same_operator_reads_are_kept() -> None:
    _, _, found = captured(COMPUTED["relu"])
    bound = bind(found.program, found.constants, "cpu")
    graph = found.program.graph
    [(index, convolution)] = [
        (operator.index, item) for operator in graph.operators for call in operator.calls if (item := read_winograd(call, graph))
    ]
    assert steps.without_replaced(bound, {index: Variant.WINOGRAD_2})[convolution.weight] is None
    another = CallOperator(Call("aten::clone.default", (Ref(convolution.weight),), (), (-1,)))
    kernel = bound.kernels[index]
    both = carrying(kernel, [*(instructions_of(kernel) or ()), another])
    kernels = tuple(both if place == index else other for place, other in enumerate(bound.kernels))
    kept = steps.without_replaced(dataclasses.replace(bound, kernels=kernels), {index: Variant.WINOGRAD_2})
    assert kept[convolution.weight] is bound.constants[convolution.weight]


@pytest.mark.parametrize(
    ("room", "made", "reason"), [(steps, "example_of", "does not run"), (ways, "transformed", "its weights cannot be made ready")]
)
def test_what_does_not_fit_into_memory_is_a_reason(room: types.ModuleType, made: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> torch.Tensor:
        return torch.empty(1 << 60)

    _, _, found = captured(COMPUTED["plain"])
    monkeypatch.setattr(room, made, too_large)
    [index] = [place for place, row in enumerate(offered_variants(found.program, "cpu")) if Variant.WINOGRAD_2 in row]
    refused = library_of(found).kernel(index, 1, Variant.WINOGRAD_2, bind(found.program, found.constants, "cpu"))
    assert isinstance(refused, Refused)
    assert reason in refused.reason


def test_channels_first_and_sixteen_bits_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Conv2d(20, 20, 3)).eval()
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(1, 20, 9, 9, dtype=dtype)
        if dtype is torch.bfloat16:
            x = x.contiguous(memory_format=torch.channels_last)
        found = capture(model.to(dtype), (x,))
        assert not any(set(BOTH) & set(row) for row in offered_variants(found.program, "cpu"))
    assert region_library(found.program, CPU, cpu_device_key(), compiler_key()) is None


def test_it_is_offered_in_every_lowering_but_aten_and_not_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for lowering in (Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED):
        _, _, found = captured(COMPUTED["relu"], lowering=lowering)
        having = [index for index, row in enumerate(offered_variants(found.program, "cpu")) if set(BOTH) <= set(row)]
        assert len(having) == (0 if lowering is Lowering.ATEN else 1)
        assert not any(set(BOTH) & set(row) for row in offered_variants(found.program, "cuda"))
    monkeypatch.setenv("AUTOSCHED_WINOGRAD", "0")
    assert not any(set(BOTH) & set(row) for row in offered_variants(found.program, "cpu"))
    refused = library_of(found).kernel(having[0], 1, Variant.WINOGRAD_2, bind(found.program, found.constants, "cpu"))
    assert isinstance(refused, Refused)
    assert refused.reason == "switched off by AUTOSCHED_WINOGRAD=0"
    monkeypatch.setenv("AUTOSCHED_WINOGRAD", "no")
    with pytest.raises(UsageError, match="AUTOSCHED_WINOGRAD is 'no'; expected 1, or 0"):
        offered_variants(found.program, "cpu")


def test_launches_of_inductors_code_have_it_too() -> None:
    model, x, _ = captured(lambda m, x: torch.relu(m.a(torch.tanh(x)) + x).sum() + m.groups(torch.tanh(m.four(x))))
    found = capture_inductor(model, (x,))
    assert isinstance(found, Captured)
    for variant in BOTH:
        bound, offered = bound_with(found, variant)
        run = [index for index in offered if any(isinstance(item, RunKernel) for item in instructions_of(bound.kernels[index]) or ())]
        assert len(run) == 2
        assert error_of(bound.run([x])[0], model, x) < 4e-5


def test_launches_of_other_convolutions_do_not_have_it() -> None:
    model, x, _ = captured(lambda m, x: torch.relu(m.strided(torch.tanh(x))) + m.grouped(x)[:, :20, :5, :6], 1, 3, 12, 14)
    found = capture_inductor(model, (x,))
    assert isinstance(found, Captured)
    assert not any(set(BOTH) & set(row) for row in offered_variants(found.program, "cpu"))


def test_a_result_written_over_its_residual() -> None:
    """As Inductor's code does where nobody reads the residual afterwards."""
    model, x, _ = captured(lambda m, x: m.a(torch.tanh(x)) + torch.sigmoid(m.one(x)))
    found = capture_inductor(model, (x,))
    assert isinstance(found, Captured)
    bound, offered = bound_with(found, Variant.WINOGRAD_2)
    [changing] = [index for index in offered if found.program.graph.operators[index].mutates]
    items = instructions_of(bind(found.program, found.constants, "cpu").kernels[changing]) or ()
    assert [item.call.target for item in items if isinstance(item, CallOperator)] == ["mkldnn::_convolution_pointwise_.binary"]
    assert error_of(bound.run([x])[0], model, x) < 2e-6


def test_weights_that_nobody_reads_any_more_are_not_kept() -> None:
    _, x, found = captured(COMPUTED["one weight twice"])
    plain = bind(found.program, found.constants, "cpu")
    packed = [value for value, tensor in enumerate(plain.constants) if tensor is not None and tensor.layout is not torch.strided]
    bound, offered = bound_with(found, Variant.WINOGRAD_4)
    gone = [value for value in packed if bound.constants[value] is None]
    assert len(gone) == len(offered) == 2
    assert torch.allclose(bound.run([x])[0], plain.run([x])[0], atol=1e-4)


def test_one_operator_has_both_variants() -> None:
    """As where they are timed: each with weights of its own."""
    _, _, found = captured(COMPUTED["plain"])
    bound, library = bind(found.program, found.constants, "cpu"), library_of(found)
    [index] = having(found, Variant.WINOGRAD_2)
    assert not any(isinstance(library.kernel(index, 1, variant, bound), Refused) for variant in BOTH)


def test_shapes_of_one_model_share_their_weights_which_are_counted(tmp_path: Path) -> None:
    model, x, found = captured(COMPUTED["plain"])
    held = [fixed_tensors(bound_with(found, Variant.WINOGRAD_4, width)[0].kernels)[0] for width in (1, 2)]
    assert held[0].data_ptr() == held[1].data_ptr()
    save_with(tmp_path / "net.autosched", capture(model, (x,)), Variant.WINOGRAD_4)
    report = autosched.load(tmp_path / "net.autosched", model, strict=True).report()
    assert report.workspace_bytes >= held[0].nbytes


def test_not_a_number_stays_one_and_infinity_becomes_one() -> None:
    """What the algorithm adds and subtracts is infinite, too: the tile of an infinite number is not a number."""
    _, x, found = captured(lambda m, x: torch.relu(m.a(x)))
    bound, _ = bound_with(found, Variant.WINOGRAD_2)
    for number in (float("nan"), float("inf")):
        broken = x.clone()
        broken[0, :, 4, 4] = number
        [got] = bound.run([broken])
        assert got[0, :, 4, 4].isnan().all()
        assert got[0, :, 0, 0].isfinite().all()


def test_tensors_of_another_form_are_refused_when_they_come() -> None:
    x = torch.randn(1, 20, 9, 9).contiguous(memory_format=torch.channels_last)
    found = capture(nn.Sequential(nn.Conv2d(20, 20, 3)).eval(), (x,))
    bound, [index] = bound_with(found, Variant.WINOGRAD_2)
    for wrong in (x.contiguous(), x[:, :, 1:], x.double()):
        with pytest.raises(RuntimeError, match=r"value 0 is .* expected"):
            bound.kernels[index](bound.new_slots([wrong]))


def test_a_kernel_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, x, found = captured(COMPUTED["plain"])
    monkeypatch.setattr(ways, "transformed", lambda *args: 1.01 * transformed(*args))
    bound, [index] = bound_with(found, Variant.WINOGRAD_2)
    assert not any(isinstance(item, RunKernel) for item in instructions_of(bound.kernels[index]) or ())
    made = library_of(found).kernel(index, 1, Variant.WINOGRAD_2, bind(found.program, found.constants, "cpu"))
    assert isinstance(made, Refused)
    assert "computes something else" in made.reason
    assert bound.run([x])[0].isfinite().all()


@pytest.mark.parametrize("weights", [torch.randn(20, 19, 3, 3), torch.randn(20, 20, 3, 3, dtype=torch.float64)])
def test_weights_of_another_form_than_the_program_says_are_refused(weights: torch.Tensor) -> None:
    _, _, found = captured(COMPUTED["plain"])
    bound, graph = bind(found.program, found.constants, "cpu"), found.program.graph
    [weight] = [item.weight for operator in graph.operators for call in operator.calls if (item := read_winograd(call, graph))]
    constants = bound.constants.copy()
    constants[weight] = weights
    [index] = [operator.index for operator in found.program.graph.operators if weight in operator.reads]
    refused = library_of(found).kernel(index, 1, Variant.WINOGRAD_2, dataclasses.replace(bound, constants=constants))
    assert isinstance(refused, Refused)
    assert "expected torch.float32(20, 20, 3, 3)" in refused.reason


def test_it_is_built_for_the_instructions_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines of one name may share a cache folder: what is built for one would end on an instruction that the other has not."""
    here = torch.cpu.get_capabilities()
    keys, digests = [], []
    for found in (here, {**here, "bmi2": not here.get("bmi2")}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found)
        monkeypatch.setattr(libraries, "processor_digest", processor_digest.__wrapped__)
        keys.append(cpu_device_key())
        digests.append(libraries.kernels_recipe.__wrapped__().key)
    assert keys[0] == keys[1]
    assert digests[0] != digests[1]


def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(libraries, "_state", libraries._State())
    _, x, found = captured(COMPUTED["plain"])
    bound, [index] = bound_with(found, Variant.WINOGRAD_2)
    refused = library_of(found).kernel(index, 1, Variant.WINOGRAD_2, bound)
    assert isinstance(refused, Refused)
    assert "no C++ compiler" in refused.reason
    assert bound.run([x])[0].isfinite().all()


def test_doctor_says_whether_it_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from autosched import doctor

    assert "built for this processor" in doctor._own_kernels().detail
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(libraries, "_state", libraries._State())
    assert "not built yet" in doctor._own_kernels().detail
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler" in doctor._own_kernels().detail
    monkeypatch.setenv("AUTOSCHED_WINOGRAD", "0")
    assert doctor._own_kernels().state is doctor.State.MISSING


@pytest.mark.parametrize(
    ("flags", "advice"), [(0, "it is built anew"), (os.ST_NOEXEC, "set AUTOSCHED_CACHE to a folder on another file system")]
)
def test_doctor_says_what_keeps_it_from_being_loaded(flags: int, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from autosched import doctor

    def refuse(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(libraries, "_state", libraries._State())
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_flag=flags))
    found = doctor._own_kernels()
    assert found.state is doctor.State.MISSING
    assert "failed to map" in found.detail
    assert advice in found.detail


@pytest.mark.parametrize("outputs", [2, 4])
def test_weights_are_those_of_the_minimal_filter(outputs: int) -> None:
    """A weight of ones in the middle alone passes a picture through: every point is the product of the two middle rows."""
    library = kernel_library()
    assert isinstance(library, Library)
    lanes = library.lanes
    weight = torch.zeros(3 * lanes + 1, 2, 3, 3)
    weight[:, 0, 1, 1] = 1.0
    got = transformed(weight, outputs, lanes)
    points, padded = (outputs + 2) ** 2, 4 * lanes
    assert got.shape == (points * 2 * padded,)
    middle = torch.tensor([0, 1 / 2, -1 / 2, 0] if outputs == 2 else [0, -1 / 6, 1 / 6, 1 / 12, -1 / 12, 0])
    blocks = got.reshape(points, 2, 2, 2 * lanes)  # points, blocks of features, channels, features
    assert torch.allclose(blocks[:, 0, 0, 0].reshape(outputs + 2, outputs + 2), torch.outer(middle, middle))
    assert not blocks[:, :, 1].any()  # the other channel
    assert not blocks[:, 1, 0, lanes + 1 :].any()  # features that are missing


@pytest.mark.parametrize("variant", BOTH)
def test_a_file_that_uses_it_is_loaded_and_follows_the_models_weights(variant: Variant, tmp_path: Path) -> None:
    model, x, _ = captured(COMPUTED["one after the other"])
    save_with(tmp_path / "net.autosched", capture(model, (x,)), variant)
    fast = autosched.load(tmp_path / "net.autosched", model, strict=True)
    with torch.no_grad():
        first = fast(x)
        assert torch.allclose(first, model(x), atol=1e-4)
        assert not torch.equal(first, model(x))  # it is another sum
        for parameter in model.parameters():
            parameter.mul_(-0.5)
        assert torch.allclose(fast(x), model(x), atol=1e-4)
        assert not torch.allclose(fast(x), first, atol=1e-2)
        model.load_state_dict({name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()})
        assert torch.allclose(fast(x), model(x), rtol=1e-4, atol=1e-3)


def test_a_file_that_uses_it_is_degraded_where_it_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, _ = captured(COMPUTED["plain"])
    save_with(tmp_path / "net.autosched", capture(model, (x,)), Variant.WINOGRAD_2)
    [bundle] = read_bundles(tmp_path / "net.autosched")
    assert not any("convolutions" in line for line in check_bundle(bundle, cpu_device_key(), software_key(), model).lines)
    monkeypatch.setenv("AUTOSCHED_WINOGRAD", "0")
    without = check_bundle(bundle, cpu_device_key(), software_key(), model)
    assert without.compatibility is Compatibility.DEGRADED
    assert any(
        "convolutions by Winograd's algorithm: 1 by kernels of our own there, by those of libraries here (switched off" in line
        for line in without.lines
    )
    fast = autosched.load(tmp_path / "net.autosched", model)
    with torch.no_grad():
        assert torch.allclose(fast(x), model(x), atol=1e-4)


def test_nothing_is_compiled_for_a_file_whose_kernels_are_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, _ = captured(COMPUTED["plain"])
    save_with(tmp_path / "net.autosched", capture(model, (x,)), Variant.WINOGRAD_2)
    monkeypatch.setattr(libraries, "_library", lambda: pytest.fail("it is not wanted"))
    monkeypatch.setattr(libraries, "_state", libraries._State())
    monkeypatch.setenv("AUTOSCHED_WINOGRAD", "0")
    assert autosched.load(tmp_path / "net.autosched", model).report().scheduled


def test_what_is_loaded_is_not_missing_once_the_cache_is_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert ways.missing_kernel(Variant.WINOGRAD_2) == ""
    monkeypatch.setattr(libraries, "_state", libraries._State())
    assert "no C++ compiler" in ways.missing_kernel(Variant.WINOGRAD_2)


def test_a_file_that_uses_it_is_degraded_where_the_compiler_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, _ = captured(COMPUTED["plain"])
    save_with(tmp_path / "net.autosched", capture(model, (x,)), Variant.WINOGRAD_2)
    monkeypatch.setattr(libraries, "_state", libraries._State())
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("CXX", "/bin/false")
    report = autosched.load(tmp_path / "net.autosched", model).report()
    assert (report.scheduled, report.verdict) == (True, "degraded")
    assert any("by those of libraries here (/bin/false failed: exit status 1)" in line for line in report.differences)
