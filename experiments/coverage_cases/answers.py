"""What one call of a model gave, and how two such answers are told apart: containers, values, memory, inputs and buffers afterwards."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autosched.core.extents import overlaps_itself
from autosched.runtime.trees import map_tensors


@dataclass(frozen=True)
class Answer:
    """One call of a model.

    Args:
        result: what came back, with a copy of each tensor.
        inputs: the tensors among the inputs, as they are after the call.
        state: parameters and buffers after the call, by name.
        shared: which outputs share memory with an input or an earlier output, as text.
        call: the arguments after the call, with a copy of each tensor: a model may change the objects among them.
        returned: for each object that came back its place among those of the call, or -1.
    """

    result: Any
    inputs: list[torch.Tensor]
    state: dict[str, torch.Tensor]
    shared: tuple[str, ...]
    call: Any
    returned: tuple[int, ...]


def scribble(outputs: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> None:
    """Write to what a call returned and owns: the next call must not notice."""
    for tensor in outputs:
        if tensor.layout is not torch.strided or any(share_memory(tensor, other) for other in kept) or _overlaps_itself(tensor):
            continue
        with contextlib.suppress(RuntimeError), torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.zero_()


def copied(item: Any) -> Any:
    """The same containers with a copy of each tensor, laid out alike."""
    memo = {id(tensor): _copy(tensor) for tensor in tensors_of(item)}
    return copy.deepcopy(item, memo)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return overlaps_itself(tensor.shape, tensor.stride())


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()
    dense = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return tensor.detach().clone() if _overlaps_itself(tensor) else dense.copy_(tensor.detach())


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, the sparse ones left out."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in found.items() if tensor.layout is torch.strided}


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the ranges of addresses of two tensors meet; columns of one table count as sharing."""
    (begin, end), (other_begin, other_end) = _extent(a), _extent(b)
    return begin < other_end and other_begin < end


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first byte and of the one behind its last."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return 0, 0
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every element."""
    if a.layout is torch.strided and a.element_size() == 1:
        # Little is defined on floats of eight and four bits, equality of some not even.
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return (a.shape, a.dtype) == (b.shape, b.dtype) and bool(
        torch.equal(torch.view_as_real(a) if a.is_complex() else a, torch.view_as_real(b) if b.is_complex() else b)
    )


def varied(call: Any, seed: int, *, integers: bool = True) -> Any:
    """The same call with other values: the example's own elements in another order, floats scaled a little."""
    generator = torch.Generator().manual_seed(seed)

    def vary(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.numel() < 2 or (tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]):
            return tensor.detach().clone()
        if not integers and not tensor.is_floating_point():
            return tensor.detach().clone()
        plain = tensor.detach().view(torch.uint8) if tensor.element_size() == 1 else tensor.detach()
        other = plain.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape).view(tensor.dtype)
        if tensor.is_floating_point() and tensor.element_size() > 1:
            other = other * 1.25
        return other if _overlaps_itself(tensor) else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(other)

    return map_tensors(vary, call)


def structural_difference(mine: Any, theirs: Any, where: str) -> str:
    """The first difference of two results apart from the values of tensors, or an empty string."""
    if type(mine) is not type(theirs) and not (isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return f"{where} is a {type(mine).__name__}; the model returns a {type(theirs).__name__}"
    if isinstance(theirs, torch.Tensor):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return f"{where} is {list(mine.shape)} {mine.dtype}; the model returns {list(theirs.shape)} {theirs.dtype}"
        return "" if not mine.requires_grad else f"{where} requires gradients"
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(theirs, Mapping):
        if list(mine) != list(theirs):
            return f"{where} has the keys {list(mine)}; the model's has {list(theirs)}"
        pairs = [(f"{where}[{key!r}]", mine[key], theirs[key]) for key in theirs]
    elif isinstance(theirs, list | tuple):
        if len(mine) != len(theirs):
            return f"{where} has {len(mine)} items; the model's has {len(theirs)}"
        pairs = [(f"{where}[{index}]", *items) for index, items in enumerate(zip(mine, theirs, strict=True))]
    elif dataclasses.is_dataclass(theirs) or hasattr(theirs, "__dict__"):
        ours, others = _attributes(mine), _attributes(theirs)
        if list(ours) != list(others):
            return f"{where} has the attributes {list(ours)}; the model's has {list(others)}"
        pairs = [(f"{where}.{name}", ours[name], others[name]) for name in others]
    elif repr(mine) != repr(theirs):
        return f"{where} is {mine!r}; the model returns {theirs!r}"
    return next((found for name, a, b in pairs if (found := structural_difference(a, b, name))), "")


def tensors_of(item: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, dataclasses and other objects, in their order."""
    found: list[torch.Tensor] = []
    _collect(item, found)
    return found


def _collect(item: Any, into: list[torch.Tensor]) -> None:
    if isinstance(item, torch.Tensor):
        into.append(item)
    elif isinstance(item, Mapping):
        for part in item.values():
            _collect(part, into)
    elif isinstance(item, list | tuple):
        for part in item:
            _collect(part, into)
    elif dataclasses.is_dataclass(item) or (hasattr(item, "__dict__") and not isinstance(item, type)):
        for part in _attributes(item).values():
            _collect(part, into)


def _attributes(item: Any) -> dict[str, Any]:
    """By name, in the order of names: which was set first says nothing."""
    names = vars(item) if hasattr(item, "__dict__") else [field.name for field in dataclasses.fields(item)]
    return {name: getattr(item, name) for name in sorted(names)}


def strides_that_matter(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of those dimensions that have more than one element."""
    if tensor.numel() == 0:
        return ()
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def error_of_scale(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference over the largest magnitude in ``theirs``, of its finite elements; 0 for integers."""
    if not (theirs.is_floating_point() or theirs.is_complex()) or theirs.numel() == 0 or theirs.layout is not torch.strided:
        return 0.0
    a, b = mine.to(torch.complex128), theirs.to(torch.complex128)
    finite = b.abs().isfinite()
    if not bool(finite.any()):
        return 0.0
    scale = float(b[finite].abs().max())
    return float((a - b)[finite].abs().max()) / scale if scale else float(a[finite].abs().max())


def says_nothing(expected: Sequence[Answer]) -> bool:
    """Whether every output of several numbers is constant or not finite, so that an equal one proves little."""
    floats = [tensor for answer in expected for tensor in tensors_of(answer.result) if tensor.is_floating_point() and tensor.numel() > 1]
    wide = [tensor.double() for tensor in floats]
    return bool(wide) and all(not bool(tensor.isfinite().all()) or float(tensor.std()) == 0 for tensor in wide)
