"""The compiled call signature agrees with the general tree walk on every call."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autosched.core.containers import objects_in
from autosched.core.errors import InputMismatch
from autosched.runtime.call_form import CallReader, answer_maker, expected_key, leaf_key
from autosched.runtime.trees import describe_tree, flatten_inputs, unflatten_outputs
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
def test_an_answer_is_put_together_as_the_model_gives_it(result: Any) -> None:
    recorder = Recorder()
    x = recorder.input(torch.ones(2))
    a, b = recorder.run("aten::relu.default", x), recorder.run("aten::tanh.default", x)
    program = recorder.build([a, b], result=result(a, b))
    tensors = [torch.zeros(2), torch.ones(2)]
    maker, expected = answer_maker(program), result(*tensors)
    made = maker(tensors)
    for found in (made, unflatten_outputs(program, tensors)):
        assert type(found) is type(expected)
        assert repr(found) == repr(expected)
    assert maker(tensors) is not made or isinstance(made, torch.Tensor)
    with pytest.raises(ValueError, match="3 tensors for 2 outputs"):
        maker([*tensors, torch.ones(2)])


@pytest.fixture(scope="module")
def caches() -> Any:
    pytest.importorskip("transformers")
    from autosched.zoo_models.torchvision_schemas import import_torchvision

    import_torchvision()
    from transformers import cache_utils

    return cache_utils


def _filled(cache: Any) -> Any:
    for layer in range(2):
        cache.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), layer)
    return cache


def _static(caches: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return _filled(caches.StaticCache(config=LlamaConfig(**sizes), max_cache_len=8))


_CACHES: dict[str, Callable[[Any], Any]] = {
    "growing": lambda caches: _filled(caches.DynamicCache()),
    "empty": lambda caches: caches.DynamicCache(),
    "static": _static,
    "two": lambda caches: caches.EncoderDecoderCache(_filled(caches.DynamicCache()), _filled(caches.DynamicCache())),
}
_CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda layer: None,
    "one attribute more": lambda layer: setattr(layer, "new", 1),
    "one attribute less": lambda layer: delattr(layer, "is_initialized"),
    "one attribute instead of another": lambda layer: (delattr(layer, "is_initialized"), setattr(layer, "new", True)),
    "no dtype": lambda layer: setattr(layer, "dtype", None),
    "dtype of nothing in it": lambda layer: setattr(layer, "dtype", torch.float16),
    "a class of the same name": lambda layer: setattr(
        layer, "__class__", type(type(layer).__name__, (type(layer),), {"__module__": type(layer).__module__})
    ),
}


@pytest.mark.parametrize("name", _CACHES)
@pytest.mark.parametrize("change", _CHANGES)
def test_a_cache_is_taken_apart_as_the_tree_walk_takes_it_apart(caches: Any, name: str, change: str) -> None:
    args, kwargs = (torch.ones(1), _CACHES[name](caches)), {"more": [torch.ones(2)]}
    _, tree = describe_tree((args, kwargs))
    reader = CallReader(tree)
    assert reader.supported
    other = _CACHES[name](caches)
    layers = getattr(other, "self_attention_cache", other).layers
    if layers:
        _CHANGES[change](layers[0])
    call = ((torch.ones(1), other), kwargs)
    wanted, now = describe_tree(call)
    for _ in range(2):
        leaves = reader.read(*call)
        if now != tree:
            assert leaves is None
            continue
        assert leaves is not None
        assert all(one is two for one, two in zip(leaves, wanted, strict=True))
        assert all(one is two for one, two in zip(leaves.objects, objects_in(call), strict=True))
    assert (now == tree) is (change == "nothing" or not layers)
