"""A program from a stranger: each thing that may be wrong with one is refused by its name, and what is only unusual passes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from autosched.core.errors import InvalidGraph
from autosched.core.graph import OpGraph, ValueRole
from autosched.core.program import Argument, Binding, Call, ConstantSource, Decision, Many, Program, Ref, WriteBack
from autosched.runtime.bundle import program_check
from autosched.runtime.bundle.program_check import check_program
from tests.conformance.graphs import TwoBranches, two_branches_program

PROGRAM = two_branches_program(TwoBranches())[0]
_COUNT = len(PROGRAM.graph.values)
_LAST = _COUNT - 1  # a value that one operator makes and nobody but the caller reads
_OFF = 2**63  # one more than an integer of 64 bits
_LONG = "a" * 4097
_LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}

Change = Callable[[], Program]


def program(**changes: Any) -> Change:
    return lambda: dataclasses.replace(PROGRAM, **changes)


def graph(**changes: Any) -> Change:
    return lambda: dataclasses.replace(PROGRAM, graph=dataclasses.replace(PROGRAM.graph, **changes))


def value(index: int, **changes: Any) -> Change:
    values = list(PROGRAM.graph.values)
    values[index] = dataclasses.replace(values[index], **changes)
    return graph(values=tuple(values))


def spec(index: int, **changes: Any) -> Change:
    return value(index, spec=dataclasses.replace(PROGRAM.graph.values[index].spec, **changes))


def operator(index: int, **changes: Any) -> Change:
    operators = list(PROGRAM.graph.operators)
    operators[index] = dataclasses.replace(operators[index], **changes)
    return graph(operators=tuple(operators))


def call(**changes: Any) -> Change:
    """The only call of the first operator, with changes."""
    return operator(0, calls=(dataclasses.replace(PROGRAM.graph.operators[0].calls[0], **changes),))


def prologue(*more: Call) -> Change:
    return program(prologue=(*PROGRAM.prologue, *more))


def described(**changes: Any) -> Change:
    first, *others = PROGRAM.inputs
    return program(inputs=(dataclasses.replace(first, **changes), *others))


def bound(index: int, **changes: Any) -> Change:
    bindings = list(PROGRAM.bindings)
    bindings[index] = dataclasses.replace(bindings[index], **changes)
    return program(bindings=tuple(bindings))


def made(target: str, argument: Argument, output: int) -> Call:
    return Call(target, (argument,), (), (output,))


def tree(node: object) -> Change:
    """A call whose inputs are taken apart as ``node`` says, with as many leaves as it has."""
    text = json.dumps([1, node])
    leaves = text.count('"type": null')
    return program(input_tree=text, input_leaves=(Ref(0), Ref(1), *[True] * (leaves - 2)))


def node(kind: object, context: object, *children: object) -> dict[str, Any]:
    return {"type": kind, "context": context, "children_spec": list(children)}


def nested(levels: int) -> dict[str, Any]:
    inner = _LEAF
    for _ in range(levels - 1):
        inner = node("builtins.tuple", "null", inner)
    return node("builtins.tuple", "null", _LEAF, inner)


def default_dict(module: str, name: str) -> dict[str, Any]:
    context = {"default_factory_module": module, "default_factory_name": name, "dict_context": ["a", "b"]}
    return node("collections.defaultdict", context, _LEAF, _LEAF)


def opened(*names: str, children: int = 2) -> dict[str, Any]:
    context = json.dumps(json.dumps(["State", list(names), [], []]))
    return node("autosched.opened", context, *[_LEAF] * children)


def with_state(**changes: Any) -> Change:
    """The program as one whose second input is a buffer of the model's that it changes."""
    stateful = dataclasses.replace(
        PROGRAM,
        state=(Binding(1, ConstantSource.BUFFER, "memory"),),
        writes=(WriteBack(1, _LAST),),
        input_tree=json.dumps([1, node("builtins.tuple", "null", _LEAF)]),
        input_leaves=(Ref(0),),
    )
    return lambda: dataclasses.replace(stateful, **changes)


def far_apart(stride: int) -> Change:
    """Of 4 rows of 8 numbers, each row ``stride`` numbers after the one before."""
    return spec(0, strides=(stride, 1))


