"""Modules in whose place a schedule is (``module.forward = loaded``), run as they came for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def as_they_came(model: torch.nn.Module) -> Iterator[None]:
    """Calls of ``model`` in this thread run it, and every part of it, without the schedules that are in their places.

    What is captured, compared or measured is the model itself, and a server that loads a newer file goes on with the older one meanwhile.
    """
    with ExitStack() as stack:
        for module in model.modules():
            forward = vars(module).get("forward")
            stand_aside = getattr(type(forward), "standing_aside", None)
            if stand_aside is not None:
                stack.enter_context(stand_aside(forward))
        yield
