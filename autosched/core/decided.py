"""What of its own a model decides by which operators run (``if self.inited:``): its numbers must be those of tuning."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from autosched.core.parts import named_tensors
from autosched.core.program import Decision

# More are data, and to read them takes long.
_MOST = 2**16


def can_decide(tensor: torch.Tensor) -> bool:
    """Whether it has numbers that can be read as they are in memory, and not too many of them."""
    # A buffer may be of a class of its own, which is a tensor's in all else.
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    dense = plain and tensor.layout is torch.strided and not tensor.is_nested
    return dense and not tensor.is_meta and not tensor.is_quantized and tensor.numel() <= _MOST


def digest_of(tensor: torch.Tensor) -> str:
    """Dtype, shape and numbers as one word; ``tensor`` is one that :func:`can_decide`."""
    numbers = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    found = hashlib.sha256(f"{numbers.dtype} {tuple(numbers.shape)} ".encode())
    found.update(bytes(numbers.reshape(-1).view(torch.uint8).tolist()))
    return found.hexdigest()


def decided_otherwise(decided: Sequence[Decision], model: torch.nn.Module) -> list[str]:
    """In which of ``decided`` this model is not the one that a program was captured from: a line for each."""
    if not decided:
        return []
    own = named_tensors(model)
    return [line for item in decided if (line := _difference(item, own[item.source].get(item.name)))]


def _difference(item: Decision, tensor: torch.Tensor | None) -> str:
    what = f"{item.source} {item.name}, by which the model decides what runs:"
    if tensor is None:
        return f"{what} absent here"
    same = can_decide(tensor) and digest_of(tensor) == item.digest
    return "" if same else f"{what} other numbers here than in tuning; give it those before load(), or tune again"
