"""Products of a few rows by the kernel of our own: which are taken, what they compute, without the interpreter too, what is refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autosched
from autosched.capture.export import Captured, capture
from autosched.core.graph import ValueRole
from autosched.core.program import Call, Many, Ref
from autosched.core.schedule import sequential
from autosched.core.variants import Lowering, Variant
from autosched.pipeline.inductor_capture import capture_inductor
from autosched.runtime.cpu_kernels import ways
from autosched.runtime.cpu_kernels.convolution import Follows
from autosched.runtime.cpu_kernels.library import Library, kernel_library
from autosched.runtime.cpu_kernels.linear import Linear, read_linear
from autosched.runtime.cpu_kernels.weights import in_blocks
from autosched.runtime.inductor.common import Refused
from autosched.runtime.instructions import CallOperator, RunKernel, Window, instructions_of
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

OWN = Variant.OWN_PRODUCT
Body = Callable[[nn.Module, torch.Tensor], torch.Tensor]

pytestmark = pytest.mark.usefixtures("kernel")


class Net(nn.Module):
    """Some layers of 48 numbers, called by ``body``. The large ones are packed for oneDNN, the others are not."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.bare = nn.Linear(48, 48), nn.Linear(48, 80, bias=False)
        self.large, self.back = nn.Linear(48, 4096), nn.Linear(4096, 48)
        self.odd, self.few = nn.Linear(48, 40), nn.Linear(8, 48)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def captured(body: Body, *size: int, lowering: Lowering = Lowering.REWRITTEN) -> tuple[nn.Module, torch.Tensor, Captured]:
    model, x = Net(body).eval(), torch.randn(*(size or (2, 13, 48)), generator=torch.Generator().manual_seed(1))
    return model, x, capture(model, (x,), lowering=lowering)


COMPUTED: dict[str, Body] = {
    "linear": lambda m, x: m.a(x),
    "no bias": lambda m, x: m.bare(x),
    "relu": lambda m, x: torch.relu(m.large(x)),
    "gelu": lambda m, x: F.gelu(m.a(x)),
    "gelu of many": lambda m, x: F.gelu(m.large(x), approximate="tanh"),
    "many inputs": lambda m, x: m.back(torch.tanh(m.large(x))),
    "mm": lambda m, x: x.flatten(0, 1) @ m.bare.weight.t(),
    "matmul": lambda m, x: x @ m.a.weight,
    "addmm": lambda m, x: torch.addmm(m.a.bias, x.flatten(0, 1), m.a.weight),
    "residual": lambda m, x: x + m.a(torch.tanh(x)),
    "features that fill no vectors": lambda m, x: m.odd(x),
    "columns": lambda m, x: F.gelu(m.a(torch.tanh(x).view(2, 48, 13).transpose(1, 2))),
    "columns of one matrix": lambda m, x: m.odd(torch.tanh(x).view(48, 26).t()),
}
LOWERINGS = (Lowering.REWRITTEN, Lowering.FUSED, Lowering.INDUCTOR)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", COMPUTED)
def test_it_computes_what_the_model_does(name: str, lowering: Lowering) -> None:
    model, x, found = captured(COMPUTED[name])
    if lowering is Lowering.INDUCTOR:
        made = capture_inductor(model, (x,))
        assert isinstance(made, Captured)
        found = made
    elif lowering is Lowering.FUSED:
        found = capture(model, (x,), lowering=lowering)
    bound, offered = bound_with(found, OWN)
    # Inductor makes a batch of products of it.
    assert bool(offered) != (name == "columns" and lowering is Lowering.INDUCTOR)
    for index in offered:
        items = instructions_of(bound.kernels[index]) or ()
        assert any(isinstance(item, RunKernel) and item.name.startswith("autosched_direct") for item in items)
    [got] = bound.run([x])
    with torch.no_grad():
        wanted = model(x)
    assert got.shape == wanted.shape
    assert error_of(got, model, x) < 2e-6


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu, "silu": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_computed_with_the_layer_before_it(name: str, large: bool) -> None:
    """Also where it is spelled with other calls, as one by the hyperbolic tangent of many numbers is."""
    model, x, found = captured(lambda m, x: ACTIVATIONS[name](m.large(x) if large else m.a(x)))
    bound, [index] = bound_with(found, OWN, 2)
    assert len(found.program.graph) == 1
    items = instructions_of(bound.kernels[index]) or ()
    assert any(isinstance(item, RunKernel) for item in items)
    assert not any(isinstance(item, CallOperator) for item in items)
    [got] = bound.run([x])
    assert error_of(got, model, x) < 1e-6


