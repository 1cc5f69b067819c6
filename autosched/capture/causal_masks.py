"""Masks of PyTorch's ``TransformerEncoder`` and ``TransformerDecoder``, whose numbers export must not look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Kind: (name of the hint that the mask is the causal one, place of that argument).
_HINTS: dict[type[torch.nn.Module], tuple[str, int]] = {
    torch.nn.TransformerEncoder: ("is_causal", 3),
    torch.nn.TransformerDecoder: ("tgt_is_causal", 6),
}


@contextmanager
def masks_taken_as_given(model: torch.nn.Module) -> Iterator[None]:
    """While the model is exported: these modules do not compare the mask that they are given with the causal one.

    They do so unless told what it is, and choose a faster kernel by the answer, which export cannot know. ``False`` is right for any
    mask: attention then reads the mask itself.
    """

    def tell(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        for kind, (hint, place) in _HINTS.items():
            # A subclass may call its arguments otherwise.
            if getattr(module.forward, "__func__", None) is kind.forward and kwargs.get(hint) is None:
                if len(args) <= place:
                    return args, {**kwargs, hint: False}
                if args[place] is None:
                    return (*args[:place], False, *args[place + 1 :]), kwargs
        return None

    hooks = [module.register_forward_pre_hook(tell, with_kwargs=True) for module in model.modules() if isinstance(module, tuple(_HINTS))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
