"""The model's call signature: nested inputs to a flat list of tensors, and back."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autosched.core.containers import Opened, objects_in, pack, pack_call, rebuild, rebuild_packed, unpack
from autosched.core.errors import InputMismatch
from autosched.core.namedtuples import register_named
from autosched.core.opened import read_context
from autosched.core.program import Argument, NonFinite, Program, Ref
from autosched.runtime.call_difference import difference_of_calls, place_of


def describe_tree(tree: Any) -> tuple[list[Any], str]:
    """Leaves of a nested container, and its structure as a string that any process can read."""
    leaves, spec = pytree.tree_flatten(pack(tree))
    return leaves, str(pytree.treespec_dumps(spec))


@lru_cache(maxsize=256)
def structure_of(text: str) -> pytree.TreeSpec:
    """The structure that :func:`describe_tree` wrote down, with the named tuples in it known to PyTorch."""
    pending = [json.loads(text)[1]]
    while pending:
        node = pending.pop()
        if node["type"] == "collections.namedtuple" and isinstance(node["context"], str):
            register_named(node["context"])
        elif isinstance(node["type"], str) and node["type"].startswith("torch.return_types."):
            register_named(node["type"])
        pending += node["children_spec"]
    return pytree.treespec_loads(text)


def _in_order(tree: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments in the order of the captured call: Python callers may give them in any."""
    _, names = _call_form(tree)
    if kwargs.keys() != set(names):
        return dict(kwargs)
    return {name: kwargs[name] for name in names}


@lru_cache(maxsize=256)
def _call_form(tree: str) -> tuple[int, tuple[str, ...]]:
    """How many arguments the captured call had by position, and the names of the others."""
    spec = structure_of(tree)
    args, kwargs = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return len(args), tuple(kwargs)