EVERY = torch.cat([torch.linspace(-20.0, 20.0, 5001), *(sign * torch.logspace(-37.9, 38.5, 1500) for sign in (-1.0, 1.0)), torch.zeros(1)])


def behind_a_layer(follows: Callable[[torch.Tensor], torch.Tensor], numbers: torch.Tensor) -> torch.Tensor:
    """Of each number, by the kernel; each is the only one in a row that is multiplied with something."""
    layer, x = nn.Linear(16, 32, bias=False).eval(), torch.zeros(len(numbers), 16)
    with torch.no_grad():
        layer.weight[:] = torch.eye(16)[0]
    x[:, 0] = numbers
    found = capture(Following(layer, follows), (x,), lowering=Lowering.REWRITTEN)
    bound, [index] = bound_with(found, OWN)
    assert len(found.program.graph) == 1
    assert not any(isinstance(item, CallOperator) for item in instructions_of(bound.kernels[index]) or ())
    [got] = bound.run([x])
    assert torch.equal(got.nan_to_num(7.0), got[:, :1].nan_to_num(7.0).expand_as(got))
    return got[:, 0]


class Following(nn.Module):
    """A layer, and something behind it."""

    def __init__(self, layer: nn.Module, follows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.follows = layer, follows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.follows(self.layer(x))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_all_numbers_are_as_exact_as_a_library_has_them(name: str) -> None:
    got, wanted = behind_a_layer(ACTIVATIONS[name], EVERY).double(), ACTIVATIONS[name](EVERY.double())
    scale = EVERY.double().abs() if "lu" in name else torch.ones((), dtype=torch.float64)
    assert bool(((got - wanted).abs() <= 3e-7 * scale + 1e-35).all())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_what_is_no_finite_number(name: str) -> None:
    """Where a library returns what is not a number for minus infinity, times zero, that may be zero."""
    got = behind_a_layer(ACTIVATIONS[name], torch.tensor([float("nan"), float("inf"), float("-inf")]))
    assert got[0].isnan()
    assert got[1] == (1.0 if name in ("sigmoid", "tanh") else float("inf"))
    assert got[2].isnan() or abs(got[2] - (-1.0 if name == "tanh" else 0.0)) < 1e-30


def test_what_others_read_is_made() -> None:
    """An activation is not part of the layer then, nor where what is done is another thing that looks alike."""
    for body in (
        lambda m, x: (y := m.a(x), F.gelu(y))[1] * y,
        lambda m, x: (F.gelu(y := m.a(x)), y),
        lambda m, x: F.gelu(m.a(x)) + F.silu(m.a(x)),
        lambda m, x: F.gelu(torch.relu(m.large(x))),
        lambda m, x: (y := m.large(x)) * torch.sigmoid((1.6 + y * y * 0.0713548) * y),
        lambda m, x: F.gelu(m.a(x).transpose(1, 2)),
    ):
        model, x, found = captured(body)  # type: ignore[arg-type]
        bound, offered = bound_with(found, OWN)
        assert offered
        with torch.no_grad():
            wanted = model(x)
        for got, expected in zip(bound.run([x]), wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 11, 12, 13, 25, 96])
def test_no_bit_depends_on_the_number_of_threads(rows: int) -> None:
    """Whether features alone are divided among them, or rows as well."""
    for name in ("many inputs", "relu"):
        model, x, found = captured(COMPUTED[name], rows, 48)
        outputs = [bound_with(found, OWN, width)[0].run([x])[0] for width in (1, 2, 3, 8)]
        assert all(torch.equal(outputs[0], other) for other in outputs[1:])
        assert error_of(outputs[0], model, x) < 2e-6


