"""The compiled call signature agrees with the general tree walk on every call."""

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
from tests.conformance.graphs import Recorder

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