def flatten_inputs(program: Program, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
    """Tensors of a call, in the order of ``program.given``.

    Raises:
        InputMismatch: if structure, a shape, a dtype, or a non-tensor argument differs from what the schedule was made for.
    """
    leaves, spec = pytree.tree_flatten(pack_call((tuple(args), _in_order(program.input_tree, kwargs) if kwargs else {})))
    wanted_spec = structure_of(program.input_tree)
    if len(leaves) != len(program.input_leaves) or spec != wanted_spec:
        raise InputMismatch(f"{difference_of_calls(spec, wanted_spec)}. Call it as in tuning, or tune for this form.")
    tensors: dict[int, torch.Tensor] = {}
    for position, (leaf, expected) in enumerate(zip(leaves, program.input_leaves, strict=True)):
        if isinstance(expected, Ref):
            wanted = program.graph.values[expected.value].spec
            if not isinstance(leaf, torch.Tensor):
                raise InputMismatch(f"input {position} is a {type(leaf).__name__}; expected a tensor {list(wanted.shape)} {wanted.dtype}.")
            if leaf.is_nested:
                raise InputMismatch(f"input {position} is a nested tensor; the schedule was made for {list(wanted.shape)} {wanted.dtype}.")
            if tuple(leaf.shape) != wanted.shape or str(leaf.dtype)[6:] != wanted.dtype:
                differs = "shape" if tuple(leaf.shape) != wanted.shape else "dtype"
                raise InputMismatch(
                    f"input {position} is {list(leaf.shape)} {str(leaf.dtype)[6:]}; the schedule was made for "
                    f"{list(wanted.shape)} {wanted.dtype}. Tune for this {differs} too."
                )
            tensors[expected.value] = leaf
        elif not _same_literal(leaf, expected):
            place = place_of(spec, position)
            raise InputMismatch(
                f"input {position}{place and f' ({place})'} is {leaf!r}; the schedule was made for {python_value(expected)!r}. "
                "Tune for this value too."
            )
    return [tensors[value] for value in program.given]


def as_captured(
    program: Program, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The same call, with the arguments by position and by keyword that the captured call had so; ``None`` if it cannot be one.

    Args:
        signature: of the model's ``forward``. A default that only one of the two calls spells out makes no difference.
    """
    count, names = _call_form(program.input_tree)
    parameters = dict(signature.parameters)
    # What ``**kwargs`` takes has no place of its own: such a name is a keyword in both calls.
    rest = next((name for name, item in parameters.items() if item.kind is item.VAR_KEYWORD), None)
    if rest is not None:
        del parameters[rest]
    if any(item.kind is item.VAR_POSITIONAL for item in parameters.values()) or count > len(parameters):
        return None
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None
    given |= given.pop(rest, {}) if rest is not None else {}
    positional = tuple(parameters)[:count]
    wanted = (*positional, *names)
    spelled_out = {name: value for name, value in given.items() if name not in wanted}
    if any(name not in parameters or value is not parameters[name].default for name, value in spelled_out.items()):
        return None
    found = {name: given[name] if name in given else parameters[name].default for name in wanted if name in given or name in parameters}
    if len(found) != len(wanted) or any(value is inspect.Parameter.empty for value in found.values()):
        return None
    return tuple(found[name] for name in positional), {name: found[name] for name in names}


def _same_literal(leaf: Any, expected: Argument) -> bool:
    if isinstance(expected, NonFinite):
        return isinstance(leaf, float) and repr(leaf) == expected.name
    return type(leaf) is type(expected) and leaf == expected


def returns_given(program: Program) -> bool:
    """Whether an object of the call comes back in the answer."""
    pending = [structure_of(program.output_tree)]
    while pending:
        spec = pending.pop()
        if spec.type is Opened and read_context(spec.context)[1]:
            return True
        pending += spec.children()
    return False


def objects_given(program: Program, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, Any]:
    """The objects of a call that an answer may be marked with (``core.containers``), by number.

    Raises:
        InputMismatch: if one is given twice, which the schedule was not made for.
    """
    return numbered(objects_in((tuple(args), _in_order(program.input_tree, kwargs))))


def numbered(objects: Sequence[Any]) -> dict[int, Any]:
    """As :func:`objects_given`, of the objects of a call in the order of ``objects_in``."""
    if len(set(map(id, objects))) < len(objects):
        raise InputMismatch("one object is given twice in the call; the schedule was made for objects of their own. Give a copy.")
    return dict(enumerate(objects))


def unflatten_outputs(program: Program, tensors: Sequence[torch.Tensor], given: Mapping[int, Any] | None = None) -> Any:
    """The model's output from the tensors of ``program.graph.outputs``.

    Args:
        given: of :func:`objects_given`: those that the model returns are returned themselves, changed as the model changes them. Without
            them the output has objects of its own.
    """
    return rebuild(structure_of(program.output_tree), iter(_output_leaves(program, tensors)), dict(given or {}))


def packed_outputs(program: Program, tensors: Sequence[torch.Tensor]) -> Any:
    """As :func:`unflatten_outputs`, with objects taken apart and marked, as ``core.watch.Watch`` does it with a model's answer."""
    return rebuild_packed(structure_of(program.output_tree), iter(_output_leaves(program, tensors)))


def _output_leaves(program: Program, tensors: Sequence[torch.Tensor]) -> list[Any]:
    place = {value: tensor for value, tensor in zip(program.graph.outputs, tensors, strict=True)}
    return [place[leaf.value] if isinstance(leaf, Ref) else python_value(leaf) for leaf in program.output_leaves]


def output_tensors(result: Any) -> list[torch.Tensor]:
    """Every tensor of a model's output, in order."""
    return [leaf for leaf in pytree.tree_leaves(pack(result)) if isinstance(leaf, torch.Tensor)]


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The same nested container with every tensor replaced by what ``change`` makes of it."""
    leaves, spec = pytree.tree_flatten(pack(tree))
    return rebuild(spec, iter([change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]), {})


def renewed_calls(args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The same call ``count`` times, each with objects of its own around the same tensors, for a model may change those that it is given.

    What is timed takes them from the end: they are made before, and each goes when its call is done.
    """
    call = (args, kwargs)
    packed = pack(call)
    return [call] * count if packed is call else [unpack(packed) for _ in range(count)]


def unflatten_inputs(program: Program, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the model from the tensors of ``program.given``; inverse of :func:`flatten_inputs`."""
    place = dict(zip(program.given, tensors, strict=True))
    leaves = [place[leaf.value] if isinstance(leaf, Ref) else python_value(leaf) for leaf in program.input_leaves]
    args, kwargs = call_of(program.input_tree, leaves)
    return args, kwargs


def call_of(input_tree: str, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from the leaves of a call of the structure ``input_tree``."""
    args, kwargs = rebuild(structure_of(input_tree), iter(leaves), {})
    return tuple(args), dict(kwargs)


def python_value(literal: Argument) -> Any:
    """A leaf that is no tensor, as the model takes or returns it."""
    return float(literal.name) if isinstance(literal, NonFinite) else literal
