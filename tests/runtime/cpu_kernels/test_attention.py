"""Attention by the kernel of our own: which is taken, what it computes, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autosched
from autosched.capture.export import Captured, capture
from autosched.core.graph import OpGraph
from autosched.core.program import Call, Ref
from autosched.core.variants import Lowering, Variant
from autosched.pipeline.inductor_capture import capture_inductor
from autosched.runtime.cpu_kernels import steps
from autosched.runtime.cpu_kernels.attention import Attention, geometry, read_attention
from autosched.runtime.inductor.common import Refused
from autosched.runtime.instructions import RunKernel, Window, instructions_of
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

OWN = Variant.OWN_ATTENTION

pytestmark = pytest.mark.usefixtures("kernel")


class Net(nn.Module):
    """Attention with options; ``expanded``: the mask is made as large as the scores are."""

    def __init__(self, expanded: bool = False, **options: Any) -> None:
        super().__init__()
        self.expanded, self.options = expanded, options

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is not None and self.expanded:
            mask = mask.expand(*query.shape[:3], key.shape[2])
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **self.options)


class Block(nn.Module):
    """As vision transformers have it: one product for queries, keys and values."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.first, self.last, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, width = x.shape
        query, key, value = self.first(x).reshape(batch, rows, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self.last(nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, rows, width))


def heads_of(batch: int, heads: int, rows: int, width: int) -> torch.Tensor:
    """``[batch, heads, rows, width]``, as a product of a layer comes: rows of all heads side by side."""
    return torch.randn(batch, rows, heads, width).transpose(1, 2)


