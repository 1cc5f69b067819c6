"""Calls of an exported graph in other words, where those compute the same: under another name, or with a tensor in a number's place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

Overload = OpOverload[..., Any]

# Python's operators, under the names they have everywhere else.
_RENAMED = {
    "aten::__and__": "bitwise_and", "aten::__or__": "bitwise_or", "aten::__xor__": "bitwise_xor",
    "aten::__lshift__": "bitwise_left_shift", "aten::__rshift__": "bitwise_right_shift",
}  # fmt: skip
_copy: Overload = torch.ops.aten.clone.default
_chosen: Overload = torch.ops.aten.where.self
_RANDOM_SLOPES = frozenset({"aten::rrelu", "aten::rrelu_with_noise"})


def in_plain_words(
    op: Overload, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: object
) -> tuple[Overload, tuple[Any, ...], dict[str, Any]]:
    """The call, or another that computes the same. Arguments are those of a draft; ``made`` is what the call makes."""
    name = op._schema.name
    if name == "aten::add" and "alpha" in kwargs and isinstance(made, torch.Tensor) and made.dtype is torch.bool:
        # Inductor would multiply, and write integers of eight bytes where the booleans have room for one each.
        if kwargs["alpha"]:
            return op, args, {key: item for key, item in kwargs.items() if key != "alpha"}
        first, second = args
        # Without the second one, in the shape of both.
        return (_copy, (first,), {}) if isinstance(second, int) else (_chosen, (second, first, first), {})
    if name in _RENAMED:
        packet, overload = getattr(torch.ops.aten, _RENAMED[name]), op._schema.overload_name
        op = getattr(packet, overload if overload in packet.overloads() else f"Tensor_{overload}")
    elif name in _RANDOM_SLOPES and (slope := mean_slope(op, args, kwargs)) is not None:
        # Inductor would pass the memory for the slopes, which nobody wrote.
        return torch.ops.aten.leaky_relu.default, (args[0], slope), {}
    elif name == "aten::convolution" and isinstance(made, torch.Tensor):
        # One number for all dimensions, which oneDNN's calls and ours do not take for that.
        args = tuple(item * (made.dim() - 2) if isinstance(item, list) and len(item) == 1 else item for item in args)
    return op, args, dict(kwargs)


def mean_slope(op: Overload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float | None:
    """The slope that a call of ``rrelu`` computes with, as its kernels do; ``None`` in training, where it is drawn for each element."""
    if _given(op, args, kwargs, "training"):
        return None
    lower, upper = _given(op, args, kwargs, "lower"), _given(op, args, kwargs, "upper")
    return float(lower + upper) / 2


def complex_as_tensors(op: Overload, args: tuple[Any, ...], made: object) -> tuple[Overload, tuple[Any, ...]]:
    """The call with a tensor without dimensions for each complex number among ``args``: a program has no such numbers.

    Args:
        made: what the call makes. In its dtype a tensor makes the same dtype of the others as a number does.

    Returns:
        The call as it is if there is no such number, if it makes no complex tensor, or if no overload of the operator takes a tensor there.
    """
    places = [place for place, item in enumerate(args) if isinstance(item, complex)]
    if not places or not isinstance(made, torch.Tensor) or not made.is_complex() or (found := _taking_tensors(op, places)) is None:
        return op, args
    tensors = [torch.tensor(item, dtype=made.dtype, device=made.device) if isinstance(item, complex) else item for item in args]
    return found, tuple(tensors)


def _taking_tensors(op: Overload, places: list[int]) -> Overload | None:
    """The overload that has a tensor at each of ``places`` and is ``op`` elsewhere: ``mul.Tensor`` of ``mul.Scalar``."""
    wanted = [(item.name, "Tensor" if place in places else str(item.type)) for place, item in enumerate(op._schema.arguments)]
    packet = op.overloadpacket
    overloads: list[Overload] = [getattr(packet, name) for name in packet.overloads()]
    return next((item for item in overloads if _arguments(item) == wanted), None)


def _arguments(op: Overload) -> list[tuple[str, str]]:
    return [(item.name, str(item.type)) for item in op._schema.arguments]


def _given(op: Overload, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name, argument.default_value)
    raise KeyError(name)
