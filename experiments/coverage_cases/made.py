"""What a case of the coverage sweep builds, and how a model with fresh weights is given weights that matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Made:
    """A model and one call of it.

    Args:
        training: leave the model in training mode.
        lively: give parameters that are all alike values that differ.
        custom_operators: namespaces that are trusted.
    """

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    training: bool = False
    lively: bool = True
    custom_operators: tuple[str, ...] = ()


Build = Callable[[], Made]


def enliven(model: torch.nn.Module) -> None:
    """Noise on every parameter whose elements are all equal, and statistics as after training.

    Layer scales, zero-initialised gates and position tables would otherwise hide what follows them.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            plain = parameter.layout is torch.strided and parameter.is_floating_point() and parameter.numel() > 1
            if plain and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for module in model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                module.running_mean.normal_(std=0.1)
                if module.running_var is not None:
                    module.running_var.uniform_(0.5, 1.5)
