"""What an operator changes in place, and which tensors share memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

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