@pytest.mark.parametrize("name", ["relu", "gelu", "residual"])
def test_instructions_do_what_the_kernel_does(name: str) -> None:
    _, x, found = captured(COMPUTED[name])
    bound, _ = bound_with(found, OWN)
    assert_instructions_and_lanes_agree(bound, x)


def test_lanes_without_the_interpreter_run_it() -> None:
    model, x, _ = captured(COMPUTED["many inputs"])
    found = capture_inductor(model, (x,))
    assert isinstance(found, Captured)
    bound, _ = bound_with(found, OWN)
    graph = found.program.graph
    executor = LaneExecutor(bound, make_plan(graph, sequential(graph)), LanePool())
    assert executor.engine.value == "native"
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(executor.run([x]), bound.run([x]), strict=True))


LEFT_ALONE: dict[str, Body] = {
    "few features": lambda m, x: F.linear(x, m.a.weight[:15]),
    "few inputs": lambda m, x: m.few(x[..., :8].contiguous()),
    "rows apart": lambda m, x: m.few(x[..., :8]),
    "weights that are computed": lambda m, x: F.linear(x, torch.tanh(x[0, :, :]).reshape(13, 48)),
    "a bias for each row": lambda m, x: torch.addmm(x[0, :, :48], x[1], m.a.weight),
    "a factor": lambda m, x: torch.addmm(m.a.bias, x[1], m.a.weight, alpha=2),
    "batches": lambda m, x: torch.bmm(x, x.transpose(1, 2)),
}


@pytest.mark.parametrize("inductor", [False, True])
@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_products_are_those_of_libraries(name: str, inductor: bool) -> None:
    model, x, found = captured(LEFT_ALONE[name])
    if inductor:
        made = capture_inductor(model, (x,))
        assert isinstance(made, Captured)
        found = made
    assert not any(OWN in row for row in offered_variants(found.program, "cpu"))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 16, 16), (8192, 16, 16), (2, 512, 16), (2, 513, 48), (1, 1500, 333)])
def test_the_smallest_and_the_longest_are_computed(rows: int, inputs: int, outputs: int) -> None:
    model, x = nn.Sequential(nn.Linear(inputs, outputs)).eval(), torch.randn(rows, inputs)
    bound, offered = bound_with(capture(model, (x,), lowering=Lowering.REWRITTEN), OWN, 2)
    assert offered
    assert error_of(bound.run([x])[0], model, x) < 2e-6


def test_other_dtypes_and_many_rows_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(48, 48)).eval()
    for dtype, rows in ((torch.float64, 8), (torch.float32, 8193)):
        found = capture(model.to(dtype), (torch.randn(rows, 48, dtype=dtype),))
        assert not any(OWN in row for row in offered_variants(found.program, "cpu"))


def _call_and_program(name: str) -> tuple[Call, Captured]:
    _, _, found = captured(COMPUTED[name])
    [call] = [call for operator in found.program.graph.operators for call in operator.calls if read_linear(call, found.program.graph)]
    return call, found


@pytest.mark.parametrize(
    ("of", "changes"),
    [
        ("source", {"strides": (1248, 96, 2)}),
        ("source", {"strides": ()}),
        ("source", {"dtype": "float64"}),
        ("weight", {"role": ValueRole.INPUT}),
        ("weight", {"role": ValueRole.INTERMEDIATE}),
        ("weight", {"dtype": "float64"}),
        ("weight", {"shape": (47, 48)}),
        ("weight", {"shape": (48, 47)}),
        ("bias", {"strides": (0,)}),
        ("bias", {"strides": (2,)}),
        ("bias", {"shape": (47,)}),
        ("bias", {"dtype": "bfloat16"}),
        ("made", {"strides": (1248, 1, 26)}),
        ("made", {"shape": (2, 12, 48)}),
        ("made", {"shape": (2, 13, 32)}),
    ],
)
def test_forms_that_the_kernel_takes_for_granted(of: str, changes: dict[str, Any]) -> None:
    """Where one of them is another in a file, memory beside a tensor would be read or written."""
    call, found = _call_and_program("linear")
    item = read_linear(call, found.program.graph)
    assert item is not None
    assert read_linear(call, with_value(found.program.graph, getattr(item, of), **changes)) is None


