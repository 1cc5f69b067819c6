"""Steps of optimizers. Fused ones (``AdamW(..., fused=True)``) and those of other packages change parameters without PyTorch's counting it.

A hook that every optimizer of the process calls after a step is all there is to notice them by. It says which parameters were stepped,
and raises no count of PyTorch's: that would be an error in somebody's backward pass that runs without autosched.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class OptimizerSteps:
    """Whether an optimizer has made a step on any of some parameters since ``taken`` was last set to ``False``.

    Args:
        parameters: whoever makes this keeps them alive.
    """

    __slots__ = ("__weakref__", "_identities", "taken")

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._identities = frozenset(map(id, parameters))
        self.taken = False
        _listen()
        _listening[id(self)] = self

    def notice(self, stepped: frozenset[int]) -> None:
        """An optimizer has made a step on parameters of these identities."""
        if not self._identities.isdisjoint(stepped):
            self.taken = True


_listening: weakref.WeakValueDictionary[int, OptimizerSteps] = weakref.WeakValueDictionary()


@lru_cache(maxsize=1)
def _listen() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # One copy of the list at once: other threads may load and drop models meanwhile.
    found = [steps for reference in _listening.valuerefs() if (steps := reference()) is not None]
    if found:
        stepped = frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        for steps in found:
            steps.notice(stepped)
