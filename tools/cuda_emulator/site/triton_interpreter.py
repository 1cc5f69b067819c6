"""Triton's interpreter, made quick enough for whole programs: it computes a kernel block by block with NumPy.

As it comes, it looks through all of ``triton.language`` at each call of one function by another, reduces with other functions than sums and
maxima one element at a time, takes blocks of powers of two only, and knows nothing of NVIDIA's library of functions.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language import semantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, TensorHandle, interpreter_builder
from triton.runtime.jit import JITFunction

_lock = threading.RLock()
_MISSING = object()


class Interpreted:
    """One launch, to be computed any number of times. The tensors are not kept: their memory must stay."""

    def __init__(self, function: Callable[..., Any], grid: tuple[int, ...], args: Sequence[Any], constants: dict[str, Any]) -> None:
        self._function = _rewritten(function)
        self._grid = grid + (1,) * (3 - len(grid))
        given = inspect.getcallargs(self._function, *args, **constants)
        self._given = {name: item if name in constants else interpreter._implicit_cvt(item) for name, item in given.items()}

    def run(self) -> None:
        """Compute every block."""
        with _lock, _interpreting(), np.errstate(all="ignore"):
            interpreter_builder.set_grid_dim(*self._grid)
            for place in itertools.product(*map(range, self._grid)):
                interpreter_builder.set_grid_idx(*place)
                self._function(**self._given)


def _rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = InterpretedFunction(function).rewrite()
    return made


def _reduce(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """Neighbours first, as a tree: each step takes whole arrays."""
    dtypes = [item.dtype for item in inputs]
    axis = 0 if self.axis is None else self.axis
    arrays = [item.handle.data.reshape(-1) if self.axis is None else item.handle.data for item in inputs]
    rank = inputs[0].handle.data.ndim
    while (count := arrays[0].shape[axis]) > 1:
        pairs = count // 2
        left = [_along(item, axis, slice(0, 2 * pairs, 2)) for item in arrays]
        right = [_along(item, axis, slice(1, 2 * pairs, 2)) for item in arrays]
        rest = [_along(item, axis, slice(2 * pairs, None)) for item in arrays]
        made = _combined(self, left, right, dtypes)
        arrays = [np.concatenate(item, axis) for item in zip(made, rest, strict=True)]
    arrays = [_along(item, axis, 0) for item in arrays]
    if self.keep_dims:
        axes = axis if self.axis is not None else tuple(range(rank))
        arrays = [np.expand_dims(item, axes) for item in arrays]
    return [self.to_tensor(item if item.ndim else item.item(), dtype) for item, dtype in zip(arrays, dtypes, strict=True)]


def _scan(self: Any, inputs: Sequence[Any]) -> list[Any]:
    dtypes = [item.dtype for item in inputs]
    arrays = [item.handle.data for item in inputs]
    steps = [[_along(item, self.axis, slice(0, 1)) for item in arrays]]
    for place in range(1, arrays[0].shape[self.axis]):
        steps.append(_combined(self, steps[-1], [_along(item, self.axis, slice(place, place + 1)) for item in arrays], dtypes))
    return [self.to_tensor(np.concatenate(item, self.axis), dtype) for item, dtype in zip(zip(*steps, strict=True), dtypes, strict=True)]


def _along(array: Any, axis: int, part: slice | int) -> Any:
    return array[(slice(None),) * axis + (part,)]


def _combined(self: Any, left: Sequence[Any], right: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    tensors = [self.to_tensor(item, dtype) for items in (left, right) for item, dtype in zip(items, dtypes, strict=True)]
    made = _rewritten(self.combine_fn.fn)(*tensors)
    return [np.broadcast_to(item.handle.data, left[0].shape) for item in (made if isinstance(made, tuple) else (made,))]


def _any_size(shape: Sequence[int]) -> int:
    return math.prod(shape)


def _range(self: Any, start: int, end: int, *, ret_ty: Any = None) -> Any:
    kind = ret_ty or tl.block_type(tl.int32, [end - start])
    return self.tensor(self.builder.create_make_range(kind.to_ir(self.builder), start, end), kind)


# What kernels call of NVIDIA's library, by PyTorch's functions.
_UNARY = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1",
    "floor", "lgamma", "log", "log10", "log1p", "log2", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
_OTHERS = ("isnan", "isinf", "signbit", "pow", "fmod", "atan2", "copysign", "hypot", "nextafter")


def _formula(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        tensors = [item for item in args if isinstance(item, tl.tensor)]
        dtype = tensors[0].dtype
        given = [torch.as_tensor(item.handle.data if isinstance(item, tl.tensor) else item) for item in args]
        made = function(*given)
        kind = tl.int32 if made.dtype is torch.bool else dtype
        array = made.numpy().astype(np.int32 if made.dtype is torch.bool else tensors[0].handle.data.dtype)
        shaped = any(item.type.is_block() for item in tensors)
        return tl.tensor(TensorHandle(array, kind.scalar), tl.block_type(kind, list(array.shape)) if shaped else kind)

    return call


def _changes() -> list[tuple[Any, str, Any]]:
    """What interpreting changes in Triton, as object, name and value; found once."""
    if not hasattr(_changes, "found"):
        seen = FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
        scope = interpreter._patch_lang(seen)
        try:
            found = [(item, name, inspect.getattr_static(item, name)) for item, name, _ in scope._changes]
        finally:
            scope.restore()
        # NumPy no longer takes an array of one element for a number.
        found.append((tl.tensor, "__index__", lambda self: int(self.handle.data.item())))
        # Functions that were made to be compiled call each other as Python.
        found.append((JITFunction, "__call__", lambda self, *args, **named: _rewritten(self.fn)(*args, **named)))
        found += [(interpreter.ReduceOps, "generic_reduce", _reduce), (interpreter.ScanOps, "generic_scan", _scan)]
        found += [(tl.core, "validate_block_shape", _any_size), (semantic.TritonSemantic, "arange", _range)]
        from torch._inductor.runtime.triton_compat import libdevice

        named = {name: getattr(torch, name) for name in (*_UNARY, *_OTHERS)} | {"nearbyint": torch.round, "rint": torch.round}
        found += [(libdevice, name, _formula(function)) for name, function in named.items()]
        _changes.found = found  # type: ignore[attr-defined]
    return _changes.found  # type: ignore[attr-defined,no-any-return]


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """Changed while a kernel is computed only: Triton compiles with the same modules."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for item, name, value in _changes():
            before.append((item, name, vars(item).get(name, _MISSING)))
            setattr(item, name, value)
        yield
    finally:
        for item, name, value in reversed(before):
            if value is _MISSING:
                delattr(item, name)
            else:
                setattr(item, name, value)
