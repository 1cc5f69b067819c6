"""Recognising a call like one that passed every check: PyTorch's own compiled guard looks at all tensors of a call at once.

Looking at 20 inputs in Python takes as long as a few operators. A guard says yes only to what the example was in all that the checks ask
for (class, dispatch keys, device, dtype, sizes, strides, whether gradients are wanted) and under the same modes of the thread; whatever it
says no to goes the long way, which alone refuses calls. The guard is Dynamo's, and private in PyTorch: where it is absent, or does not tell
apart what it must, every call goes the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import is_
from typing import Any

import torch

from autosched.core.from_outside import let_through
from autosched.runtime.call_form import leaf_key

_Check = Callable[..., bool]
# Of one of these types, equal values have equal keys (``leaf_key``); of floats, 0.0 and -0.0 have not.
_EQUAL_IF_ALIKE = frozenset((bool, int, str, type(None)))
# As a function of C's: it is asked of every tensor of every call.
_is_nested: Callable[[Any], bool] = vars(torch._C.TensorBase)["is_nested"].__get__


class QuickCheck:
    """Says yes to calls like one example.

    Args:
        check: the compiled guard of the example's tensors.
        order: place among the call's leaves of each tensor of the schedule.
        others: place and value of all other leaves.
    """

    __slots__ = ("_check", "_keys", "_order", "_values")

    def __init__(self, check: _Check, order: Sequence[int], others: Sequence[tuple[int, object]]) -> None:
        self._check = check
        self._order = order
        self._values = [(place, type(leaf), leaf) for place, leaf in others if type(leaf) in _EQUAL_IF_ALIKE]
        self._keys = [(place, leaf_key(leaf)) for place, leaf in others if type(leaf) not in _EQUAL_IF_ALIKE]

    def tensors(self, leaves: Sequence[Any]) -> list[Any] | None:
        """The schedule's inputs, which need no further look; ``None`` if this cannot be said of a call with these leaves."""
        for place, kind, value in self._values:
            leaf = leaves[place]
            if type(leaf) is not kind or leaf != value:
                return None
        for place, key in self._keys:
            if leaf_key(leaves[place]) != key:
                return None
        tensors = [leaves[place] for place in self._order]
        try:
            # The guard asks for strides, and where a tensor has none, its error ends the process.
            if any(map(_is_nested, tensors)):
                return None
        except TypeError:
            return None  # no tensor
        return tensors if self._check(*tensors) else None


def quick_check(leaves: Sequence[Any], order: Sequence[int], fitted: Sequence[torch.Tensor]) -> QuickCheck | None:
    """Of a call that passed every check just now, in this thread; ``None`` if there is no guard for such calls.

    Args:
        leaves: of the call.
        order: place among them of each tensor of the schedule.
        fitted: what the schedule gets; others than the call's own if those had to be laid out again, which no guard repeats.
    """
    tensors = [leaves[place] for place in order]
    # Whether gradients matter is a mode of the thread that the guard does not compare.
    if not tensors or not all(map(is_, tensors, fitted)) or any(tensor.requires_grad for tensor in tensors):
        return None
    make = _guard()
    if make is None:
        return None
    taken = set(order)
    others = [(place, leaf) for place, leaf in enumerate(leaves) if place not in taken]
    try:
        check = make(tensors)
        return QuickCheck(check, tuple(order), others) if check(*tensors) else None
    except (RuntimeError, TypeError) as error:
        let_through(error)
        return None


@lru_cache(maxsize=1)
def _guard() -> Callable[[Sequence[torch.Tensor]], _Check] | None:
    """Makes guards, if this PyTorch has them and they tell apart what they must."""
    try:
        from torch._C._dynamo import guards

        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
            example = torch.zeros(2, 3)
            check = _made(guards.TensorGuards, [example])
            unlike = (
                torch.zeros(3, 3), torch.zeros(3, 2).t(), torch.zeros(2, 3, 1), example.double(), example.to_sparse(), example.to("meta"),
                torch.zeros(2, 3, requires_grad=True), torch.nn.Parameter(example, requires_grad=False), torch._neg_view(example), 1.0,
            )  # fmt: skip
            trusted = check(torch.ones(2, 3)) and not any(check(other) for other in unlike)
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        let_through(error)
        return None
    return (lambda tensors: _made(guards.TensorGuards, tensors)) if trusted else None


def _made(kind: Any, tensors: Sequence[torch.Tensor]) -> _Check:
    sizes = [list(tensor.shape) for tensor in tensors]
    strides = [list(tensor.stride()) for tensor in tensors]
    check: _Check = kind(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check
