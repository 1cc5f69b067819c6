"""Recurrent layers taken apart on a CPU: every option of PyTorch's, against PyTorch's own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.draft import Draft
from autosched.capture.export import capture, draft_of
from autosched.capture.passes import cpu_recurrent
from autosched.capture.passes.cpu_recurrent import part_cpu_recurrences
from autosched.capture.passes.onednn import packable_dtypes
from autosched.core.program import Ref
from autosched.core.variants import Lowering
from tests.conformance.apply import Apply

OPTIONS = list(itertools.product((False, True), repeat=4))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def check(model: nn.Module, inputs: tuple[torch.Tensor, ...], expected: int = 1, tolerance: float = 1e-6) -> Draft:
    """Run the pass; outputs agree with the model's in values, shapes and strides."""
    draft = draft_of(model.eval(), inputs)
    assert part_cpu_recurrences(draft) == expected
    made = draft.observe()
    with torch.no_grad():
        wanted = torch.utils._pytree.tree_leaves(model(*inputs))
    for leaf, reference in zip(draft.output_leaves, wanted, strict=True):
        assert isinstance(leaf, Ref)
        assert made[leaf.value].stride() == reference.stride()
        torch.testing.assert_close(made[leaf.value].clone(), reference, rtol=tolerance, atol=tolerance)
    return draft


def kinds(draft: Draft) -> list[str]:
    return [node.kind.partition("::")[2] for node in draft.nodes]


@pytest.mark.parametrize(("both", "deep", "biases", "first"), OPTIONS)
@pytest.mark.parametrize("batch", [1, 3])
def test_an_lstm_is_one_call_for_each_layer_and_direction(both: bool, deep: bool, biases: bool, first: bool, batch: int) -> None:
    layers, directions = 1 + deep, 1 + both
    model = nn.LSTM(8, 16, layers, bidirectional=both, bias=biases, batch_first=first)
    draft = check(model, (torch.randn(batch, 5, 8),))
    assert kinds(draft).count("mkldnn_rnn_layer") == layers * directions
    assert [node.kind for node in draft.prologue].count("mkldnn::_reorder_mkldnn_rnn_layer_weight") == layers * directions


@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0_reverse", "bias_ih_l0"])
def test_weights_that_are_transposed_or_have_gaps_are_packed_as_they_are_read(name: str) -> None:
    """As they are where they come from a framework that holds them the other way round."""
    model = nn.LSTM(8, 16, bidirectional=True)
    held = torch.randn(8 if "ih" in name else 16, 64).t() if name.startswith("weight") else torch.randn(64, 2)[:, 1]
    setattr(model, name, nn.Parameter(held))
    assert not getattr(model, name).is_contiguous()
    check(model, (torch.randn(5, 3, 8),))


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
@pytest.mark.parametrize(("deep", "biases", "first"), list(itertools.product((False, True), repeat=3)))
def test_two_directions_of_the_others_are_two_calls_for_each_layer(kind: Any, deep: bool, biases: bool, first: bool) -> None:
    model = kind(8, 16, 1 + deep, bidirectional=True, bias=biases, batch_first=first)
    draft = check(model, (torch.randn(3, 5, 8),))
    own = "gru" if kind is nn.GRU else "rnn_tanh"
    assert kinds(draft).count(own) == 2 * (1 + deep)
    assert kinds(draft).count("flip") == 2 * (1 + deep)


