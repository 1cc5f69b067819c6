"""Graph invariants: edges, hash, validation."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosched.core import digests
from autosched.core.errors import InvalidGraph
from autosched.core.graph import EdgeKind, Operator, OpGraph, TensorSpec, Value, ValueRole, kernel_signature, merkle_digests
from autosched.core.program import Call, Many, NonFinite, Ref
from autosched.core.topological import topological

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


def made_and_changed(*, reads: tuple[int, ...]) -> OpGraph:
    """One operator makes a value, one reads it, one changes it in place, one reads it again; the third has ``reads``."""
    values = (value(0, ValueRole.INPUT), value(1), value(2), value(3))
    change = Operator(2, "change", (Call("aten::mul_.Scalar", (Ref(1), 2.0), (), (-1,)),), reads, (), (1,), 6, 24, 24, "mul_", "")
    return OpGraph((unary(0, 0, 1), unary(1, 1, 2), change, unary(3, 1, 3)), values, (0,), (2, 3))


@pytest.mark.parametrize("reads", [(), (1,)])
def test_what_is_changed_in_place_is_used_whether_or_not_it_is_listed_as_read(reads: tuple[int, ...]) -> None:
    graph = made_and_changed(reads=reads)
    graph.validate()
    assert graph.storage_uses == {0: (0,), 1: (0, 1, 2, 3), 2: (1,), 3: (3,)}
    assert {(edge.before, edge.after) for edge in graph.edges} == {(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)}
    assert graph.predecessors == ((), (0,), (0, 1), (0, 2))
    assert graph.successors == ((1, 2, 3), (2,), (3,), ())
    assert graph.reachable == (0b1110, 0b1100, 0b1000, 0)


def test_a_second_change_waits_for_the_first_and_not_for_those_that_the_first_waited_for() -> None:
    graph = made_and_changed(reads=(1,))
    again = dataclasses.replace(graph.operators[2], index=3, name="again")
    twice = OpGraph((*graph.operators[:3], again), graph.values, (0,), (2,))
    assert {(edge.before, edge.after) for edge in twice.edges} == {(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)}


def test_readers_of_memory_that_is_changed_later_may_run_together() -> None:
    values = tuple(value(index, ValueRole.INPUT if index == 0 else ValueRole.INTERMEDIATE) for index in range(4))
    change = Operator(2, "change", (Call("aten::zero_.default", (Ref(0),), (), (-1,)),), (0,), (), (0,), 0, 24, 24, "zero_", "")
    graph = OpGraph((unary(0, 0, 1), unary(1, 0, 2), change, unary(3, 0, 3)), values, (0,), (1, 2, 3))
    assert graph.independent(0, 1)
    assert {(edge.before, edge.after, edge.kind) for edge in graph.edges} == {
        (0, 2, EdgeKind.MUTATION), (1, 2, EdgeKind.MUTATION), (2, 3, EdgeKind.MUTATION),
    }  # fmt: skip


def test_independent_are_two_that_nothing_orders_whichever_is_named_first() -> None:
    graph = diamond()
    independent = {(a, b) for a in range(4) for b in range(4) if graph.independent(a, b)}
    assert independent == {(1, 2), (2, 1)}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 8)), max_size=4))
def test_elements_of_a_layout_that_does_not_overlap_lie_apart(dimensions: list[tuple[int, int]]) -> None:
    spec = TensorSpec(tuple(size for size, _ in dimensions), "float32", tuple(stride for _, stride in dimensions))
    places = [0]
    for size, stride in dimensions:
        places = [place + step * stride for place in places for step in range(size)]
    assert spec.overlaps or len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((), (), False),
        ((3,), (1,), False),
        ((3,), (0,), True),
        ((1,), (0,), False),  # one element shares with nobody
        ((2, 3), (3, 1), False),
        ((3, 2), (1, 3), False),
        ((2, 3), (4, 1), False),
        ((2, 3), (2, 1), True),
        ((3, 3), (1, 1), True),
        ((4, 1, 3), (3, 0, 1), False),
        ((2, 3), (), True),  # opaque
        ((0, 3), (3, 1), False),
    ],
)
def test_which_layouts_overlap(shape: tuple[int, ...], strides: tuple[int, ...], overlaps: bool) -> None:
    assert TensorSpec(shape, "float32", strides).overlaps is overlaps


@pytest.mark.parametrize(
    ("targets", "kind"),
    [
        (("aten::relu.default", "aten::addmm.default", "aten::convolution.default"), "aten::addmm"),
        (("aten::relu.default", "aten::neg.default"), "aten::relu"),
        (("aten::relu.default", "mine::scan.default", "aten::mm.default"), "mine::scan"),
        *((("aten::relu.default", f"aten::{name}.default"), f"aten::{name}") for name in ("convolution", "mm", "linear", "attention")),
        *((("aten::relu.default", f"aten::{name}.input"), f"aten::{name}") for name in ("lstm", "rnn_tanh", "gru")),
    ],
)
def test_an_operator_is_of_the_kind_of_its_main_call(targets: tuple[str, ...], kind: str) -> None:
    calls = tuple(Call(target, (Ref(0),), (), (1,)) for target in targets)
    assert dataclasses.replace(unary(0, 0, 1), calls=calls).kind == kind


def test_the_hash_sees_on_which_side_of_a_change_something_is_read() -> None:
    graph = made_and_changed(reads=(1,))
    first, reader, change, again = graph.operators
    swapped = (first, dataclasses.replace(again, index=1), dataclasses.replace(change, index=2), dataclasses.replace(reader, index=3))
    other = OpGraph(swapped, graph.values, (0,), (3, 2))
    other.validate()
    # The same operators and the same outputs, in another order around the change.
    assert dataclasses.replace(graph, outputs=(2, 3)).hash == other.hash
    assert merkle_digests(graph, numbered_inputs=True)[0][1] != merkle_digests(graph, numbered_inputs=True)[0][3]


def _called(*calls: Call, values: int = 4, **changes: dict[int, Value]) -> OpGraph:
    """One operator of ``calls`` that makes value 3 of the inputs 0 and 1 and the constant 2."""
    roles = (ValueRole.INPUT, ValueRole.INPUT, ValueRole.CONSTANT, *[ValueRole.INTERMEDIATE] * (values - 3))
    table = [value(index, role) for index, role in enumerate(roles)]
    for index, other in changes.get("table", {}).items():
        table[index] = other
    operator = Operator(0, "op", calls, (0, 1, 2), (3,), (), 0, 0, 0, "", "")
    return OpGraph((operator,), tuple(table), (0, 1), (3,))


_ADD = Call("aten::add.Tensor", (Ref(0), Ref(1)), (("alpha", 1),), (3,))
_WIDE = TensorSpec((2, 6), "float32", (6, 1))

_OTHER_PROGRAMS = {
    "another operator": _called(dataclasses.replace(_ADD, target="aten::sub.Tensor")),
    "the other input": _called(dataclasses.replace(_ADD, args=(Ref(1), Ref(0)))),
    "one input twice": _called(dataclasses.replace(_ADD, args=(Ref(0), Ref(0)))),
    "a constant": _called(dataclasses.replace(_ADD, args=(Ref(0), Ref(2)))),
    "a list": _called(dataclasses.replace(_ADD, args=(Many((Ref(0), Ref(1))),))),
    "a list in another order": _called(dataclasses.replace(_ADD, args=(Many((Ref(1), Ref(0))),))),
    "another number": _called(dataclasses.replace(_ADD, kwargs=(("alpha", 2),))),
    "a number that is no integer": _called(dataclasses.replace(_ADD, kwargs=(("alpha", 1.0),))),
    "a number hardly larger": _called(dataclasses.replace(_ADD, kwargs=(("alpha", 1.0000000000000002),))),
    "another keyword": _called(dataclasses.replace(_ADD, kwargs=(("beta", 1),))),
    "no keyword": _called(dataclasses.replace(_ADD, kwargs=())),
    "the number without its keyword": _called(dataclasses.replace(_ADD, args=(Ref(0), Ref(1), 1), kwargs=())),
    "the second result": _called(dataclasses.replace(_ADD, outputs=(-1, 3))),
    "a result of another shape": _called(_ADD, table={3: Value(3, _WIDE, ValueRole.INTERMEDIATE, 3)}),
    "a result in the input's memory": _called(_ADD, table={3: value(3, storage=0)}),
    "an input of another shape": _called(_ADD, table={0: Value(0, _WIDE, ValueRole.INPUT, 0)}),
    "a constant of another shape": _called(
        dataclasses.replace(_ADD, args=(Ref(0), Ref(2))), table={2: Value(2, _WIDE, ValueRole.CONSTANT, 2)}
    ),
    "a call more": _called(_ADD, Call("aten::zero_.default", (Ref(0),), (), ())),
    "two calls more": _called(_ADD, Call("aten::zero_.default", (Ref(0),), (), ()), Call("aten::zero_.default", (Ref(0),), (), ())),
}


def test_programs_that_compute_different_things_have_different_hashes() -> None:
    hashes = {name: graph.hash for name, graph in {"as it is": _called(_ADD), **_OTHER_PROGRAMS}.items()}
    assert len(set(hashes.values())) == len(hashes)


def test_the_hash_sees_which_result_is_returned_first() -> None:
    graph = diamond()
    assert dataclasses.replace(graph, outputs=(2, 3)).hash != dataclasses.replace(graph, outputs=(3, 2)).hash


def test_digests_may_take_one_input_for_another() -> None:
    one, other = _called(_ADD), _OTHER_PROGRAMS["the other input"]
    assert merkle_digests(one, numbered_inputs=False) == merkle_digests(other, numbered_inputs=False)
    assert merkle_digests(one, numbered_inputs=True) != merkle_digests(other, numbered_inputs=True)


# Which tensors they are, and what they hold, is no matter of speed; nor is what is not called.
_OF_ONE_SPEED = frozenset(
    (
        "the other input", "a constant", "a list in another order", "a result in the input's memory", "a constant of another shape",
    )
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(_OTHER_PROGRAMS.keys() - _OF_ONE_SPEED))
def test_kernels_that_differ_in_speed_have_different_signatures(name: str) -> None:
    one, other = _called(_ADD), _OTHER_PROGRAMS[name]
    assert kernel_signature(one.operators[0].calls, one.values) != kernel_signature(other.operators[0].calls, other.values)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda g: dataclasses.replace(g, values=(*g.values[:4], value(5))), "value 4 has index 5"),
        (lambda g: dataclasses.replace(g, values=(*g.values[:4], value(4, storage=-1))), "storage -1"),
        (lambda g: dataclasses.replace(g, values=(*g.values[:4], value(4, storage=5))), "storage 5"),
        (lambda g: dataclasses.replace(g, values=(*g.values[:3], value(3, storage=2), value(4, storage=3))), "itself a view"),
        (lambda g: _with(g, 1, calls=()), "b calls nothing"),
        (lambda g: _with(g, 1, mutates=(4,)), "reads value 4, which nothing before it makes"),
        (lambda g: _with(g, 3, reads=(2,)), r"reads values \[3\] that it does not have"),
        (lambda g: _with(g, 3, calls=(Call("aten::add.Tensor", (Ref(2),), (("other", Ref(1)),), (4,)),)), r"reads values \[1\]"),
        (lambda g: _with(g, 3, calls=(*g.operators[3].calls, Call("aten::neg.default", (Ref(4),), (), (1,)))), "exists already"),
        (lambda g: _with(g, 3, calls=g.operators[3].calls * 2), "exists already"),
        (lambda g: _with(g, 3, calls=(*g.operators[3].calls, Call("aten::neg.default", (Ref(4),), (), (0,)))), "exists already"),
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


def test_a_result_that_nobody_uses_makes_no_signature_depend_on_other_values() -> None:
    call = Call("aten::max.dim", (Ref(1), 0), (), (0, -1))
    values = (value(0), value(1))
    wide = Value(2, TensorSpec((9,), "float32", (1,)), ValueRole.INTERMEDIATE, 2)
    assert kernel_signature([call], values) == kernel_signature([call], (*values, wide))
    other = dataclasses.replace(call, outputs=(-1, -1))
    assert kernel_signature([call], values) != kernel_signature([other], values)


def test_topological_refuses_a_cycle() -> None:
    assert topological(3, [[2], [0], []]) == (2, 0, 1)
    with pytest.raises(InvalidGraph, match=r"\[0, 1\]"):
        topological(3, [[1], [0], []])


def _with(graph: OpGraph, index: int, **changes: object) -> OpGraph:
    operators = list(graph.operators)
    operators[index] = dataclasses.replace(operators[index], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(graph, operators=tuple(operators))


def test_a_call_may_read_what_an_earlier_call_of_its_operator_made() -> None:
    first = Call("aten::add.Tensor", (Ref(2), Ref(3)), (), (5,))
    then = Call("aten::neg.default", (Ref(5),), (), (4, -1))
    unused = Call("aten::max.dim", (Ref(5), 0), (), (-1, -1))  # of which nothing is used, more than once
    graph = _with(diamond(), 3, calls=(first, unused, then))
    dataclasses.replace(graph, values=(*graph.values, value(5, ValueRole.INTERNAL))).validate()


def test_an_input_or_a_constant_may_be_returned() -> None:
    graph = diamond()
    dataclasses.replace(graph, values=(*graph.values, value(5, ValueRole.CONSTANT)), outputs=(0, 4, 5)).validate()


def test_topological_takes_the_smallest_that_is_ready() -> None:
    assert topological(5, [[3], [3, 3], [], [], [0]]) == (2, 3, 0, 1, 4)
    assert topological(0, []) == ()


def test_width_is_that_of_the_widest_level() -> None:
    assert OpGraph((), (), (), ()).width == 0
    chain = OpGraph((unary(0, 0, 1), unary(1, 1, 2)), (value(0, ValueRole.INPUT), value(1), value(2)), (0,), (2,))
    assert chain.width == 1


def test_an_operator_is_on_the_level_after_the_last_that_it_waits_for() -> None:
    join = Operator(2, "join", (Call("aten::add.Tensor", (Ref(1), Ref(2)), (), (3,)),), (1, 2), (3,), (), 0, 0, 0, "", "")
    values = (value(0, ValueRole.INPUT), value(1), value(2), value(3))
    assert OpGraph((unary(0, 0, 1), unary(1, 1, 2), join), values, (0,), (3,)).width == 1
