"""Parameters that are several tensors, as torchao's quantised weights are: their parts, by the names that ``torch.export`` gives them.

Export takes a parameter ``layer.weight`` of a tensor subclass apart, and calls the plain tensors in it
``layer.parametrizations.weight.original0`` and so on, in the order of ``__tensor_flatten__``. The model itself has no such names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autosched.core.program import ConstantSource

_PART = re.compile(r"((?:.*\.)?)parametrizations\.([^.]+)\.original([0-9]{1,4})")


def named_tensors(model: torch.nn.Module) -> dict[ConstantSource, dict[str, torch.Tensor]]:
    """The model's parameters and buffers under every name that a program may know them by: shared ones under each, and parts."""
    return {
        ConstantSource.PARAMETER: with_parts(dict(model.named_parameters(remove_duplicate=False))),
        ConstantSource.BUFFER: with_parts(dict(model.named_buffers(remove_duplicate=False))),
    }


def with_parts(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``named`` parameters or buffers, and the parts of those that have any. Names that are there already stay what they are."""
    found = dict(named)
    for name, tensor in named.items():
        for place, part in enumerate(parts_of(tensor)):
            owner, _, key = name.rpartition(".")
            found.setdefault(f"{owner}{'.' if owner else ''}parametrizations.{key}.original{place}", part)
    return found


def whole_of(name: str) -> tuple[str, int] | None:
    """The parameter that a part belongs to, and its place there; None if ``name`` is not that of a part.

    >>> whole_of("0.parametrizations.weight.original1"), whole_of("0.weight")
    (('0.weight', 1), None)
    """
    found = _PART.fullmatch(name)
    return (found[1] + found[2], int(found[3])) if found is not None else None


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that ``tensor`` consists of, in order; none if it is one itself."""
    # Without a type: such a subclass has other signatures than a tensor, so that a type checker takes it for impossible.
    whole: Any = tensor
    if not is_traceable_wrapper_subclass(whole):
        return []
    found: list[torch.Tensor] = []
    names, _ = whole.__tensor_flatten__()
    for name in names:
        inner = getattr(whole, name)
        if isinstance(inner, torch.Tensor):
            found += parts_of(inner) or [inner]
    return found