@pytest.mark.parametrize(("deep", "first"), [(True, False), (False, True), (True, True)])
def test_a_gru_in_one_direction_is_one_call_for_each_layer_steps_first(deep: bool, first: bool) -> None:
    """As the kernel of our own takes it."""
    draft = check(nn.GRU(8, 16, 1 + deep, batch_first=first), (torch.randn(3, 5, 8),))
    assert kinds(draft).count("gru") == 1 + deep
    assert all(
        node.argument("num_layers") == 1 and not node.argument("batch_first") for node in draft.nodes if node.target == "aten::gru.input"
    )


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_states_are_given_and_returned(kind: Any) -> None:
    def run(m: Any, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> Any:
        # As they come from a network that has the batch first: not row by row.
        states = first.transpose(0, 1), second.transpose(0, 1)
        return m.layer(x.transpose(0, 1), states if kind is nn.LSTM else states[0])

    model = Apply(run, layer=kind(8, 16, 2, bidirectional=True))
    check(model, (torch.randn(3, 5, 8), torch.randn(3, 4, 16), torch.randn(3, 4, 16)))


def test_what_nobody_reads_is_not_made() -> None:
    draft = check(Apply(lambda m, x: m.layer(x)[0][:, -1], layer=nn.LSTM(8, 16, 2)), (torch.randn(5, 3, 8),))
    assert "cat" not in kinds(draft)
    draft = check(Apply(lambda m, x: m.layer(x)[1][0], layer=nn.LSTM(8, 16, bidirectional=True)), (torch.randn(5, 3, 8),))
    assert kinds(draft).count("cat") == 1


def test_a_sequence_without_batch_and_one_of_a_single_step() -> None:
    check(nn.LSTM(8, 16, bidirectional=True), (torch.randn(5, 8),))
    check(nn.LSTM(8, 16, 2, batch_first=True), (torch.randn(4, 1, 8),))


def test_bfloat16_is_packed_where_the_processor_has_it() -> None:
    if "bfloat16" not in packable_dtypes():
        pytest.skip("oneDNN has no products in bfloat16 on this processor")
    check(nn.LSTM(8, 16, bidirectional=True).to(torch.bfloat16), (torch.randn(5, 3, 8).to(torch.bfloat16),), tolerance=2e-2)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.LSTM(8, 16, proj_size=4), torch.randn(5, 3, 8)),
        (nn.LSTM(8, 16).double(), torch.randn(5, 3, 8).double()),
        (nn.LSTM(8, 16).to(torch.float16), torch.randn(5, 3, 8).to(torch.float16)),
        (nn.GRU(8, 16), torch.randn(5, 3, 8)),
        (nn.RNN(8, 16), torch.randn(5, 3, 8)),
    ],
    ids=["projected", "float64", "float16", "gru of one layer and direction", "rnn in one direction"],
)
def test_what_has_no_better_form_stays(model: nn.Module, x: torch.Tensor) -> None:
    draft = draft_of(model.eval(), (x,))
    before = kinds(draft)
    assert part_cpu_recurrences(draft) == 0
    assert kinds(draft) == before


def test_weights_that_are_computed_from_inputs_stay() -> None:
    def run(m: Any, x: torch.Tensor, scale: torch.Tensor) -> Any:
        weights = [weight * scale for weight in m.layer._flat_weights]
        zeros = torch.zeros(1, 3, 16)
        return torch.ops.aten.lstm.input(x, [zeros, zeros], weights, True, 1, 0.0, False, False, False)[0]

    check(Apply(run, layer=nn.LSTM(8, 16)), (torch.randn(5, 3, 8), torch.tensor(2.0)), expected=0)


def test_without_packed_weights_lstm_stays_and_gru_is_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_recurrent, "packable_dtypes", frozenset)
    check(nn.LSTM(8, 16, bidirectional=True), (torch.randn(5, 3, 8),), expected=0)
    check(nn.GRU(8, 16, bidirectional=True), (torch.randn(5, 3, 8),))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_directions_may_run_at_the_same_time_and_their_work_is_counted(kind: Any) -> None:
    graph = capture(kind(8, 16, bidirectional=True).eval(), (torch.randn(5, 1, 8),), lowering=Lowering.REWRITTEN).program.graph
    assert graph.width >= 2
    gates = 4 if kind is nn.LSTM else 3
    name = "aten::mkldnn_rnn_layer" if kind is nn.LSTM else "aten::gru"
    counted = [operator.flops for operator in graph.operators if operator.kind == name]
    assert len(counted) == 2
    # Inputs and hidden states; a registry may leave out what is less than the products.
    assert all(flops == pytest.approx(2 * 5 * gates * 16 * (8 + 16), rel=0.02) for flops in counted)
