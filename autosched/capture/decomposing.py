"""PyTorch's ``run_decompositions``, which asks about the composite operators of one graph instead of about all that there are.

What it keeps whole has other kernels while it traces: it puts them in place, and away again, for each of five hundred operators, and looks
up all of them before. With a small model that takes longer than all else. Private interface, the same in PyTorch 2.11 to 2.15:
``exported_program._collect_all_valid_cia_ops``; without it nothing changes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram, exported_program

from autosched.core.forks import RenewedLock

_COLLECT = "_collect_all_valid_cia_ops"
_patching = RenewedLock()


def decompose(exported: ExportedProgram, table: dict[OpOverload[..., Any], Any]) -> ExportedProgram:
    """``exported.run_decompositions(table)``: functional, every composite whole that has no entry in ``table``."""
    # What an entry's operators are made of is in no graph yet.
    with contextlib.nullcontext() if table else _only_those_of(exported):
        decomposed: ExportedProgram = exported.run_decompositions(table)
    return decomposed


@contextlib.contextmanager
def _only_those_of(exported: ExportedProgram) -> Iterator[None]:
    """Within the block, in this thread, there are no composites but those that a graph of ``exported`` calls."""
    preservable = _preservable()
    if preservable is None:
        yield
        return
    graphs = [module.graph for module in exported.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    called = {node.target for graph in graphs for node in graph.nodes if isinstance(node.target, OpOverload)}
    found = {target for target in called if preservable(target)}
    thread = threading.get_ident()
    with _patching.lock:
        everything: Callable[[], set[Any]] = getattr(exported_program, _COLLECT)
        # The caller takes from the set.
        setattr(exported_program, _COLLECT, lambda: set(found) if threading.get_ident() == thread else everything())
        try:
            yield
        finally:
            setattr(exported_program, _COLLECT, everything)


def _preservable() -> Callable[[OpOverload[..., Any]], bool] | None:
    """What tells the operators that can be kept whole, where the interface is the one known here."""
    try:
        from torch._export.utils import _is_preservable_cia_op
    except ImportError:
        return None
    if not hasattr(exported_program, _COLLECT):
        return None
    known: Callable[[OpOverload[..., Any]], bool] = _is_preservable_cia_op
    return known