def inputs_of(shape: tuple[int, ...], mask: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Of batch, heads, heads of keys, queries, keys, width, features."""
    torch.manual_seed(0)
    batch, heads, shared, queries, keys, width, features = shape
    made = (heads_of(batch, heads, queries, width), heads_of(batch, shared, keys, width), heads_of(batch, shared, keys, features))
    return made if mask is None else (*made, mask)


def hidden(*shape: int) -> torch.Tensor:
    """Booleans: a key in four is hidden, but never the first."""
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.25
    seen[..., 0] = True
    return seen


def added(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


CASES: dict[str, tuple[tuple[int, ...], torch.Tensor | None, dict[str, Any]]] = {
    "one head": ((1, 1, 1, 8, 8, 16, 16), None, {}),
    "a vision transformer's": ((1, 6, 6, 197, 197, 64, 64), None, {}),
    "windows": ((4, 3, 3, 49, 49, 32, 32), None, {}),
    "widths that fill no vectors": ((2, 3, 3, 21, 13, 22, 7), None, {}),
    "a width of one": ((1, 2, 2, 9, 5, 1, 1), None, {}),
    "one key": ((1, 2, 2, 9, 1, 16, 16), None, {}),
    "many keys": ((1, 1, 1, 11, 1500, 40, 24), None, {}),
    "shared heads": ((2, 8, 2, 17, 33, 32, 48), None, {"enable_gqa": True}),
    "one head for all": ((2, 6, 1, 30, 30, 16, 16), None, {"enable_gqa": True}),
    "scaled": ((1, 2, 2, 16, 16, 32, 32), None, {"scale": 1.0}),
    "causal": ((2, 3, 3, 70, 70, 32, 32), None, {"is_causal": True}),
    "causal, more keys": ((1, 2, 2, 40, 90, 32, 32), None, {"is_causal": True}),
    "causal, more queries": ((1, 2, 2, 90, 40, 32, 32), None, {"is_causal": True}),
    "hidden keys": ((2, 4, 4, 20, 50, 32, 32), hidden(2, 1, 1, 50), {}),
    "hidden, each head": ((1, 4, 4, 20, 50, 32, 32), hidden(1, 4, 20, 50), {}),
    "hidden, two dimensions": ((2, 4, 4, 20, 50, 32, 32), hidden(20, 50), {}),
    "all or nothing hidden": ((1, 2, 2, 20, 50, 32, 32), torch.arange(20).reshape(1, 1, 20, 1) % 3 > 0, {}),
    "added, each head": ((2, 4, 4, 20, 50, 32, 32), added(1, 4, 20, 50), {}),
    "added, two dimensions": ((2, 4, 4, 20, 50, 32, 32), added(20, 50), {}),
    "added, the same to every key": ((1, 4, 4, 20, 50, 32, 32), added(1, 1, 20, 1), {}),
    "added, expanded": ((2, 4, 4, 20, 50, 32, 32), added(2, 1, 1, 50), {"expanded": True}),
    "a query": ((1, 6, 6, 1, 100, 64, 64), None, {}),
    "a query, widths that fill no vectors": ((2, 3, 3, 1, 13, 22, 7), None, {}),
    "a query, a width of one": ((1, 2, 2, 1, 5, 1, 1), None, {}),
    "a query, wide": ((1, 2, 2, 1, 33, 150, 200), None, {}),
    "a query, one key": ((1, 2, 2, 1, 1, 16, 16), None, {}),
    "a query, very many keys": ((1, 1, 1, 1, 9000, 32, 32), None, {}),
    "a query, shared heads": ((2, 8, 2, 1, 33, 32, 48), hidden(2, 1, 1, 33), {"enable_gqa": True}),
    "a query, hidden keys": ((2, 4, 4, 1, 50, 32, 32), hidden(2, 1, 1, 50), {}),
    "a query, all or nothing hidden": ((1, 2, 2, 1, 50, 32, 32), torch.arange(2).reshape(1, 2, 1, 1) > 0, {}),
    "a query, most of a cache empty": ((2, 4, 4, 1, 512, 64, 64), (torch.arange(512) - 100).abs().reshape(1, 1, 1, 512) < 17, {}),
    "a query, most of a cache empty, by numbers": (
        (2, 4, 4, 1, 512, 64, 64), torch.zeros(512).masked_fill((torch.arange(512) - 100).abs() > 16, -math.inf).reshape(1, 512), {},
    ),
    "few queries": ((2, 6, 3, 7, 50, 32, 32), added(2, 6, 7, 50), {"enable_gqa": True}),
    "few queries, causal": ((2, 3, 3, 5, 9, 32, 32), None, {"is_causal": True}),
    "few queries, causal, fewer keys": ((2, 3, 3, 7, 4, 32, 32), None, {"is_causal": True}),
    "few queries, each with keys of its own": ((1, 4, 2, 3, 60, 32, 32), torch.eye(3).repeat_interleave(20, 1) > 0, {"enable_gqa": True}),
    "added, as far as float32 goes": ((2, 4, 4, 20, 50, 32, 32), (~hidden(2, 1, 20, 50)) * torch.finfo(torch.float32).min, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_the_model_does(name: str) -> None:
    shape, mask, options = CASES[name]
    inputs, model = inputs_of(shape, mask), Net(**options)
    found = capture(model, inputs, lowering=Lowering.REWRITTEN)
    bound, offered = bound_with(found, OWN)
    assert len(offered) == 1
    [got] = bound.run(list(inputs))
    wanted = model(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs))
    assert float((got - wanted).abs().max()) < 3e-6
    assert got.stride() == model(*inputs).stride()


def test_no_bit_depends_on_the_number_of_threads() -> None:
    """Of so many heads and queries that threads divide them."""
    few = (3, 8, 4, 3, 1500, 64, 64)
    for shape, options in (
        ((1, 3, 3, 100, 90, 32, 32), {}),
        ((1, 1, 1, 300, 300, 64, 64), {"is_causal": True}),
        (few, {"enable_gqa": True}),
    ):
        inputs = inputs_of(shape)
        found = capture(Net(**options), inputs, lowering=Lowering.REWRITTEN)
        outputs = [bound_with(found, OWN, width)[0].run(list(inputs))[0] for width in (1, 2, 3, 8)]
        assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("queries", [4, 20])
@pytest.mark.parametrize("by", ["booleans", "numbers"])
def test_a_query_that_sees_nothing_gets_zeros(by: str, queries: int) -> None:
    seen = hidden(1, 1, queries, 50)
    seen[..., 3, :] = False
    mask = seen if by == "booleans" else torch.zeros(1, 1, queries, 50).masked_fill(~seen, -math.inf)
    inputs = inputs_of((1, 2, 2, queries, 50, 32, 32), mask)
    [got] = bound_with(capture(Net(), inputs, lowering=Lowering.REWRITTEN), OWN)[0].run(list(inputs))
    assert not got[:, :, 3].any()
    assert torch.allclose(got, Net()(*inputs), atol=2e-6)


def test_scores_far_apart() -> None:
    """One key takes all; what the others have would be smaller than any number."""
    query, key, value = inputs_of((1, 2, 2, 20, 50, 32, 32))
    for scale in (30.0, 1e3, 1e6):
        inputs = (scale * query, key, value)
        [got] = bound_with(capture(Net(), inputs, lowering=Lowering.REWRITTEN), OWN)[0].run(list(inputs))
        wanted = Net()(*(tensor.double() for tensor in inputs))
        assert torch.allclose(got.double(), wanted, atol=3e-7 * scale)


def test_of_queries_that_see_nothing_at_all_nothing_is_read() -> None:
    query, key, value = inputs_of((1, 2, 2, 2, 50, 32, 32))
    key[:], value[:] = math.nan, math.nan
    inputs = (query, key, value, torch.zeros(1, 1, 2, 50, dtype=torch.bool))
    [got] = bound_with(capture(Net(), inputs, lowering=Lowering.REWRITTEN), OWN)[0].run(list(inputs))
    assert torch.equal(got, torch.zeros_like(got))


@pytest.mark.parametrize("queries", [7, 40])
def test_not_a_number_stays_in_its_rows(queries: int) -> None:
    query, key, value = inputs_of((1, 2, 2, queries, 50, 32, 32))
    query[0, 0, 5, 3], query[0, 1, 6, 0] = math.nan, math.inf
    value[0, 1, 9, 4] = math.nan
    [got] = bound_with(capture(Net(), (query, key, value), lowering=Lowering.REWRITTEN), OWN)[0].run([query, key, value])
    wanted = Net()(query, key, value)
    assert got[0, 0, 5].isnan().all()
    assert got[0, 1, :, 4].isnan().all()
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.allclose(got.nan_to_num(), wanted.nan_to_num(), atol=1e-6)


def test_instructions_do_what_the_kernel_does_also_without_the_interpreter() -> None:
    few = inputs_of((2, 4, 4, 2, 50, 32, 32), hidden(2, 50))
    for inputs, model in (
        ((torch.randn(2, 33, 64),), Block()),
        (inputs_of((2, 4, 4, 20, 50, 32, 32), hidden(20, 50)), Net()),
        (few, Net()),
    ):
        found = capture(model.eval(), inputs, lowering=Lowering.REWRITTEN)
        bound, offered = bound_with(found, OWN)
        assert offered
        assert_instructions_and_lanes_agree(bound, *inputs)


def test_other_tensors_than_it_was_made_for_are_refused_when_it_runs() -> None:
    inputs = inputs_of((1, 2, 2, 20, 50, 32, 32), hidden(20, 50))
    bound, [index] = bound_with(capture(Net(), inputs, lowering=Lowering.REWRITTEN), OWN)
    for place, other in ((1, inputs[1][:, :, :49]), (0, inputs[0].contiguous()), (3, inputs[3].float())):
        slots = bound.new_slots([other if each == place else tensor for each, tensor in enumerate(inputs)])
        with pytest.raises(RuntimeError, match=f"value {place} is .*expected"):
            bound.kernels[index](slots)


LEFT_ALONE: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {
    "a query, more keys than are kept": (inputs_of((1, 1, 1, 1, 32769, 8, 8)), {}),
    "very many keys": (inputs_of((1, 1, 1, 8, 4097, 8, 8)), {}),
    "float64": (tuple(tensor.double() for tensor in inputs_of((1, 2, 2, 20, 50, 32, 32))), {}),
    "numbers of a row apart": (tuple(tensor.mT.contiguous().mT for tensor in inputs_of((1, 2, 2, 20, 50, 32, 32))), {}),
    "keys of a mask apart": (inputs_of((1, 2, 2, 20, 50, 32, 32), added(50, 20).mT), {}),
    "a mask of float64": ((*(tensor.double() for tensor in inputs_of((1, 2, 2, 20, 50, 32, 32))), added(20, 50).double()), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_attention_stays_as_it_is(name: str) -> None:
    inputs, options = LEFT_ALONE[name]
    found = capture(Net(**options), inputs, lowering=Lowering.REWRITTEN)
    assert not having(found, OWN)
    bound = bind(found.program, found.constants, "cpu")
    for operator in found.program.graph.operators:
        assert isinstance(library_of(found).kernel(operator.index, 1, OWN, bound), Refused)


def _call_and_graph() -> tuple[Call, OpGraph]:
    """Of queries, keys, values and a mask, in this order."""
    inputs = inputs_of((2, 4, 4, 20, 50, 32, 32), added(1, 4, 20, 50))
    graph = capture(Net(), inputs, lowering=Lowering.REWRITTEN).program.graph
    [call] = [call for operator in graph.operators for call in operator.calls]
    return call, graph


@pytest.mark.parametrize(
    ("place", "changes"),
    [
        (0, {"dtype": "float64"}),
        (0, {"strides": (2560, 32, 128, 2)}),
        (0, {"strides": (2560, 32, -128, 1)}),
        (0, {"strides": ()}),
        (0, {"shape": (2, 4, 20, 31)}),
        (0, {"shape": (2, 3, 20, 32)}),
        (1, {"shape": (1, 4, 50, 32)}),
        (1, {"shape": (2, 4, 49, 32)}),
        (1, {"dtype": "float16"}),
        (2, {"shape": (2, 2, 50, 32)}),
        (2, {"shape": (2, 4, 50, 0)}),
        (3, {"dtype": "int64"}),
        (3, {"shape": (1, 4, 20, 49)}),
        (3, {"shape": (1, 1, 4, 20, 50)}),
        (3, {"strides": (4000, 1000, 1, 20)}),
        (3, {"strides": (4000, 1000, -50, 1)}),
        (4, {"dtype": "float64"}),
        (4, {"shape": (2, 4, 20, 33)}),
        (4, {"strides": (2560, 32, 128, 2)}),
        (4, {"strides": (2560, 32, 64, 1)}),
    ],
)
def test_forms_that_the_kernel_takes_for_granted(place: int, changes: dict[str, object]) -> None:
    """Of queries, keys, values, the mask, and the result."""
    call, graph = _call_and_graph()
    assert read_attention(call, graph, {}) is not None
    index = [*call.reads(), call.outputs[0]][place]
    assert read_attention(call, with_value(graph, index, **changes), {}) is None


def test_calls_with_other_arguments_are_not_read() -> None:
    call, graph = _call_and_graph()
    query, key, value, mask = call.args
    others = [
        {"args": (query, key, value, mask, 0.1)},
        {"args": (query, key, value, mask, 0.0, True)},
        {"args": (query, key, value, None), "kwargs": (("dropout_p", 0.1),)},
        {"kwargs": (("scale", "large"),)},
        {"kwargs": (("scale", 1e39),)},
        {"kwargs": (("scale", 10**400),)},
        {"args": (query, None, value)},
        {"args": (query, key, value, 3)},
        {"outputs": (-1,)},
        {"outputs": (*call.outputs, 0)},
        {"target": "aten::matmul.default"},
    ]
    assert [read_attention(dataclasses.replace(call, **changes), graph, {}) for changes in others] == [None] * len(others)
    plain = read_attention(dataclasses.replace(call, args=(query, key, value), kwargs=(("is_causal", True), ("scale", 2))), graph, {})
    assert plain is not None
    assert (plain.mask, plain.causal, plain.scale) == (None, True, 2.0)
    unused = dataclasses.replace(
        call,
        target="aten::_scaled_dot_product_flash_attention_for_cpu.default",
        args=(query, key, value),
        kwargs=(("attn_mask", mask),),
        outputs=(call.outputs[0], -1),
    )
    assert read_attention(unused, graph, {}) == read_attention(call, graph, {})


def test_views_that_an_operator_makes_itself_are_read_where_they_lie() -> None:
    call, graph = _call_and_graph()
    query, *others = call.args
    assert isinstance(query, Ref)
    spec = graph.values[query.value].spec
    moved = dataclasses.replace(call, args=(Ref(-3), *others))

    def read(size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Attention | None:
        return read_attention(moved, graph, {-3: Window(-3, query.value, size, stride, offset)})

    found = read(spec.shape, spec.strides, 0)
    assert found is not None
    assert (found.source, found.query.offset) == (query.value, 0)
    assert read(spec.shape, spec.strides, 1) is None
    assert read(spec.shape, spec.strides, -1) is None
    assert read(spec.shape, (*spec.strides[:2], -1, 1), 200) is None
    assert read((2, 4, 20, 33), spec.strides, 0) is None
    # Half of the batch twice, from the second half on.
    again = read(spec.shape, (0, *spec.strides[1:]), spec.strides[0])
    assert again is not None
    assert geometry(again, graph, 1)[8:10].tolist() == [spec.strides[0], 0]
    assert read_attention(moved, graph, {}) is None


def test_it_is_offered_in_every_lowering_but_aten_and_not_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 33, 64)
    for lowering in (Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED):
        found = capture(Block().eval(), (x,), lowering=lowering)
        assert len(having(found, OWN)) == (0 if lowering is Lowering.ATEN else 1)
        assert not any(OWN in row for row in offered_variants(found.program, "cuda"))
    assert_switched_off_by("AUTOSCHED_ATTENTION", OWN, found, having(found, OWN)[0], monkeypatch)


def test_launches_of_inductors_code_have_it_too() -> None:
    model, x = Block().eval(), torch.randn(2, 33, 64)
    found = capture_inductor(model, (x,))
    assert isinstance(found, Captured)
    bound, [index] = bound_with(found, OWN)
    assert any(isinstance(item, RunKernel) and item.name == "autosched_attention" for item in instructions_of(bound.kernels[index]) or ())
    assert torch.allclose(bound.run([x])[0], model(x), atol=1e-6)


def test_a_kernel_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = capture(Block().eval(), (torch.randn(2, 33, 64),), lowering=Lowering.REWRITTEN)
    [index] = having(found, OWN)
    right = steps_way(found, index)
    assert callable(right)

    def wrong(item: Attention, graph: OpGraph, width: int) -> torch.Tensor:
        return geometry(dataclasses.replace(item, causal=True), graph, width)

    way = dataclasses.replace(steps.WAYS[OWN], numbers=wrong)
    monkeypatch.setattr(steps, "WAYS", {**steps.WAYS, OWN: way})
    made = steps_way(found, index)
    assert isinstance(made, Refused)
    assert "computes something else" in made.reason


@pytest.mark.parametrize("mask", [hidden(20, 50), added(20, 50)])
def test_a_kernel_that_reads_another_place_of_a_mask_is_refused(mask: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    found = capture(Net(), inputs_of((1, 2, 2, 20, 50, 32, 32), mask), lowering=Lowering.REWRITTEN)

    def wrong(item: Attention, graph: OpGraph, width: int) -> torch.Tensor:
        assert item.mask is not None
        return geometry(dataclasses.replace(item, mask=dataclasses.replace(item.mask, strides=(0, 0, 0, 1))), graph, width)

    monkeypatch.setattr(steps, "WAYS", {**steps.WAYS, OWN: dataclasses.replace(steps.WAYS[OWN], numbers=wrong)})
    made = steps_way(found, having(found, OWN)[0])
    assert isinstance(made, Refused)
    assert "computes something else" in made.reason


def steps_way(found: Captured, index: int) -> object:
    return library_of(found).kernel(index, 1, OWN, bind(found.program, found.constants, "cpu"))


def test_a_file_that_uses_it_is_loaded_and_follows_the_models_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Block().eval(), torch.randn(2, 33, 64)
    count = save_with(tmp_path / "net.autosched", capture(model, (x,), lowering=Lowering.REWRITTEN), OWN)
    fast = autosched.load(tmp_path / "net.autosched", model, strict=True)
    with torch.no_grad():
        first = fast(x)
        assert torch.allclose(first, model(x), atol=1e-6)
        for parameter in model.parameters():
            parameter.mul_(-0.5)
        assert torch.allclose(fast(x), model(x), atol=1e-6)
        assert not torch.allclose(fast(x), first, atol=1e-3)
    assert_degraded_without("AUTOSCHED_ATTENTION", "attention", count, tmp_path / "net.autosched", model, monkeypatch)
