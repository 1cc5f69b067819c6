"""While a model is exported: PyTorch sees objects taken apart, the model sees the objects."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autosched.core.containers import unpack
from autosched.core.errors import UnsupportedGraph
from autosched.core.opened import PLAIN
from autosched.core.watch import Watch


def plain_for(leaf: object) -> str:
    """What to take in the place of a number or text that is more than that (a member of an enumeration, a number of NumPy's), since
    written down it is another; empty for anything else."""
    # Of NumPy's numbers only float64 is one of Python's, too.
    if any((base.__module__, base.__name__) == ("numpy", "generic") for base in type(leaf).__mro__):
        return "a plain one"
    if not isinstance(leaf, int | float | str | enum.Enum) or type(leaf) in PLAIN:
        return ""
    return "its name or value" if isinstance(leaf, enum.Enum) else "a plain one"


@contextmanager
def real_containers(model: torch.nn.Module) -> Iterator[None]:
    """Let ``model`` be called with packed arguments (``core.containers``), and answer with a packed result.

    Raises:
        UnsupportedGraph: from within the call, if the model changes containers that it is given and does not return.
    """
    if isinstance(model, torch.jit.ScriptModule):
        # It has no such hooks to run, and no objects to be given.
        yield
        return
    watches: list[Watch] = []

    def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given: dict[int, Any] = {}
        call: tuple[tuple[Any, ...], dict[str, Any]] = unpack((args, kwargs), given)
        watches.append(Watch(call, given))
        return call

    def after(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> Any:
        packed = watches.pop().packed(answer)
        for leaf in pytree.tree_leaves(packed):
            if plain := plain_for(leaf):
                raise UnsupportedGraph(
                    f"the model returns {leaf!r}, a {type(leaf).__name__}, which cannot be written down; expected tensors, numbers and "
                    f"text. Return {plain}."
                )
        return packed

    # The model's own hooks are part of it: they see what it sees.
    hooks = [
        model.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
