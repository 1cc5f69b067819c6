"""Programs become callables; what a stranger's program may not do is refused."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

from autosched.core.errors import IncompatibleArtifact, InputMismatch, UnsupportedGraph
from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole, kernel_signature
from autosched.core.program import Argument, Binding, Call, ConstantSource, InputSpec, Many, NonFinite, Program, Ref, TorchLiteral
from autosched.runtime.calls import resolve
from autosched.runtime.kernels import bind, gather_constants, random_inputs
from autosched.runtime.trees import as_captured, describe_tree, flatten_inputs, output_tensors, unflatten_outputs

SPEC = TensorSpec((2, 3), "float32", (3, 1))


def program_of(calls: list[Call], roles: list[ValueRole], outputs: tuple[int, ...], bindings: tuple[Binding, ...] = ()) -> Program:
    """One operator for each call; value 0 is the input."""
    values = tuple(Value(index, SPEC, role, index) for index, role in enumerate(roles))
    operators = tuple(
        Operator(i, f"op{i}", (call,), call.reads(), call.outputs, (), 0, 0, 0, kernel_signature([call], values), "")
        for i, call in enumerate(calls)
    )
    graph = OpGraph(operators, values, (0,), outputs)
    graph.validate()
    _, tree = describe_tree(((torch.zeros(2, 3),), {}))
    _, output_tree = describe_tree([torch.zeros(1)] * len(outputs))
    return Program(
        graph, (), bindings, (InputSpec(0, 0, 0, 0.0, 1.0),), tree, output_tree, (Ref(0),), tuple(Ref(v) for v in outputs), "aten"
    )


INPUT, MADE, CONSTANT = ValueRole.INPUT, ValueRole.INTERMEDIATE, ValueRole.CONSTANT


@pytest.mark.parametrize(
    "target",
    ["os::system.default", "aten::from_file.default", "aten::relu", "aten::set_.source_Tensor", "aten::__and__.Tensor", "", "a::b.c.d"],
)
def test_operators_off_the_allow_list_do_not_resolve(target: str) -> None:
    with pytest.raises(UnsupportedGraph):
        resolve(target)


def test_an_operator_this_torch_does_not_have_is_named() -> None:
    with pytest.raises(UnsupportedGraph, match=r"aten::no_such_thing\.default"):
        resolve("aten::no_such_thing.default")


def test_nested_literal_and_keyword_arguments_reach_the_operator() -> None:
    cat = Call("aten::cat.default", (Many((Ref(0), Ref(0))), 1), (), (1,))
    full = Call(
        "aten::full.default",
        (Many((2, 6)), NonFinite("-inf")),
        (("device", TorchLiteral("device", "cuda:3")), ("dtype", TorchLiteral("dtype", "float32"))),
        (2,),
    )
    larger = Call("aten::maximum.default", (Ref(1), Ref(2)), (), (3,))
    program = program_of([cat, full, larger], [INPUT, MADE, MADE, MADE], (3,))
    x = torch.randn(2, 3)
    (result,) = bind(program, {}).run([x])
    assert torch.equal(result, torch.cat([x, x], 1))


def test_several_outputs_fill_several_slots() -> None:
    split = Call("aten::split.Tensor", (Ref(0), 1), (), (1, -1))
    program = program_of([Call(split.target, split.args, (), (1, 2))], [INPUT, MADE, MADE], (2, 1))
    x = torch.randn(2, 3)
    second, first = bind(program, {}).run([x])
    assert torch.equal(first, x[:1])
    assert torch.equal(second, x[1:])


def test_constants_come_from_the_model_and_a_mismatch_is_named() -> None:
    add = Call("aten::add.Tensor", (Ref(0), Ref(1)), (), (2,))
    bindings = (Binding(1, ConstantSource.PARAMETER, "weight"),)
    program = program_of([add], [INPUT, CONSTANT, MADE], (2,), bindings)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.randn(2, 3))
    constants = gather_constants(program, model, {})
    x = torch.randn(2, 3)
    assert torch.equal(bind(program, constants).run([x])[0], x + model.weight)
    model.weight = torch.nn.Parameter(torch.randn(4, 3))
    with pytest.raises(IncompatibleArtifact, match=r"parameter weight: \[2, 3\] float32 there, \[4, 3\] float32 here"):
        gather_constants(program, model, {})
    with pytest.raises(IncompatibleArtifact, match="absent here"):
        gather_constants(program, torch.nn.Module(), {})


def test_the_prologue_runs_once_and_its_scratch_is_dropped() -> None:
    add = Call("aten::add.Tensor", (Ref(0), Ref(2)), (), (3,))
    bindings = (Binding(1, ConstantSource.LITERAL, "c"),)
    program = program_of([add], [INPUT, CONSTANT, CONSTANT, MADE], (3,), bindings)
    program = dataclasses.replace(program, prologue=(Call("aten::mul.Scalar", (Ref(1), 2.0), (), (2,)),))
    bound = bind(program, {1: torch.ones(2, 3)})
    assert bound.constants[1] is None
    assert torch.equal(bound.run([torch.zeros(2, 3)])[0], torch.full((2, 3), 2.0))


def test_random_inputs_repeat_for_a_seed_and_keep_the_range() -> None:
    values = (Value(0, TensorSpec((64,), "int64", (1,)), INPUT, 0), Value(1, SPEC, INPUT, 1))
    graph = OpGraph((), values, (0, 1), ())
    specs = (InputSpec(0, 3, 9, 0.0, 0.0), InputSpec(1, 0, 0, 5.0, 0.5))
    program = Program(graph, (), (), specs, "", "", (), (), "aten")
    first, again, other = random_inputs(program, 1), random_inputs(program, 1), random_inputs(program, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[1], other[1])
    assert int(first[0].min()) >= 3
    assert int(first[0].max()) <= 9


def nested_program(leaves: tuple[Argument, ...], example: object) -> Program:
    base = program_of([Call("aten::relu.default", (Ref(0),), (), (1,))], [INPUT, MADE], (1,))
    _, tree = describe_tree(example)
    return dataclasses.replace(base, input_tree=tree, input_leaves=leaves)


def test_a_call_is_flattened_and_mismatches_say_what_was_expected() -> None:
    x = torch.randn(2, 3)
    program = nested_program((Ref(0), 7), (({"x": x},), {"k": 7}))
    assert flatten_inputs(program, ({"x": x},), {"k": 7}) == [x]
    with pytest.raises(InputMismatch, match="made for 7"):
        flatten_inputs(program, ({"x": x},), {"k": 8})
    with pytest.raises(InputMismatch, match=r"made for \[2, 3\] float32. Tune for this dtype too"):
        flatten_inputs(program, ({"x": x.double()},), {"k": 7})
    with pytest.raises(InputMismatch, match=r"\[4, 3\].* Tune for this shape too"):
        flatten_inputs(program, ({"x": torch.zeros(4, 3)},), {"k": 7})
    with pytest.raises(InputMismatch, match="argument 0 is a single tensor, value or object; the schedule was made for a dict of 'x'"):
        flatten_inputs(program, (x,), {"k": 7})
    with pytest.raises(InputMismatch, match="is a str"):
        flatten_inputs(program, ({"x": "hello"},), {"k": 7})


def test_keyword_arguments_may_come_in_any_order() -> None:
    x = torch.randn(2, 3)
    program = nested_program((Ref(0), 7), ((), {"x": x, "k": 7}))
    assert flatten_inputs(program, (), {"k": 7, "x": x}) == [x]
    with pytest.raises(InputMismatch, match=r"0 arguments by position and 'k', 'y' by name; the schedule was made for .* 'x', 'k' by name"):
        flatten_inputs(program, (), {"k": 7, "y": x})


def forward(x, k=7, *, flag=None):
    """A model's signature."""