def test_the_stride_of_a_dimension_with_one_element_does_not_count() -> None:
    """As of the first half of one long text."""
    model = Net(COMPUTED["linear"]).eval()
    x = torch.randn(1, 26, 48)[:, :13]
    bound, offered = bound_with(capture(model, (x,), lowering=Lowering.REWRITTEN), OWN)
    assert offered
    assert error_of(bound.run([x])[0], model, x) < 2e-6


def test_views_that_a_launch_reads_through() -> None:
    """From the beginning of what they are of, no further than its end, and row by row."""
    call, found = _call_and_program("linear")
    graph = found.program.graph
    item = read_linear(call, graph)
    assert item is not None
    through = dataclasses.replace(call, args=(Ref(-3), *call.args[1:]))
    assert read_linear(through, graph) is None

    def read(*window: object) -> Linear | None:
        return read_linear(through, graph, {-3: Window(-3, item.source, *window)})  # type: ignore[arg-type]

    assert read((26, 48), (48, 1), 0) == item
    assert read((26, 48), (1, 26), 0) == dataclasses.replace(item, each=26)
    assert read((2, 13, 48), (13 * 48, 1, 13), 0) == dataclasses.replace(item, each=13)
    for window in [
        ((26, 48), (48, 1), 48),  # begins elsewhere
        ((27, 48), (48, 1), 0),  # longer than the memory
        ((26, 48), (0, 1), 0),
        ((26, 48), (1, 27), 0),
        ((26, 48), (1, 26), 1),
        ((2, 13, 48), (48, 1, 26), 0),  # each matrix begins in a line of another
        ((52, 24), (24, 1), 0),  # other rows than the weights have
        ((1248,), (1,), 0),
    ]:
        assert read(*window) is None


def test_calls_with_other_arguments_are_not_read() -> None:
    call, found = _call_and_program("relu")
    graph = found.program.graph
    assert call.target == "mkldnn::_linear_pointwise.default"
    assert (read_linear(call, graph) or pytest.fail("it is none")).follows == Follows(least=0.0)
    source, weight, bias, _, *more = call.args
    plain = read_linear(dataclasses.replace(call, args=(source, weight, bias, "none", *more)), graph)
    assert (plain or pytest.fail("it is none")).follows == Follows()
    for algorithm, number in (("none", 6), ("tanh", 7)):
        read = read_linear(dataclasses.replace(call, args=(source, weight, bias, "gelu", Many(()), algorithm)), graph)
        assert (read or pytest.fail("it is none")).follows == Follows(number)
    others = (source, weight, bias, "gelu", *more), (source, None, bias, "none", *more), (source, weight, 1.0, "none", *more)
    for args in (*others, (None, *call.args[1:])):
        assert read_linear(dataclasses.replace(call, args=args), graph) is None
    assert read_linear(dataclasses.replace(call, outputs=(-1,)), graph) is None
    assert read_linear(dataclasses.replace(call, kwargs=(("attr", "none"),)), graph) is None
    assert read_linear(dataclasses.replace(call, target="mkldnn::_linear_pointwise.binary"), graph) is None


def test_weights_that_nobody_reads_any_more_are_not_kept() -> None:
    """Neither those that a library has packed nor the model's own beside them; others are."""
    model, x, found = captured(lambda m, x: m.large(x) + m.large(torch.tanh(x)))
    made = capture_inductor(model, (x,))
    assert isinstance(made, Captured)
    for each in (found, made):
        plain = bind(each.program, each.constants, "cpu")
        bound, offered = bound_with(each, OWN)
        graph = each.program.graph
        read = [graph.values[value] for index in offered for value in graph.operators[index].reads]
        gone = {value.index for value in read if len(value.spec.shape) == 2 and value.role is ValueRole.CONSTANT}
        assert gone
        assert all(bound.constants[value] is None and plain.constants[value] is not None for value in gone)
        assert torch.allclose(bound.run([x])[0], plain.run([x])[0], atol=1e-5)


