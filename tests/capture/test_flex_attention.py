"""FlexAttention becomes PyTorch's own operators while a model is exported."""

import threading
import warnings
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from autosched.capture.dynamo import DynamoGraph, inputs_of
from autosched.capture.export import capture
from autosched.capture.flex_attention import flex_attention_spelled_out
from autosched.core.errors import UnsupportedGraph
from autosched.core.variants import Lowering
from autosched.runtime.kernels import bind

QUERIES, KEYS, HEADS, SIZE = 12, 20, 4, 8
OPERATOR = import_module("torch._higher_order_ops.flex_attention").flex_attention


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        # PyTorch's advice to compile it.
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield


def heads(batch: int = 2, *, shared: int = 1) -> tuple[torch.Tensor, ...]:
    """Query, key and value, laid out as a layer of linear products leaves them."""
    counts = ((QUERIES, HEADS), (KEYS, HEADS // shared), (KEYS, HEADS // shared))
    return tuple(torch.randn(batch, length, count, SIZE).transpose(1, 2) for length, count in counts)


class Window(nn.Module):
    """A mask that every call has: no query sees nothing."""

    def __init__(self):
        super().__init__()
        self.mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 5), None, None, QUERIES, KEYS, device="cpu")

    def forward(self, q, k, v):
        return flex_attention(q, k, v, block_mask=self.mask).transpose(1, 2).flatten(2).relu()


class Padded(nn.Module):
    """A mask of an input; the first queries of a row with padding see nothing."""

    def forward(self, q, k, v, seen):
        mask = create_block_mask(lambda b, h, i, j: (i >= j) & seen[b, j], q.shape[0], None, QUERIES, KEYS, device="cpu")
        return flex_attention(q, k, v, block_mask=mask, scale=0.3, kernel_options={"BLOCK_M": 16})


class Biased(nn.Module):
    """Scores that depend on parameters and on places."""

    def __init__(self):
        super().__init__()
        self.slopes = nn.Parameter(torch.randn(HEADS))

    def forward(self, q, k, v):
        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: torch.tanh(score) + self.slopes[h] * (j - i))


class Grouped(nn.Module):
    """Heads of keys shared by several of queries; a statistic of the scores is asked for."""

    def forward(self, q, k, v):
        out, statistics = flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return out, statistics.lse


def seen_with_padding(batch: int = 2) -> torch.Tensor:
    seen = torch.ones(batch, KEYS, dtype=torch.bool)
    seen[0, :4] = False
    return seen


CASES = {
    "window": (Window, heads),
    "padded": (Padded, lambda: (*heads(), seen_with_padding())),
    "padded-views": (Padded, lambda: (*heads(1), seen_with_padding(1)[0][None])),
    "biased": (Biased, heads),
    "grouped": (Grouped, lambda: heads(shared=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_its_numbers_are_those_of_the_model(name):
    kind, inputs = CASES[name]
    model, example = kind().eval(), inputs()
    for lowering in (Lowering.ATEN, Lowering.REWRITTEN):
        captured = capture(model, example, lowering=lowering)
        assert not any("flex" in operator.kind for operator in captured.program.graph.operators)
        call = tuple(torch.randn_like(item) if item.is_floating_point() else item for item in example)
        with torch.no_grad():
            expected = model(*call)
        made = bind(captured.program, captured.constants).run(call)
        for ours, theirs in zip(made, expected if isinstance(expected, tuple) else (expected,), strict=True):
            torch.testing.assert_close(ours, theirs)
            assert ours.stride() == theirs.stride()


def kinds(model: nn.Module, example: tuple[torch.Tensor, ...]) -> list[str]:
    program = capture(model, example).program
    return [call.target.split(".")[0] for operator in program.graph.operators for call in operator.calls]


def test_scores_left_as_they_are_become_masked_attention():
    made = kinds(Window().eval(), heads())
    assert "aten::scaled_dot_product_attention" in made
    assert "aten::masked_fill" not in made  # no query sees nothing, whatever the inputs
    assert "aten::_safe_softmax" not in made
    assert "aten::logsumexp" not in made


def test_its_layout_is_that_of_the_query_by_one_copy_at_most():
    made = kinds(Biased().eval(), heads())
    assert made.count("aten::clone") + made.count("aten::contiguous") == 1
    assert not any("strided" in kind or "empty" in kind for kind in made)


def test_queries_that_see_nothing_get_zeros():
    model, example = Padded().eval(), (*heads(), seen_with_padding())
    assert "aten::masked_fill" in kinds(model, example)
    captured = capture(model, example)
    (out,) = bind(captured.program, captured.constants).run(example)
    assert torch.equal(out[0, :, :4], torch.zeros(HEADS, 4, SIZE))
    assert bool(out[1].any())
    assert not bool(out.isnan().any())


def test_one_that_the_model_compiles_itself_is_spelled_out_as_well():
    class Compiled(Window):
        def __init__(self):
            super().__init__()
            self.attend = torch.compile(flex_attention, backend="eager")

        def forward(self, q, k, v):
            return self.attend(q, k, v, block_mask=self.mask).relu()

    model, example = Compiled().eval(), heads()
    captured = capture(model, example)
    with torch.no_grad():
        torch.testing.assert_close(bind(captured.program, captured.constants).run(example)[0], model(*example))


def test_a_graph_of_dynamos_has_its_functions_in_inference_mode():
    found = []

    def backend(graph, examples):
        static = inputs_of(graph, examples)
        found.append(
            (DynamoGraph(graph, static, [examples[index] for index in static.static]), [examples[index] for index in static.given])
        )
        return graph.forward

    model, example = Biased().eval(), heads()
    with torch.no_grad():
        torch.compile(model, backend=backend)(*example)
    graph, given = found[-1]
    assert not any(part.training for part in graph.modules())
    captured = capture(graph, tuple(given))
    with torch.no_grad():
        torch.testing.assert_close(bind(captured.program, captured.constants).run(tuple(given))[0], model(*example))


def test_it_is_spelled_out_in_the_thread_that_exports_and_only_meanwhile():
    called, elsewhere = type(OPERATOR).__call__, []
    q, k, v = heads(1)
    call = (q, k, v, lambda score, *_: score, (1, 1, *(None,) * 8, 128, 128, lambda b, h, i, j: i >= j), 1.0, {})
    with flex_attention_spelled_out():
        assert type(OPERATOR).__call__ is not called
        thread = threading.Thread(target=lambda: elsewhere.append(OPERATOR(*call)[0]))
        thread.start()
        thread.join()
        here = OPERATOR(*call)[0]
    assert type(OPERATOR).__call__ is called
    torch.testing.assert_close(here, elsewhere[0])
    with pytest.raises(ZeroDivisionError), flex_attention_spelled_out():
        raise ZeroDivisionError
    assert type(OPERATOR).__call__ is called


def test_a_block_mask_in_the_call_is_refused_with_where_to_make_it():
    class Given(nn.Module):
        def forward(self, q, k, v, mask):
            return flex_attention(q, k, v, block_mask=mask)

    with pytest.raises(UnsupportedGraph, match=r"BlockMask.*create_block_mask in forward"):
        capture(Given().eval(), (*heads(), Window().mask))


def test_a_pytorch_that_has_it_otherwise_has_such_models_refused(monkeypatch):
    monkeypatch.delattr(import_module("torch._higher_order_ops.flex_attention"), "math_attention")
    with pytest.raises(UnsupportedGraph, match=r"flex_attention.*scaled_dot_product_attention"):
        capture(Biased().eval(), heads())
