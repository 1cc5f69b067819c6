"""What an operator changes in place, and which tensors share memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from autosched.capture.arguments import refs_in
from autosched.core.extents import storage_of


def written_values(op: OpOverload[..., Any], args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[int, ...]:
    """Value ids of the arguments that the operator's schema marks as written."""
    found: dict[int, None] = {}
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        item = args[position] if position < len(args) else kwargs.get(argument.name)
        found.update(dict.fromkeys(refs_in(item)))
    return tuple(found)


def shared_with(output: torch.Tensor, given: Iterator[tuple[int, torch.Tensor]]) -> int | None:
    """Value id of the first of ``given`` that shares its memory with ``output``, or None."""
    storage = storage_of(output)
    return next((value for value, tensor in given if storage_of(tensor) == storage), None)


def hides_a_view(node: Node) -> bool:
    """Whether a call of an exported graph gives back memory that it was given, and the operator's schema does not say that it may.

    Some composite operators do, by what they are asked: ``einsum`` that only permutes, ``meshgrid``, ``type_as`` the dtype it had.
    """
    op = node.target
    if not isinstance(op, OpOverload) or torch.Tag.maybe_aliasing_or_mutating in op.tags:
        return False
    if any(item.alias_info is not None for item in (*op._schema.arguments, *op._schema.returns)):
        return False
    # What export notes of each call shares memory where the tensors themselves do.
    given = {storage_of(tensor) for argument in node.all_input_nodes for tensor in _noted(argument)}
    shared = any(storage_of(tensor) in given for tensor in _noted(node))
    return shared and op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def _noted(node: Node) -> list[torch.Tensor]:
    made = node.meta.get("val")
    return [item for item in (made if isinstance(made, list | tuple) else [made]) if isinstance(item, torch.Tensor)]
