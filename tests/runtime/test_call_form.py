"""The compiled call signature agrees with the general tree walk on every call, and a watch sees what the schedule would read stale."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autosched.core.errors import InputMismatch
from autosched.runtime.call_form import CallReader, answer_maker, expected_key, leaf_key
from autosched.runtime.trees import flatten_inputs, unflatten_outputs
from autosched.runtime.weights import Change, ModelWatch
from tests.conformance.graphs import Recorder, TwoBranches, two_branches_program

_LEAVES = st.one_of(st.integers(0, 2), st.booleans(), st.none(), st.sampled_from(["a", "b"]), st.sampled_from([0.0, 1.0]))
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(st.sampled_from("xyz"), inner, max_size=3)
    ),
    max_leaves=6,
)
_CALLS = st.tuples(st.lists(_TREES, max_size=2).map(tuple), st.dictionaries(st.sampled_from("kw"), _TREES, max_size=2))
Call = tuple[tuple[Any, ...], dict[str, Any]]


@settings(max_examples=300)
@given(_CALLS, _CALLS, st.booleans())
def test_the_reader_takes_exactly_the_calls_that_the_tree_walk_takes(captured: Call, given_call: Call, same: bool) -> None:
    recorder = Recorder()
    x = recorder.input(torch.ones(2))
    args, kwargs = captured
    program = recorder.build([recorder.run("aten::relu.default", x)], call=((x, *args), kwargs))
    reader = CallReader(program.input_tree)
    assert reader.supported
    args, kwargs = captured if same else given_call
    call = ((torch.ones(2), *args), kwargs)
    leaves = reader.read(*call)
    fits = leaves is not None and [leaf_key(leaf) for leaf in leaves] == [expected_key(program, leaf) for leaf in program.input_leaves]
    try:
        tensors = flatten_inputs(program, *call)
    except InputMismatch:
        assert not fits
    else:
        assert fits
        assert len(tensors) == 1
    assert fits or not same


def test_what_the_reader_does_not_know_is_left_to_the_tree_walk() -> None:
    pair = collections.OrderedDict(a=torch.ones(1))
    recorder = Recorder()
    x = recorder.input(torch.ones(1))
    program = recorder.build([recorder.run("aten::relu.default", x)], call=((collections.OrderedDict(a=x),), {}))
    assert not CallReader(program.input_tree).supported
    assert len(flatten_inputs(program, (pair,))) == 1


@pytest.mark.parametrize(
    "result",
    [
        lambda a, b: a,
        lambda a, b: (a, [b, a], {"k": b, "n": 3}),
        lambda a, b: {"x": (a,), "y": None},
        lambda a, b: collections.OrderedDict(a=a),
    ],
)
def test_an_answer_is_put_together_as_the_tree_walk_does(result: Any) -> None:
    recorder = Recorder()
    x = recorder.input(torch.ones(2))
    a, b = recorder.run("aten::relu.default", x), recorder.run("aten::tanh.default", x)
    program = recorder.build([a, b], result=result(a, b))
    tensors = [torch.zeros(2), torch.ones(2)]
    made, expected = answer_maker(program)(tensors), unflatten_outputs(program, tensors)
    assert type(made) is type(expected)
    assert repr(made) == repr(expected)
    again = answer_maker(program)(tensors)
    assert again is not made or isinstance(made, torch.Tensor)


@pytest.fixture
def model() -> TwoBranches:
    return TwoBranches().eval()


def _watch(model: TwoBranches) -> ModelWatch:
    return ModelWatch(model, two_branches_program(model)[0])


def test_a_neighbour_that_the_program_does_not_read_is_no_change(model: TwoBranches) -> None:
    model.register_buffer("unread", torch.zeros(2))
    watch = _watch(model)
    model.unread = torch.ones(2)
    assert watch.change() is Change.NONE
    model.register_buffer("another", torch.zeros(2))
    assert watch.change() is Change.NONE
    model.offset = torch.ones(8)
    assert watch.change() is Change.STRUCTURE


def test_every_kind_of_change_is_told_apart(model: TwoBranches) -> None:
    assert _watch(model).change() is Change.NONE
    watch = _watch(model)
    model.right.train()
    assert watch.change() is Change.MODE
    model.eval()
    assert watch.change() is Change.NONE
    handle = model.left.register_forward_pre_hook(lambda module, args: None)
    assert watch.change() is Change.HOOKS
    handle.remove()
    with torch.no_grad():
        model.offset.add_(1.0)
    assert watch.change() is Change.CONTENT
    watch.accept()
    assert watch.change() is Change.NONE
    model.left.bias.data = torch.zeros(8)
    assert watch.change() is Change.MOVED


def test_modules_that_appear_vanish_or_change_their_name_are_a_change(model: TwoBranches) -> None:
    watch = _watch(model)
    model.left.add_module("new", torch.nn.Identity().eval())
    assert watch.change() is Change.STRUCTURE
    del model.left.new
    assert watch.change() is Change.NONE
    model._modules["renamed"] = model._modules.pop("right")
    assert watch.change() is Change.STRUCTURE
    model._modules["right"] = model._modules.pop("renamed")
    assert watch.change() is Change.NONE
    del model.right
    assert watch.change() is Change.STRUCTURE


def test_a_replacement_of_equal_value_is_a_change(model: TwoBranches) -> None:
    watch = _watch(model)
    model.left.weight = torch.nn.Parameter(model.left.weight.detach().clone())
    assert watch.change() is Change.STRUCTURE