def test_weights_that_another_operator_reads_are_kept() -> None:
    model, x, found = captured(lambda m, x: m.a(x) * m.a.weight.sum())
    bound, offered = bound_with(found, OWN)
    assert offered
    assert torch.allclose(bound.run([x])[0], model(x), atol=1e-4)


def test_weights_that_the_model_answers_with_are_kept() -> None:
    model, x, found = captured(lambda m, x: (m.a(x), m.a.weight))  # type: ignore[arg-type, return-value]
    bound, offered = bound_with(found, OWN)
    assert offered
    assert torch.equal(bound.run([x])[1], model.a.weight)


def test_weights_that_are_the_rows_of_another_product_are_kept() -> None:
    """That product is computed in every call, since its result is the caller's."""
    model, x, found = captured(lambda m, x: (m.bare(m.a.weight), m.a(x)))  # type: ignore[arg-type, return-value]
    bound, offered = bound_with(found, OWN)
    assert len(offered) == 2
    for got, wanted in zip(bound.run([x]), model(x), strict=True):
        assert torch.allclose(got, wanted, atol=1e-5)


def test_one_weight_both_ways_round() -> None:
    model, x, found = captured(lambda m, x: torch.tanh(x @ m.a.weight) @ m.a.weight.t())
    bound, offered = bound_with(found, OWN)
    assert len(offered) == 2
    assert error_of(bound.run([x])[0], model, x) < 2e-6


def test_weights_in_blocks() -> None:
    factors = torch.arange(2 * 3 * 20.0).reshape(2, 3, 20)
    got = in_blocks(factors, 4)
    assert got.shape == (120,)
    first = got[:60]
    assert torch.equal(first[:24].reshape(3, 8), factors[0, :, :8])
    assert torch.equal(first[24:48].reshape(3, 8), factors[0, :, 8:16])
    assert torch.equal(first[48:].reshape(3, 4), factors[0, :, 16:])
    assert torch.equal(got[60:], in_blocks(factors[1:], 4))


def test_numbers_that_are_not_finite_stay_what_they_are() -> None:
    model, x, found = captured(COMPUTED["relu"])
    bound, _ = bound_with(found, OWN)
    broken = x.clone()
    broken[0, 1, 3], broken[1, 2, 5] = float("nan"), float("inf")
    [got] = bound.run([broken])
    with torch.no_grad():
        wanted = model(broken)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.isinf(), wanted.isinf())


def test_tensors_of_another_form_are_refused_when_they_come() -> None:
    _, x, found = captured(COMPUTED["linear"])
    bound, [index] = bound_with(found, OWN)
    for wrong in (x[:1], x.transpose(0, 1), x.double(), x[..., :40]):
        with pytest.raises(RuntimeError, match=r"value \d+ is .* expected"):
            bound.kernels[index](bound.new_slots([wrong]))


def test_tensors_of_another_form_are_refused_without_the_interpreter() -> None:
    """The kernel would read behind the end of their memory."""
    _, x, found = captured(COMPUTED["linear"])
    bound, _ = bound_with(found, OWN)
    graph = found.program.graph
    executor = LaneExecutor(bound, make_plan(graph, sequential(graph)), LanePool())
    assert executor.engine.value == "native"
    for wrong in (x[:1], x.transpose(0, 1), x.double(), x[..., :40]):
        with pytest.raises(RuntimeError, match="a region was given"):
            executor.run([wrong])


