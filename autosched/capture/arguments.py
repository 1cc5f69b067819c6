"""From the arguments of a torch call to the plain values a program is written in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch

from autosched.core.errors import UnsupportedGraph
from autosched.core.program import Argument, Many, NonFinite, Ref, TorchLiteral, fits_64_bits


def to_argument(item: object, renumber: Mapping[int, int]) -> Argument:
    """Plain form of one argument; ``renumber`` maps the value ids of a draft to those of the program.

    Raises:
        UnsupportedGraph: if the argument has no plain form (a symbolic size, a complex number, an integer beyond 64 bits, a generator).
    """
    if item is None or isinstance(item, bool | str) or (isinstance(item, int) and fits_64_bits(item)):
        return item
    if isinstance(item, Ref):
        return Ref(renumber[item.value])
    if isinstance(item, float):
        return item if math.isfinite(item) else _non_finite(item)
    if isinstance(item, torch.dtype):
        return TorchLiteral("dtype", str(item).removeprefix("torch."))
    if isinstance(item, torch.layout):
        return TorchLiteral("layout", str(item).removeprefix("torch."))
    if isinstance(item, torch.memory_format):
        return TorchLiteral("memory_format", str(item).removeprefix("torch."))
    if isinstance(item, torch.device):
        return TorchLiteral("device", str(item))
    if isinstance(item, list | tuple):
        return Many(tuple(to_argument(part, renumber) for part in item))
    raise UnsupportedGraph(
        f"an operator takes the argument {item!r} ({type(item).__name__}), which depends on the data or cannot be written down; expected "
        "numbers, strings, dtypes, devices, tensors and lists of them. Capture the part of the model before it."
    )


def _non_finite(number: float) -> NonFinite:
    if math.isnan(number):
        return NonFinite("nan")
    return NonFinite("inf") if number > 0 else NonFinite("-inf")


def refs_in(item: object) -> Iterator[int]:
    """Value ids of every tensor in a (nested) argument, in order, with repetitions."""
    if isinstance(item, Ref):
        yield item.value
    elif isinstance(item, list | tuple):
        for part in item:
            yield from refs_in(part)


def map_refs(item: object, change: Callable[[int], object]) -> object:
    """The same (nested) argument with every tensor replaced by ``change(value id)``."""
    if isinstance(item, Ref):
        return change(item.value)
    if isinstance(item, list | tuple):
        return [map_refs(part, change) for part in item]
    return item
