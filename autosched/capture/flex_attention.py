"""FlexAttention while a model is exported: PyTorch's own operators in the place of one that takes Python functions.

``torch.nn.attention.flex_attention`` calls an operator with two functions, of which a compiler makes one kernel. Here it is what that
operator computes in eager mode, by PyTorch's own formula; or ``scaled_dot_product_attention`` with a mask, where the scores are left as
they are. The tables of a ``BlockMask`` say only what a kernel may leave out, so that nothing reads them.

All private interfaces of PyTorch for that are in this file; where one of them is missing, a model with FlexAttention is refused
(``screen.require_schedulable``).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from autosched.core.errors import UnsupportedGraph


@contextmanager
def flex_attention_spelled_out() -> Iterator[None]:
    """While this thread exports a model: FlexAttention is spelled out. In other threads it is what it was."""
    try:
        operator = _Written()
    except (ImportError, AttributeError):
        yield
        return
    with operator.standing_in():
        yield


def require_no_block_mask(leaf: object) -> None:
    """Refuse a ``BlockMask`` in a call: what it shows is a Python function, and nothing says that the next call's is the same.

    Raises:
        UnsupportedGraph: if ``leaf``, an argument, is one.
    """
    module = sys.modules.get("torch.nn.attention.flex_attention")
    if module is not None and isinstance(leaf, getattr(module, "BlockMask", ())):
        raise UnsupportedGraph(
            "an example input is a BlockMask, whose mask is a Python function; expected tensors, numbers and text. Make it in the model: "
            "call create_block_mask in forward, on the tensors that the mask reads, or once where the model is built."
        )


class _Written:
    """The operator, by what is PyTorch's own.

    Raises:
        ImportError, AttributeError: if this PyTorch has it otherwise.
    """

    def __init__(self) -> None:
        # Not ``import ... as``: the package has an attribute of the module's name, which is the operator.
        written = import_module("torch._higher_order_ops.flex_attention")
        self._kind: type = type(written.flex_attention)
        self._called: Callable[..., Any] = self._kind.__call__
        self._formula: Callable[..., tuple[Tensor, ...]] = written.math_attention
        self._for_each: Callable[..., Callable[..., Tensor]] = import_module("torch.nn.attention.flex_attention")._vmap_for_bhqkv
        self._indexing: Callable[[], Any] = import_module("torch._dynamo._trace_wrapped_higher_order_op").TransformGetItemToIndex

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        own = threading.get_ident()

        def call(operator: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != own or kwargs or len(args) < 6:
                return self._called(operator, *args, **kwargs)
            return self._spelled_out(*args)

        self._kind.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            self._kind.__call__ = self._called  # type: ignore[method-assign]

    def _spelled_out(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Tensor],
        block_mask: tuple[Any, ...],
        scale: float,
        *rest: Any,
    ) -> tuple[Tensor, ...]:
        """The arguments of the operator; attention, and two statistics of the scores, which are dead code where nobody asks for them."""
        attention, *statistics = self._formula(query, key, value, score_mod, block_mask, scale, *rest)
        buffers, mask_buffers = (*rest[1:], (), ())[:2]
        if query.dtype == key.dtype == value.dtype and self._leaves_scores(score_mod, query, buffers):
            mask = self._mask(block_mask[-1], query, key, mask_buffers)
            attention = _masked_attention(query, key, value, mask, scale)
        return _laid_out_as(attention, query.stride()), *statistics

    def _leaves_scores(self, score_mod: Callable[..., Tensor], query: Tensor, buffers: tuple[Any, ...]) -> bool:
        """Whether ``score_mod`` gives back the score that it is given: the very tensor."""
        score = torch.zeros((), device=query.device)
        places = [torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(4)]
        with self._indexing():
            return score_mod(score, *places, *buffers) is score

    def _mask(self, mask_mod: Callable[..., Tensor], query: Tensor, key: Tensor, buffers: tuple[Any, ...]) -> Tensor:
        """What may be seen: booleans of the shape [batch, heads, queries, keys]."""
        sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        places = [torch.arange(size, device=query.device) for size in sizes]
        with self._indexing():
            return self._for_each(mask_mod, prefix=(), suffix=(None,) * len(buffers))(*places, *buffers)


def _masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention to what ``mask`` shows; zeros for a query that sees nothing, which not every kernel gives."""
    batch, heads = query.shape[:2]
    if (shared := heads // key.shape[1]) > 1:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    key, value = (item.expand(batch, heads, *item.shape[2:]) for item in (key, value))
    attention = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    blind = mask.logical_not().all(-1, keepdim=True)
    # Filling makes a row-major tensor.
    order = _order(attention.stride())
    return attention.permute(order).masked_fill(blind.permute(order), 0.0).permute(_inverse(order))


def _laid_out_as(attention: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``attention`` with its dimensions in memory as those of a query with ``strides`` are, but for the last one, which is innermost."""
    order = [dimension for dimension in _order(strides) if dimension != len(strides) - 1]
    order.append(len(strides) - 1)
    return attention.permute(order).contiguous().permute(_inverse(order))


def _order(strides: tuple[int, ...]) -> list[int]:
    """Dimensions, the outermost first."""
    return sorted(range(len(strides)), key=strides.__getitem__)[::-1]


def _inverse(order: list[int]) -> list[int]:
    return [order.index(dimension) for dimension in range(len(order))]
