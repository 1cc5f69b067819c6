"""How much memory a bound plan takes beside the model's own weights, from what its graph says."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable

import torch

from autosched.core.extents import storage_of
from autosched.core.graph import OpGraph, ValueRole
from autosched.runtime.plan import Plan


def peak_live_bytes(graph: OpGraph, plan: Plan, elsewhere: Container[int] = ()) -> int:
    """Most bytes of intermediates (outputs included) alive at once, when ``plan`` is followed in launch order.

    Args:
        elsewhere: storages that lie in the memory of inputs (``in_place.homes_of``).
    """
    alive: set[int] = set()
    now = peak = 0
    for step in plan.steps:
        for value in graph.operators[step.operator].writes:
            owner = graph.values[graph.values[value].storage]
            if owner.role in (ValueRole.INTERMEDIATE, ValueRole.INTERNAL) and owner.index not in alive and owner.index not in elsewhere:
                alive.add(owner.index)
                now += owner.spec.bytes
        peak = max(peak, now)
        for value in step.frees:
            storage = graph.values[value].storage
            if storage in alive:
                alive.remove(storage)
                now -= graph.values[storage].spec.bytes
    return peak


def unshared_bytes(held: Iterable[object], given: Iterable[torch.Tensor]) -> dict[Hashable, int]:
    """Bytes of each tensor in ``held`` whose memory is not that of a tensor in ``given``, by that memory: weights packed or folded."""
    known = {storage_of(tensor) for tensor in given}
    found: dict[Hashable, int] = {}
    for tensor in held:
        if isinstance(tensor, torch.Tensor) and (home := storage_of(tensor)) not in known:
            found.setdefault(home, tensor.numel() * tensor.element_size())
    return found