@pytest.mark.parametrize(
    ("args", "kwargs", "same"),
    [
        (("X", 7), {}, True),
        ((), {"x": "X", "k": 7}, True),
        (("X",), {}, True),  # the default is what was captured
        (("X", 7), {"flag": None}, True),  # spelling a default out changes nothing
        (("X", 7), {"flag": True}, False),
        (("X", 7, 8), {}, False),
        ((), {"k": 7}, False),
        (("X", 7), {"unknown": 1}, False),
    ],
)
def test_the_same_call_by_position_or_by_keyword(args, kwargs, same) -> None:
    program = nested_program((Ref(0), 7), ((torch.zeros(2, 3),), {"k": 7}))
    found = as_captured(program, inspect.signature(forward), args, kwargs)
    assert found == ((("X",), {"k": 7}) if same else None)


def forward_with_rest(x, k=7, **rest):
    """The signature of a model that hands keywords on."""


@pytest.mark.parametrize(
    ("args", "kwargs", "same"),
    [
        ((), {"x": "X", "k": 7, "more": 1}, True),
        (("X",), {"more": 1, "k": 7}, True),
        (("X", 7), {"more": 1}, True),
        (("X",), {"more": 1}, True),
        (("X",), {"k": 7}, False),
        (("X",), {"k": 7, "more": 1, "other": None}, False),
        (("X", 7, 1), {}, False),
    ],
)
def test_keywords_that_a_model_hands_on_stay_keywords(args, kwargs, same) -> None:
    program = nested_program((Ref(0), 7, 1), ((torch.zeros(2, 3),), {"k": 7, "more": 1}))
    found = as_captured(program, inspect.signature(forward_with_rest), args, kwargs)
    assert found == ((("X",), {"k": 7, "more": 1}) if same else None)


def test_outputs_regain_their_structure() -> None:
    program = program_of([Call("aten::relu.default", (Ref(0),), (), (1,))], [INPUT, MADE], (1,))
    _, tree = describe_tree({"a": torch.zeros(1), "b": (None, 3)})
    program = dataclasses.replace(program, output_tree=tree, output_leaves=(Ref(1), None, 3))
    made = torch.ones(2, 3)
    result = unflatten_outputs(program, [made])
    assert result["a"] is made
    assert result["b"] == (None, 3)
    assert output_tensors(result) == [made]