def unbound(**changes: Any) -> Change:
    """With one constant more, which nothing binds; ``changes`` of the graph use it."""
    constant = dataclasses.replace(PROGRAM.graph.values[3], index=_COUNT, storage=_COUNT)
    return graph(values=(*PROGRAM.graph.values, constant), **changes)


def internal_constant() -> Program:
    """Of what the prologue makes, the first is needed by the second call alone."""
    values = list(PROGRAM.graph.values)
    values[7] = dataclasses.replace(values[7], role=ValueRole.INTERNAL)
    values[8] = dataclasses.replace(values[8], storage=8)
    return graph(values=tuple(values))()


_OUTPUTS = PROGRAM.graph.outputs
_CONSTANT = made("aten::t.default", Ref(4), 7)

_MANY_RESULTS = Call("aten::relu.default", (), (), (-1,) * 1_500_000)

FAULTS: dict[str, tuple[Change, str]] = {
    "more values than any program has": (graph(values=PROGRAM.graph.values * 100_000), "2100000 values"),
    "more operators than any program has": (graph(operators=PROGRAM.graph.operators * 6_000), "operators; expected at most"),
    "a dtype that is none": (spec(_LAST, dtype="float99"), "dtype 'float99'"),
    "65 sizes": (spec(_LAST, shape=(1,) * 65, strides=()), "65 sizes"),
    "fewer strides than sizes": (spec(_LAST, strides=(1,)), "2 sizes and 1 strides"),
    "a negative size": (spec(_LAST, shape=(-1, 8)), "a size or stride outside"),
    "a negative stride": (spec(_LAST, strides=(-8, 1)), "a size or stride outside"),
    "a size too large": (spec(_LAST, shape=(2**40 + 1, 1)), "a size or stride outside"),
    "sizes too large together": (spec(_LAST, shape=(2**21, 2**20)), "a size or stride outside"),
    "an argument that is no value": (call(args=(Ref(_COUNT),)), f"call aten::t.default names value {_COUNT}"),
    "an argument below all values": (call(args=(Ref(-1),)), "call aten::t.default names value -1"),
    "an argument in a list": (call(args=(Many((0, Many((Ref(_COUNT),)))),)), "call aten::t.default names value"),
    "an argument with a name": (call(kwargs=(("other", Ref(_COUNT)),)), "call aten::t.default names value"),
    "a result that is no value": (call(outputs=(_COUNT,)), "call aten::t.default names value"),
    "a result below the unused one": (call(outputs=(-2,)), "call aten::t.default names value -2"),
    "a wide argument": (call(args=(Ref(2), _OFF)), "does not fit 64 bits"),
    "a wide argument below nought": (call(args=(Ref(2), -_OFF - 1)), "does not fit 64 bits"),
    "a wide argument in a list": (call(args=(Ref(2), Many((_OFF,)))), "does not fit 64 bits"),
    "results without end": (call(outputs=(-1,) * 4_000_001), "more than 4000000 arguments and results"),
    "results without end, of several calls": (program(prologue=(_MANY_RESULTS,) * 3), "more than 4000000 arguments and results"),
    "an argument of the prologue": (prologue(made("aten::neg.default", Ref(_COUNT), 7)), "call aten::neg.default names value"),
    "a read value that is none": (operator(0, reads=(_COUNT,)), "operator 0 names value"),
    "a written value that is none": (operator(0, writes=(_COUNT,)), "operator 0 names value"),
    "a changed value that is none": (operator(0, mutates=(-1,)), "operator 0 names value -1"),
    "wide flops": (operator(0, flops=_OFF), "operator 0 holds an integer"),
    "wide bytes read": (operator(0, bytes_read=_OFF), "operator 0 holds an integer"),
    "wide bytes written": (operator(0, bytes_written=-_OFF - 1), "operator 0 holds an integer"),
    "a name that commands a terminal": (operator(0, name="\x1b[2J"), "not printable"),
    "a signature that commands a terminal": (operator(0, signature="\x1b[2J"), "not printable"),
    "a source that commands a terminal": (operator(0, source="\x1b[2J"), "not printable"),
    "a name too long": (operator(0, name=_LONG), "longer than 4096 characters"),
    "a call that commands a terminal": (call(target="\x1b[2J"), "not printable"),
    "a keyword that commands a terminal": (call(kwargs=(("\x1b[2J", 1),)), "not printable"),
    "a parameter that commands a terminal": (bound(0, name="\x1b[2J"), "not printable"),
    "state that commands a terminal": (with_state(state=(Binding(1, ConstantSource.BUFFER, "\x1b[2J"),)), "not printable"),
    "a lowering that commands a terminal": (program(lowering="\x1b[2J"), "not printable"),
    "a question that commands a terminal": (program(choices=(("\x1b[2J", ""),)), "not printable"),
    "a kernel that commands a terminal": (program(choices=(("question", "\x1b[2J"),)), "not printable"),
    "an input that is no value": (graph(inputs=(0, _COUNT)), "the graph names value"),
    "an output that is no value": (graph(outputs=(*_OUTPUTS, _COUNT)), "the graph names value"),
    "a description of no value": (described(value=_COUNT), "an input names value"),
    "a constant that is no value": (bound(0, value=_COUNT), "a binding names value"),
    "state that is no value": (with_state(state=(Binding(_COUNT, ConstantSource.BUFFER, "memory"),)), "a binding names value"),
    "a write to no value": (with_state(writes=(WriteBack(_COUNT, _LAST),)), "a write names value"),
    "a write of no value": (with_state(writes=(WriteBack(1, -1),)), "a write names value -1"),
    "state that is not last": (with_state(state=(Binding(0, ConstantSource.BUFFER, "memory"),)), "not the graph's last inputs"),
    "more state than inputs": (with_state(state=(Binding(1, ConstantSource.BUFFER, "memory"),) * 3), "not the graph's last inputs"),
    "an input twice": (graph(inputs=(0, 0)), "appears twice"),
    "descriptions in another order": (program(inputs=PROGRAM.inputs[::-1]), "not those of the graph's inputs, in order"),
    "a description too few": (program(inputs=PROGRAM.inputs[:1]), "not those of the graph's inputs, in order"),
    "an input that overlaps itself": (far_apart(4), "share memory"),
    "an input of the role of another": (value(1, role=ValueRole.INTERMEDIATE), "does not have the role of one"),
    "no mean": (described(mean=float("nan")), "expected finite numbers"),
    "a deviation without end": (described(std=float("inf")), "expected finite numbers"),
    "a deviation below nought": (described(std=-1.0), "expected finite numbers"),
    "a range from above": (described(low=1, high=0), "expected an ascending range"),
    "a range from too far below": (described(low=-(2**62) - 1), "within 63 bits"),
    "a range to too far above": (described(high=2**62 + 1), "within 63 bits"),
    "inputs of much memory": (spec(0, shape=(2**25, 17), strides=(17, 1)), "the inputs hold more than"),
    "inputs of much memory by their strides": (far_apart(2**28), "the inputs hold more than"),
    "an input that the call does not give": (program(input_leaves=(Ref(0), True, True)), "does not fill exactly"),
    "an argument of the call that is no input": (program(input_leaves=(Ref(0), Ref(1), Ref(2))), "does not fill exactly"),
    "a result that is no output": (program(output_leaves=(Ref(20), Ref(17), Ref(12), "two")), "no outputs of the graph"),
    "a list as an argument of the call": (program(input_leaves=(Ref(0), Ref(1), Many((1,)))), "a list is a leaf"),
    "a list as a result": (program(output_leaves=(Ref(20), Ref(17), Ref(18), Many(("two",)))), "a list is a leaf"),
    "a wide argument of the call": (program(input_leaves=(Ref(0), Ref(1), _OFF)), "the call signature holds an integer"),
    "a wide result": (program(output_leaves=(Ref(20), Ref(17), Ref(18), -_OFF - 1)), "the call signature holds an integer"),
    "an input in the program's memory": (value(1, storage=10), "value 1 is an input in memory that the program makes itself"),
    "a constant in the program's memory": (value(3, storage=10), "value 3 is an constant in memory that the program makes"),
    "a constant bound twice": (program(bindings=(*PROGRAM.bindings, PROGRAM.bindings[0])), "constant 2 is bound twice"),
    "a prologue that reads what nothing made": (program(prologue=PROGRAM.prologue[::-1]), "before anything makes them"),
    "a prologue that reads an input": (prologue(made("aten::neg.default", Ref(0), 13)), "before anything makes them"),
    "a prologue that makes a value twice": (program(prologue=(*PROGRAM.prologue, _CONSTANT)), "exists already"),
    "a prologue that makes a parameter": (program(prologue=(made("aten::t.default", Ref(2), 4),)), "exists already"),
    "a constant that is made by an operator": (bound(0, value=19), "constants by origin, but not by role"),
    "a prologue that makes an input": (prologue(made("aten::neg.default", Ref(2), 0)), "constants by origin, but not by role"),
    "a constant of no origin": (program(bindings=PROGRAM.bindings[:-1]), r"constants \[6\] come from nowhere"),
    "a constant of no origin that is returned": (unbound(outputs=(*_OUTPUTS, _COUNT)), "come from nowhere"),
    "a constant of no origin that is changed": (
        unbound(operators=(dataclasses.replace(PROGRAM.graph.operators[0], mutates=(_COUNT,)), *PROGRAM.graph.operators[1:])),
        "come from nowhere",
    ),
    "state of the program's own": (with_state(state=(Binding(1, ConstantSource.LITERAL, "memory"),)), "of the program's own"),
    "state that is a constant too": (with_state(state=(Binding(1, ConstantSource.BUFFER, "offset"),)), "read by another name"),
    "state that nothing changes": (with_state(writes=()), "that nothing changes"),
    "a write to what is no input": (with_state(writes=(WriteBack(1, _LAST), WriteBack(12, _LAST))), "is no input"),
    "an input written twice": (with_state(writes=(WriteBack(1, _LAST), WriteBack(1, _LAST))), "written back twice"),
    "a write of what is no output": (with_state(writes=(WriteBack(1, 12),)), "is no output of the graph"),
    "a write of another shape": (with_state(writes=(WriteBack(1, 17),)), "another shape or dtype"),
    "state of one name twice": (
        with_state(
            state=(Binding(0, ConstantSource.BUFFER, "memory"), Binding(1, ConstantSource.BUFFER, "memory")),
            input_tree=json.dumps([1, node("builtins.tuple", "null")]),
            input_leaves=(),
        ),
        "read by another name",
    ),
    "a decision that commands a terminal": (program(decided=(Decision(ConstantSource.BUFFER, "\x1b[2J", "0"),)), "not printable"),
    "a digest that commands a terminal": (program(decided=(Decision(ConstantSource.BUFFER, "steps", "\x1b[2J"),)), "not printable"),
    "a decision of the program's own": (program(decided=(Decision(ConstantSource.LITERAL, "steps", "0"),)), "decides by a tensor of the"),
    "a decision by what is changed": (with_state(decided=(Decision(ConstantSource.BUFFER, "memory", "0"),)), "changes at each call"),
    "a tree that is no list": (program(input_tree='{"1": 1, "2": 2}'), "not a pytree of protocol 1"),
    "a tree of three": (program(input_tree=json.dumps([1, nested(1), 0])), "not a pytree of protocol 1"),
    "a tree of another protocol": (program(input_tree=json.dumps([2, nested(1)])), "not a pytree of protocol 1"),
    "a node of another form": (tree({**nested(1), "more": 1}), "no pytree node"),
    "a node that is text": (program(input_tree='[1, "leaf"]'), "no pytree node"),
    "a node at depth": (tree(nested(65)), "nested too deeply"),
    "children that are no list": (tree({"type": "builtins.tuple", "context": "null", "children_spec": {"a": _LEAF}}), "without a type or"),
    "a type that is no text": (tree(node(7, "null", _LEAF, _LEAF)), "without a type or children"),
    "a leaf with children": (program(input_tree=json.dumps([1, node(None, None, _LEAF)])), "a leaf with children"),
    "a leaf with a context": (program(input_tree=json.dumps([1, node(None, "x")])), "a leaf with children"),
    "too few leaves": (program(input_tree=json.dumps([1, node("builtins.tuple", "null", _LEAF)])), "1 leaves; expected 3"),
    "too few leaves in the result": (program(output_tree=json.dumps([1, node("builtins.tuple", "null", _LEAF)])), "outputs has 1 leaves"),
    "a factory of a module": (tree(default_dict("os", "list")), "not a builtin"),
    "a factory that runs code": (tree(default_dict("builtins", "exec")), "unexpected factory"),
    "a default dict without a context": (tree(node("collections.defaultdict", "x", _LEAF, _LEAF)), "not a builtin"),
    "a dict of too few keys": (tree(node("builtins.dict", '["a"]', _LEAF, _LEAF)), "without as many plain keys"),
    "a dict of keys that are lists": (tree(node("builtins.dict", '["a", ["b"]]', _LEAF, _LEAF)), "without as many plain keys"),
    "a dict of keys that are no list": (tree(node("builtins.dict", '{"a": 1, "b": 2}', _LEAF, _LEAF)), "without as many plain keys"),
    "a dict without keys": (tree(node("builtins.dict", None, _LEAF, _LEAF)), "without as many plain keys"),
    "an ordered dict of too few keys": (tree(node("collections.OrderedDict", '["a"]', _LEAF, _LEAF)), "without as many plain keys"),
    "an object with a name too few": (tree(opened("a")), "2 items with 1 names"),
    "an object with a name twice": (tree(opened("a", "a")), "two things of one name"),
    "an object that is not described": (tree(node("autosched.opened", None, _LEAF, _LEAF)), "cannot be made"),
    "an enumeration": (tree(node("builtins.tuple", {"a": [{"__enum__": True}]}, _LEAF, _LEAF)), "an enumeration as a key"),
    "an enumeration in text": (tree(node("builtins.tuple", json.dumps(json.dumps(["__enum__"])), _LEAF, _LEAF)), "an enumeration as a key"),
    "an enumeration behind escapes": (tree(node("builtins.tuple", '["\\u005f_enum__"]', _LEAF, _LEAF)), "an enumeration as a key"),
}

