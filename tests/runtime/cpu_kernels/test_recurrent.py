"""Recurrent layers by the kernel of our own: which are taken, what they compute, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import autosched
from autosched.capture.export import Captured, capture
from autosched.core.errors import UsageError
from autosched.core.graph import OpGraph, ValueRole
from autosched.core.program import Call, Many
from autosched.core.variants import Lowering, Variant
from autosched.runtime.cpu_kernels import recurrent, ways
from autosched.runtime.cpu_kernels.library import Library, kernel_library
from autosched.runtime.cpu_kernels.recurrent import Recurrence, packed, read_recurrence
from autosched.runtime.inductor.common import Refused
from autosched.runtime.instructions import RunKernel, instructions_of
from autosched.runtime.kernels import bind
from autosched.runtime.regions.pieces import offered_variants
from tests.conformance.own_kernels import (
    assert_degraded_without,
    assert_instructions_and_lanes_agree,
    bound_with,
    library_of,
    save_with,
    with_value,
)

OWN = Variant.OWN_RECURRENCE

pytestmark = pytest.mark.usefixtures("kernel")


class Net(nn.Module):
    """A recurrent layer, and what it is asked for."""

    def __init__(self, layer: nn.Module, both: bool = False) -> None:
        super().__init__()
        self.layer, self.both = layer, both

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        if isinstance(self.layer, nn.LSTM):
            # What is in its cells in the end is not asked for.
            outputs, (last, _) = self.layer(x, None if state is None else (state, 0.5 * state))
        else:
            outputs, last = self.layer(x, state)
        return (outputs, last) if self.both else (outputs * 1.0,)


def captured(layer: nn.Module, *inputs: torch.Tensor, both: bool = True, lowering: Lowering = Lowering.REWRITTEN) -> Captured:
    return capture(Net(layer, both).eval(), inputs, lowering=lowering)


def layer_of(inputs: int, hidden: int, kind: type[nn.RNNBase] = nn.GRU, **options: object) -> nn.RNNBase:
    torch.manual_seed(0)
    return kind(inputs, hidden, **options).eval()  # type: ignore[arg-type]


# Inputs, hidden, steps, batch, options.
SHAPES: dict[str, tuple[int, int, int, int, dict[str, object]]] = {
    "one": (24, 48, 7, 1, {}),
    "a pair of vectors": (16, 64, 5, 3, {}),
    "a batch": (33, 16, 4, 11, {}),
    "one step": (40, 32, 1, 2, {}),
    "no biases": (24, 32, 6, 2, {"bias": False}),
    "both directions": (24, 32, 6, 2, {"bidirectional": True}),
    "layers": (24, 32, 6, 2, {"num_layers": 3}),
    "layers, both directions, batch first": (24, 32, 6, 2, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "batch first": (24, 32, 6, 2, {"batch_first": True}),
    "many inputs": (600, 160, 3, 1, {}),
}


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_it_computes_what_the_model_does(name: str, given: bool, kind: type[nn.RNNBase]) -> None:
    """With a state to begin with and without, and the state after the last step."""
    inputs, hidden, length, batch, options = SHAPES[name]
    layer = layer_of(inputs, hidden, kind, **options)
    x = torch.randn((batch, length, inputs) if layer.batch_first else (length, batch, inputs))
    state = torch.randn(layer.num_layers * (2 if layer.bidirectional else 1), batch, hidden)
    tensors = (x, state) if given else (x,)
    bound, offered = bound_with(captured(layer, *tensors), OWN)
    assert len(offered) == state.shape[0]
    assert all(any(isinstance(item, RunKernel) for item in instructions_of(bound.kernels[index]) or ()) for index in offered)
    got = bound.run(list(tensors))
    with torch.no_grad():
        wanted = Net(layer, both=True).double()(*(tensor.double() for tensor in tensors))
    assert all(float((mine - theirs).abs().max()) < 3e-6 for mine, theirs in zip(got, wanted, strict=True))
    assert [tensor.shape for tensor in got] == [tensor.shape for tensor in wanted]


def test_an_lstm_whose_cells_are_asked_for_in_the_end_stays_as_it_is() -> None:
    layer, x = layer_of(16, 32, nn.LSTM), torch.randn(5, 2, 16)
    found = capture(layer, (x,))
    assert not any(OWN in row for row in offered_variants(found.program, "cpu"))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_no_bit_depends_on_the_number_of_threads(kind: type[nn.RNNBase]) -> None:
    """Of so many units that threads divide them."""
    for hidden, batch in ((208, 1), (96, 6)):
        x = torch.randn(9, batch, 80)
        found = captured(layer_of(80, hidden, kind), x)
        outputs = [bound_with(found, OWN, width)[0].run([x])[0] for width in (1, 2, 3, 8)]
        assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_gates_that_are_far_open_or_closed() -> None:
    """Where what is computed from an exponential is at its ends, and near zero, where little is left of a difference."""
    layer = layer_of(16, 16)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.weight_ih_l0[32:] = torch.eye(16)  # the new state is the tangent of the input
    for scale in (1e-6, 1e-3, 0.6, 1.0, 8.0, 200.0, 1e30):
        x = scale * torch.linspace(-1.0, 1.0, 16).reshape(1, 1, 16)
        bound, _ = bound_with(captured(layer, x), OWN)
        got = bound.run([x])[0].reshape(16)
        assert torch.allclose(got.double(), 0.5 * torch.tanh(x.double()).reshape(16), rtol=3e-7, atol=0.0)


def test_not_a_number_stays_one_and_infinity_opens_gates() -> None:
    layer = layer_of(16, 16)
    x = torch.randn(3, 2, 16)
    x[1, 0, 0], x[0, 1, 0] = float("nan"), float("inf")
    [got, _] = bound_with(captured(layer, x), OWN)[0].run([x])
    with torch.no_grad():
        wanted = layer(x)[0]
    assert torch.equal(got.isnan(), wanted.isnan())
    assert got[1:, 0].isnan().all()
    assert torch.allclose(got.nan_to_num(), wanted.nan_to_num(), atol=1e-6)


def test_instructions_do_what_the_kernel_does_also_without_the_interpreter() -> None:
    x = torch.randn(6, 2, 24)
    found = captured(layer_of(24, 32, num_layers=2), x)
    bound, _ = bound_with(found, OWN)
    assert_instructions_and_lanes_agree(bound, x)


LEFT_ALONE = {
    "units that do not fill vectors": (lambda: nn.GRU(16, 20), torch.float32),
    "an LSTM of such units": (lambda: nn.LSTM(16, 20), torch.float32),
    "projected": (lambda: nn.LSTM(16, 32, proj_size=16), torch.float32),
    "sixteen bits": (lambda: nn.GRU(16, 32), torch.bfloat16),
    "another kind": (lambda: nn.RNN(16, 32), torch.float32),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_layers_stay_as_they_are(name: str) -> None:
    make, dtype = LEFT_ALONE[name]
    found = captured(make().eval().to(dtype), torch.randn(5, 2, 16, dtype=dtype))
    assert not any(OWN in row for row in offered_variants(found.program, "cpu"))
    bound = bind(found.program, found.constants, "cpu")
    for operator in found.program.graph.operators:
        assert isinstance(library_of(found).kernel(operator.index, 1, OWN, bound), Refused)


def _call_and_graph() -> tuple[Call, OpGraph]:
    graph = captured(layer_of(16, 32), torch.randn(5, 2, 16)).program.graph
    [call] = [call for operator in graph.operators for call in operator.calls if read_recurrence(call, graph)]
    return call, graph


@pytest.mark.parametrize(
    ("of", "changes"),
    [
        ("source", {"strides": (16, 80, 1)}),
        ("source", {"dtype": "float64"}),
        ("state", {"strides": (64, 1, 2)}),
        ("state", {"shape": (2, 2, 32)}),
        ("made", {"strides": (32, 160, 1)}),
        ("made", {"shape": (4, 2, 32)}),
        ("weight", {"dtype": "float64"}),
        ("weight", {"shape": (96, 17)}),
    ],
)
def test_forms_that_the_kernel_takes_for_granted(of: str, changes: dict[str, object]) -> None:
    call, graph = _call_and_graph()
    found = read_recurrence(call, graph)
    assert found is not None
    index = found.weights[0] if of == "weight" else getattr(found, of)
    assert read_recurrence(call, with_value(graph, index, **changes)) is None


def test_calls_with_other_arguments_are_not_read() -> None:
    call, graph = _call_and_graph()
    source, state, weights, biases, layers, dropout, train, both, batch_first = call.args
    assert isinstance(weights, Many)
    others = [
        (source, state, weights, biases, 2, dropout, train, both, batch_first),
        (source, state, weights, biases, layers, dropout, True, both, batch_first),
        (source, state, weights, biases, layers, dropout, train, True, batch_first),
        (source, state, weights, biases, layers, dropout, train, both, True),
        (source, state, weights, False, layers, dropout, train, both, batch_first),
        (source, None, weights, biases, layers, dropout, train, both, batch_first),
    ]
    assert [read_recurrence(dataclasses.replace(call, args=args), graph) for args in others] == [None] * len(others)
    found = read_recurrence(call, graph)
    assert found is not None
    assert read_recurrence(call, with_value(graph, found.weights[3], role=ValueRole.INTERMEDIATE)) is None


def test_weights_are_packed_gate_by_gate() -> None:
    library = kernel_library()
    assert isinstance(library, Library)
    inputs, hidden, lanes = 3, 3 * library.lanes, library.lanes
    layer = layer_of(inputs, hidden)
    weights = [parameter.detach() for parameter in layer.parameters()]
    item = Recurrence(0, 1, None, 2, (3, 4, 5, 6), 1, 1, inputs, hidden, False, None)
    got = packed(weights, item, lanes)
    assert got.numel() == sum(weight.numel() for weight in weights)
    begin = 3 * hidden * inputs + 3 * hidden
    pairs = got[begin : begin + hidden * 3 * 2 * lanes].reshape(hidden, 3, 2 * lanes)
    assert torch.equal(pairs[5, 2], weights[1][2 * hidden : 2 * hidden + 2 * lanes, 5])
    last = got[begin + pairs.numel() : begin + 3 * hidden * hidden].reshape(hidden, 3, lanes)
    assert torch.equal(last[7, 1], weights[1][hidden + 2 * lanes : 2 * hidden, 7])
    assert torch.equal(got[-3 * hidden :], weights[3])
    assert not packed(weights[:2], item, lanes)[-3 * hidden :].any()
    as_onednn_has_them = [weight.t().reshape(1, 1, -1, 3, hidden) for weight in weights[:2]]
    assert torch.equal(packed([*as_onednn_has_them, *weights[2:]], item, lanes), got)


def test_weights_that_nobody_reads_any_more_are_not_kept() -> None:
    x = torch.randn(5, 2, 16)
    found = captured(layer_of(16, 32), x)
    bound, [index] = bound_with(found, OWN)
    [item] = [item for call in found.program.graph.operators[index].calls if (item := read_recurrence(call, found.program.graph))]
    assert [bound.constants[slot] for slot in item.weights] == [None] * 4


def test_a_kernel_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 2, 16)
    found = captured(layer_of(16, 32), x)
    monkeypatch.setattr(recurrent, "packed", lambda *args: 1.01 * packed(*args))
    _, [index] = bound_with(found, OWN)
    made = library_of(found).kernel(index, 1, OWN, bind(found.program, found.constants, "cpu"))
    assert isinstance(made, Refused)
    assert "computes something else" in made.reason


def test_it_is_offered_in_every_lowering_but_aten_and_not_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 2, 16)
    for lowering in (Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED):
        found = captured(layer_of(16, 32), x, lowering=lowering)
        having = [index for index, row in enumerate(offered_variants(found.program, "cpu")) if OWN in row]
        assert len(having) == (0 if lowering is Lowering.ATEN else 1)
        assert not any(OWN in row for row in offered_variants(found.program, "cuda"))
    monkeypatch.setenv("AUTOSCHED_RECURRENCE", "0")
    assert not any(OWN in row for row in offered_variants(found.program, "cpu"))
    assert ways.missing_kernel(OWN) == "switched off by AUTOSCHED_RECURRENCE=0"
    monkeypatch.setenv("AUTOSCHED_RECURRENCE", "no")
    with pytest.raises(UsageError, match="AUTOSCHED_RECURRENCE is 'no'; expected 1, or 0"):
        offered_variants(found.program, "cpu")


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_a_file_that_uses_it_is_loaded_and_follows_the_models_weights(
    kind: type[nn.RNNBase], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Net(layer_of(16, 32, kind, num_layers=2), both=True).eval(), torch.randn(5, 2, 16)
    count = save_with(tmp_path / "net.autosched", capture(model, (x,)), OWN)
    fast = autosched.load(tmp_path / "net.autosched", model, strict=True)
    with torch.no_grad():
        first = fast(x)[0]
        assert torch.allclose(first, model(x)[0], atol=1e-6)
        for parameter in model.parameters():
            parameter.mul_(-0.5)
        assert torch.allclose(fast(x)[0], model(x)[0], atol=1e-6)
        assert not torch.allclose(fast(x)[0], first, atol=1e-3)
    assert_degraded_without("AUTOSCHED_RECURRENCE", "recurrent layers", count, tmp_path / "net.autosched", model, monkeypatch)
