"""PyTorch's composite operators looked up once. Private interface; where it is another one, nothing changes but the suite's time.

For each model that it decomposes, ``torch.export`` asks the dispatcher for all of them once for every namespace there is, some thousand
names two dozen times, which is a fifth of what capturing a small model takes.
"""

from __future__ import annotations

import torch


def look_up_composites_once() -> None:
    """From now on they are looked up again only where operators have come or gone."""
    import torch._export.utils as utils

    look_up = getattr(utils, "_materialize_cpp_cia_ops", None)
    if look_up is None:
        return
    known: list[object] = []

    def once() -> None:
        if _there() != known:
            look_up()
            known[:] = _there()

    utils._materialize_cpp_cia_ops = once  # type: ignore[assignment]


def _there() -> list[object]:
    """All composites that are registered, and how many operators each namespace has: one that is destroyed leaves both."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    namespaces = [(name, len(getattr(torch.ops, name)._dir)) for name in torch.ops._dir if hasattr(getattr(torch.ops, name), "_dir")]
    return [registered, namespaces]
