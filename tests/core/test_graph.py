"""Graph invariants: edges, hash, validation."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import msgspec
import pytest

from autosched.core import digests
from autosched.core.errors import InvalidGraph
from autosched.core.graph import EdgeKind, Operator, OpGraph, TensorSpec, Value, ValueRole, kernel_signature, topological
from autosched.core.program import Call, Many, NonFinite, Ref

SPEC = TensorSpec((2, 3), "float32", (3, 1))


def value(index: int, role: ValueRole = ValueRole.INTERMEDIATE, storage: int | None = None) -> Value:
    return Value(index, SPEC, role, index if storage is None else storage)


def unary(index: int, source: int, result: int, *, target: str = "aten::relu.default", name: str = "") -> Operator:
    call = Call(target, (Ref(source),), (), (result,))
    return Operator(index, name or f"op{index}", (call,), (source,), (result,), (), 6, 24, 24, f"sig-{target}", "")


def diamond(names: tuple[str, ...] = ("a", "b", "c", "d")) -> OpGraph:
    values = (value(0, ValueRole.INPUT), value(1), value(2), value(3), value(4))
    join = Operator(3, names[3], (Call("aten::add.Tensor", (Ref(2), Ref(3)), (), (4,)),), (2, 3), (4,), (), 6, 48, 24, "add", "")
    operators = (
        unary(0, 0, 1, name=names[0]),
        unary(1, 1, 2, target="aten::sigmoid.default", name=names[1]),
        unary(2, 1, 3, target="aten::tanh.default", name=names[2]),
        join,
    )
    return OpGraph(operators, values, (0,), (4,))


def test_a_diamond_has_its_four_data_edges() -> None:
    graph = diamond()
    graph.validate()
    assert [(edge.before, edge.after) for edge in graph.edges] == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert {edge.kind for edge in graph.edges} == {EdgeKind.DATA}
    assert graph.independent(1, 2)
    assert not graph.independent(0, 3)
    assert graph.width == 2


def test_the_hash_ignores_names_and_the_order_of_independent_operators() -> None:
    graph = diamond()
    renamed = diamond(("w", "x", "y", "z"))
    assert renamed.hash == graph.hash
    a, b, c, d = graph.operators
    swapped = OpGraph((a, dataclasses.replace(c, index=1), dataclasses.replace(b, index=2), d), graph.values, (0,), (4,))
    swapped.validate()
    assert swapped.hash == graph.hash


def test_the_hash_of_a_fused_operator_hashes_each_of_its_calls_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = [0]
    encode = msgspec.json.encode

    def counting(what: object) -> bytes:
        text = encode(what)
        hashed[0] += len(text)
        return text

    monkeypatch.setattr(digests, "msgspec", SimpleNamespace(json=SimpleNamespace(encode=counting)))
    spent = []
    for count in (100, 200, 400):
        calls = tuple(Call("aten::relu.default", (Ref(index),), (), (index + 1,)) for index in range(count))
        values = (value(0, ValueRole.INPUT), *(value(index + 1, ValueRole.INTERNAL) for index in range(count - 1)), value(count))
        fused = Operator(0, "fused", calls, (0,), (count,), (), 6, 24, 24, "fused", "")
        hashed[0] = 0
        assert OpGraph((fused,), values, (0,), (count,)).hash
        spent.append(hashed[0])
    assert spent[2] - spent[1] < 2.2 * (spent[1] - spent[0])


def test_the_hash_of_a_fused_operator_is_what_files_know_it_by() -> None:
    calls = (Call("aten::relu.default", (Ref(0),), (), (1,)), Call("aten::add.Tensor", (Ref(1), 2.5), (), (2,)))
    fused = Operator(0, "fused", calls, (0,), (2,), (), 6, 24, 24, "fused", "")
    graph = OpGraph((fused,), (value(0, ValueRole.INPUT), value(1, ValueRole.INTERNAL), value(2)), (0,), (2,))
    assert graph.hash == "e40dbf948ce689e23aa08cc22bf99bd2aec51432014026659f2afc76ee2307a0"


def test_the_hash_sees_another_operator_literal_and_shape() -> None:
    graph = diamond()
    other = dataclasses.replace(graph, operators=(unary(0, 0, 1, target="aten::neg.default"), *graph.operators[1:]))
    assert other.hash != graph.hash
    wider = dataclasses.replace(graph, values=(Value(0, TensorSpec((4, 3), "float32", (3, 1)), ValueRole.INPUT, 0), *graph.values[1:]))
    assert wider.hash != graph.hash


def test_an_in_place_change_is_ordered_after_readers_and_before_later_ones() -> None:
    values = (value(0, ValueRole.INPUT), value(1), value(2), value(3), value(4))
    change = Operator(2, "change", (Call("aten::mul_.Scalar", (Ref(1), 2.0), (), (-1,)),), (1,), (), (1,), 6, 24, 24, "mul_", "")
    graph = OpGraph((unary(0, 0, 1), unary(1, 1, 2), change, unary(3, 1, 3)), values, (0,), (2, 3))
    graph.validate()
    kinds = {(edge.before, edge.after): edge.kind for edge in graph.edges}
    assert kinds[1, 2] is EdgeKind.MUTATION  # the reader goes first
    assert kinds[2, 3] is EdgeKind.MUTATION  # the later reader sees the change
    assert kinds[0, 2] is EdgeKind.DATA


def test_a_mutation_through_a_view_orders_readers_of_the_base() -> None:
    values = (value(0, ValueRole.INPUT), value(1), value(2, storage=1), value(3))
    view = Operator(1, "view", (Call("aten::view.default", (Ref(1), Many((6,))), (), (2,)),), (1,), (2,), (), 0, 24, 24, "view", "")
    change = Operator(2, "change", (Call("aten::zero_.default", (Ref(2),), (), (-1,)),), (2,), (), (2,), 0, 24, 24, "zero_", "")
    graph = OpGraph((unary(0, 0, 1), view, change, unary(3, 1, 3)), values, (0,), (3,))
    assert (2, 3) in {(edge.before, edge.after) for edge in graph.edges}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda g: dataclasses.replace(g, outputs=(9,)), "made by no operator"),
        (lambda g: dataclasses.replace(g, operators=g.operators[::-1]), "has index"),
        (
            lambda g: dataclasses.replace(g, operators=(g.operators[0], dataclasses.replace(g.operators[1], name="a"), *g.operators[2:])),
            "called a",
        ),
        (lambda g: dataclasses.replace(g, operators=(dataclasses.replace(g.operators[0], reads=(4,)), *g.operators[1:])), "cycle"),
        (
            lambda g: dataclasses.replace(g, operators=(dataclasses.replace(g.operators[0], writes=(2,)), *g.operators[1:])),
            "none of its calls",
        ),
        (lambda g: dataclasses.replace(g, values=(*g.values[:4], value(4, storage=99))), "storage 99"),
    ],
)
def test_validate_names_what_is_broken(broken, message) -> None:
    with pytest.raises(InvalidGraph, match=message):
        broken(diamond()).validate()


def test_json_round_trip_keeps_everything_and_no_cache() -> None:
    graph = diamond()
    before = msgspec.json.encode(graph)
    assert graph.hash
    assert graph.reachable
    after = msgspec.json.encode(graph)
    assert after == before
    assert msgspec.json.decode(after, type=OpGraph) == graph


def test_signatures_ignore_which_tensor_but_see_sharing_and_literals() -> None:
    values = tuple(value(index) for index in range(4))
    one = kernel_signature([Call("aten::add.Tensor", (Ref(0), Ref(1)), (), (3,))], values)
    assert kernel_signature([Call("aten::add.Tensor", (Ref(1), Ref(2)), (), (3,))], values) == one
    assert kernel_signature([Call("aten::add.Tensor", (Ref(1), Ref(1)), (), (3,))], values) != one
    assert kernel_signature([Call("aten::add.Tensor", (Ref(1), NonFinite("inf")), (), (3,))], values) != one


def test_topological_refuses_a_cycle() -> None:
    assert topological(3, [[2], [0], []]) == (2, 0, 1)
    with pytest.raises(InvalidGraph, match=r"\[0, 1\]"):
        topological(3, [[1], [0], []])
