"""The step of decoding of ``decoder`` with the weights of its products in eight bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autosched.zoo_models.decoder import make_decoder


class EightBitLinear(nn.Module):
    """A linear layer with its weight in eight bits and a scale for each output, as quantizing weights alone leaves it.

    Both are buffers: ``weight`` int8 ``[outputs, inputs]``, ``scale`` ``[outputs]``.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.bias = layer.bias
        scale = layer.weight.detach().abs().amax(1) / 127.0
        self.register_buffer("weight", torch.round(layer.weight.detach() / scale[:, None]).to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: ``[.., inputs]``, to ``[.., outputs]``."""
        made = nn.functional.linear(x, self.weight.to(x.dtype)) * self.scale
        return made if self.bias is None else made + self.bias


def to_eight_bits(model: nn.Module) -> None:
    """Put an :class:`EightBitLinear` in the place of each linear layer of ``model``."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, EightBitLinear(child))


def make_decoder_int8(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its example inputs."""
    model, inputs = make_decoder(batch)
    to_eight_bits(model)
    return model, inputs