@pytest.mark.parametrize("name", COMPUTED)
def test_new_weights_are_those_of_the_next_call(name: str, tmp_path: Path) -> None:
    """Also where nothing else of the program packs any: those that PyTorch's own products read are read where they are."""
    model, x, found = captured(COMPUTED[name])
    path = tmp_path / "net.autosched"
    assert save_with(path, found, OWN) > 0
    fast = autosched.load(path, model, strict=True)
    written: list[Callable[[torch.Tensor], object]] = [
        lambda weight: weight.mul_(-0.5), lambda weight: weight.data.add_(1.0), lambda weight: weight.numpy().__imul__(-0.3),
    ]  # fmt: skip
    with torch.no_grad():
        for write in written:
            before = fast(x)
            for parameter in model.parameters():
                write(parameter.detach())
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
            assert not torch.allclose(fast(x), before, atol=1e-3)
    assert fast.report().calls == 9


def test_a_kernel_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, x, found = captured(COMPUTED["linear"])
    monkeypatch.setattr(ways, "in_blocks", lambda *args: 1.01 * in_blocks(*args))
    [index] = [place for place, row in enumerate(offered_variants(found.program, "cpu")) if OWN in row]
    bound = bind(found.program, found.constants, "cpu")
    made = library_of(found).kernel(index, 1, OWN, bound)
    assert isinstance(made, Refused)
    assert "computes something else" in made.reason
    assert bound.run([x])[0].isfinite().all()


def test_it_is_offered_in_every_lowering_but_aten_and_not_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for lowering in (Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED):
        _, _, found = captured(COMPUTED["linear"], lowering=lowering)
        having = [index for index, row in enumerate(offered_variants(found.program, "cpu")) if OWN in row]
        assert len(having) == (0 if lowering is Lowering.ATEN else 1)
        assert not any(OWN in row for row in offered_variants(found.program, "cuda"))
    assert_switched_off_by("AUTOSCHED_PRODUCTS", OWN, found, having[0], monkeypatch)


def test_a_file_that_uses_it_is_loaded_and_follows_the_models_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, found = captured(COMPUTED["many inputs"])
    path = tmp_path / "net.autosched"
    count = save_with(path, found, OWN)
    fast = autosched.load(path, model, strict=True)
    with torch.no_grad():
        first = fast(x)
        assert torch.allclose(first, model(x), atol=1e-5)
        for parameter in model.parameters():
            parameter.mul_(-0.5)
        assert torch.allclose(fast(x), model(x), atol=1e-5)
        assert not torch.allclose(fast(x), first, atol=1e-3)
    assert_degraded_without("AUTOSCHED_PRODUCTS", "products", count, path, model, monkeypatch)
    with torch.no_grad():
        assert torch.allclose(autosched.load(path, model)(x), model(x), atol=1e-5)


@pytest.mark.parametrize("lowering", [Lowering.REWRITTEN, Lowering.FUSED])
@pytest.mark.parametrize("counted", [True, False])
def test_new_numbers_in_a_weight_that_no_library_packs_are_followed(lowering: Lowering, counted: bool, tmp_path: Path) -> None:
    """Its operator would read them where they are, and no prologue says that anything was made of them."""
    model, x, found = captured(COMPUTED["linear"], lowering=lowering)
    assert not found.program.prologue
    save_with(tmp_path / "net.autosched", found, OWN)
    fast = autosched.load(tmp_path / "net.autosched", model, strict=True)
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(fast(x), model(x), atol=1e-5)
            for parameter in (model.a.weight, model.a.bias):
                (parameter if counted else parameter.data).mul_(-0.5)
        assert torch.allclose(fast(x), model(x), atol=1e-5)


def test_vectors_are_no_longer_than_features_are_asked_to_fill() -> None:
    library = kernel_library()
    assert isinstance(library, Library)
    assert 16 % library.lanes == 0


def test_gelu_as_gpt_2_spells_it_is_computed_with_its_product() -> None:
    class Spelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 48)

        def forward(self, x: torch.Tensor) -> Any:
            made = self.linear(x)
            return 0.5 * made * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (made + 0.044715 * torch.pow(made, 3.0))))

    x, model = torch.randn(40, 32), Spelled().eval()
    found = capture(model, (x,), lowering=Lowering.REWRITTEN)
    bound, offered = bound_with(found, Variant.OWN_PRODUCT)
    assert len(offered) == len(found.program.graph) == 1
    assert torch.allclose(bound.run([x])[0], model(x), atol=1e-6)
