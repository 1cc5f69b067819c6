"""Calls whose dictionaries have their keys in another order than in tuning: the same call, if the model goes by the keys alone.

Nothing promises that it does: a model may as well go through the values in their order. So each order is tried once, on the same tensors as
the order of tuning: the model must call the same operators on the same operands, one after the other, and return the same. That does not
depend on what is in the tensors, and so not on weights that are still zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from autosched.core.from_outside import let_through
from autosched.core.parts import named_tensors
from autosched.core.program import Program
from autosched.core.standing_aside import all_aside
from autosched.runtime.kernels import random_inputs
from autosched.runtime.noted_calls import NotedCalls
from autosched.runtime.prepared import OPERATOR_ERRORS, Prepared
from autosched.runtime.trees import describe_tree, returns_given, unflatten_inputs
from autosched.runtime.weights import ModelWatch

_SEED = 8_191
# Of one shape, until its model is changed. Each costs two calls of the model; whoever makes up orders shall not have it run for nothing
# else.
_MOST_TRIED = 16

_Call = tuple[tuple[Any, ...], dict[str, Any]]


class KeyOrders:
    """Which orders of keys a model was seen not to care about."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        # Each shape has a watch of its own, and another one once its model was changed. None is held here, for it holds the weights.
        self._settled: WeakKeyDictionary[ModelWatch, dict[object, bool]] = WeakKeyDictionary()

    def matters(self, prepared: Prepared, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the model may answer this call otherwise than the same one in the order of ``prepared.program``; tried if need be.

        Args:
            prepared: fits the model as it is now, and is not used meanwhile. What was seen of a model is forgotten once it is changed.
            args, kwargs: as :func:`in_captured_order` was given them, when it found something to change.
        """
        settled = self._settled.setdefault(prepared.watch, {})
        order = _order((args, dict(kwargs)))
        if order not in settled:
            if len(settled) >= _MOST_TRIED:
                return True
            settled[order] = self._differs(prepared, args, kwargs)
        return settled[order]

    def _differs(self, prepared: Prepared, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        program, model = prepared.program, self._model
        inputs = random_inputs(program, _SEED, prepared.device)
        captured = unflatten_inputs(program, inputs)
        known = [*(tensor for named in named_tensors(model).values() for tensor in named.values()), *inputs]
        try:
            with all_aside(), torch.no_grad():
                return _seen(model, captured, known) != _seen(model, _like((args, dict(kwargs)), captured), known)
        except OPERATOR_ERRORS as error:
            let_through(error)
            return True


def in_captured_order(program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call | None:
    """The call with every dictionary in the order of keys that ``program`` was captured with; ``None`` if there is nothing to change.

    Nor is anything done for a model that changes what it is given, or returns it: a trial would, too.
    """
    by_position, by_name = _arguments(program.input_tree)
    if len(args) != len(by_position) or kwargs.keys() != by_name.keys() or program.writes or returns_given(program):
        return None
    ordered = tuple(map(_ordered, by_position, args)), {name: _ordered(node, kwargs[name]) for name, node in by_name.items()}
    return ordered if _order(ordered) != _order((args, {name: kwargs[name] for name in by_name})) else None


@lru_cache(maxsize=256)
def _arguments(input_tree: str) -> tuple[Sequence[Any], Mapping[str, Any]]:
    args, kwargs = json.loads(input_tree)[1]["children_spec"]
    return args["children_spec"], dict(zip(json.loads(kwargs["context"]), kwargs["children_spec"], strict=True))


def _ordered(node: Mapping[str, Any], item: Any) -> Any:
    """``item`` as ``node`` has it; what is of another kind, or has other keys, as it is."""
    children = node["children_spec"]
    if node["type"] == "builtins.dict" and type(item) is dict:
        keys = json.loads(node["context"])
        if item.keys() == set(keys):
            return {key: _ordered(child, item[key]) for key, child in zip(keys, children, strict=True)}
    if node["type"] == f"builtins.{type(item).__name__}" and type(item) in (list, tuple) and len(item) == len(children):
        return type(item)(map(_ordered, children, item))
    return item


def _order(item: Any) -> object:
    """The keys of all dictionaries within, in their order."""
    if type(item) is dict:
        return tuple([(key, _order(value)) for key, value in item.items()])
    return tuple(map(_order, item)) if type(item) in (list, tuple) else None


def _like(model: Any, item: Any) -> Any:
    """What is in ``item``, in the order of keys of ``model``, which differs in nothing else."""
    if type(item) is dict:
        return {key: _like(value, item[key]) for key, value in model.items()}
    return type(item)(map(_like, model, item)) if type(item) in (list, tuple) else item


def _seen(model: torch.nn.Module, call: _Call, known: Sequence[torch.Tensor]) -> object:
    """What the model calls, and what it returns, to be compared with another call on the same tensors.

    Args:
        known: tensors that were there before: its own, and those of the call.
    """
    args, kwargs = call
    with _Calls(known) as calls:
        answer = model(*args, **kwargs)
    leaves, tree = describe_tree(answer)
    return calls.noted, tree, [calls.name(leaf) for leaf in leaves]


class _Calls(NotedCalls):  # type: ignore[no-untyped-call]
    """What is called, to be compared; a tensor that comes from nowhere that was seen is equal to nothing."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.noted: list[object] = []
        for place, tensor in enumerate(known):
            self._call_it(tensor, f"known {place}")

    def _note(self, func: object, tree: object, operands: Sequence[object]) -> None:
        self.noted.append((str(func), operands, str(tree)))

    def _name_unknown(self, tensor: torch.Tensor) -> object:
        return object()