GOOD: dict[str, Change] = {
    "as it is": program(),
    "64 sizes, and no strides": spec(_LAST, shape=(1,) * 64, strides=()),
    "a result that nobody uses": call(outputs=(9, -1)),
    "the widest integers": call(args=(Ref(2), _OFF - 1, -_OFF)),
    "the largest tensor": spec(_LAST, shape=(2**40, 1), strides=(1, 1)),
    "a name of the greatest length": operator(0, name=_LONG[1:]),
    "the widest range": described(low=-(2**62), high=2**62),
    "a range of one number": described(low=7, high=7),
    "no deviation": described(std=0.0),
    "inputs of as much memory as may be": far_apart((2**29 - 32 - 8) // 3),
    "an input of no elements": spec(0, shape=(0, 8)),
    "a constant inside the prologue": internal_constant,
    "calls of the prologue whose results nobody uses": prologue(*[made("aten::neg.default", Ref(2), -1)] * 2),
    "a tensor of the program's own that is called as state is": with_state(
        bindings=(dataclasses.replace(PROGRAM.bindings[0], source=ConstantSource.LITERAL, name="memory"), *PROGRAM.bindings[1:])
    ),
    "a decision": with_state(decided=(Decision(ConstantSource.BUFFER, "steps", "0"),)),
    **{
        f"a factory: {name}": tree(default_dict("builtins", name))
        for name in ("list", "dict", "set", "tuple", "int", "float", "str", "bool")
    },
    "a dict of every plain kind of key": tree(node("builtins.dict", '[1, 0.5, true, "a"]', *[_LEAF] * 4)),
    "an ordered dict": tree(node("collections.OrderedDict", '["a", "b"]', _LEAF, _LEAF)),
    "an object": tree(opened("a", "b")),
    "nested as deep as may be": tree(nested(64)),
    "an input that is changed": with_state(),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_with_a_program_is_named(name: str) -> None:
    change, words = FAULTS[name]
    with pytest.raises(InvalidGraph, match=words):
        check_program(change())


@pytest.mark.parametrize("name", GOOD)
def test_what_is_only_unusual_passes(name: str) -> None:
    check_program(GOOD[name]())


def test_arguments_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_check, "_MAX_ITEMS", 1_000)
    with pytest.raises(InvalidGraph, match="more than 1000 arguments and results"):
        check_program(call(args=(Many((1,) * 1_000),))())


def test_a_program_of_nothing_passes() -> None:
    no_tree = json.dumps([1, node("builtins.tuple", "null")])
    check_program(Program(OpGraph((), (), (), ()), (), (), (), no_tree, no_tree, (), (), "aten"))
