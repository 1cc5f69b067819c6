"""What a traced call leaves in a model's attributes and buffers (``self.anchors = new``, ``self.seen.append(x)``), taken out again.

A tracer's tensors have no values: a model that keeps one for its next call, as detectors keep their anchors, fails in that call.
``torch.export`` gives attributes back what they held, though a copy of every container, and leaves those that were not there before, and
buffers that were ``None``.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch

from autosched.core.attribute_reach import OF_EVERY_MODULE, hooks_of, reach

_GONE = object()


@contextmanager
def attributes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Attributes, parameters, buffers and hooks of ``model`` and its parts, and what attributes and hooks hold, as far as :func:`reach`
    goes, are afterwards as now. Hooks that were removed stay so."""
    modules = list(model.modules())
    known = {id(module) for module in modules}
    back: dict[int, Callable[[], None]] = {}
    for module in modules:
        attributes = {key: value for key, value in vars(module).items() if key not in OF_EVERY_MODULE}
        reached = reach([*attributes.values(), *hooks_of(module)], known=known)
        uncounted = [each.owner for each in reached.uncounted if isinstance(each.owner, set | deque)]
        tensors = [table for table in (module._parameters, module._buffers) if isinstance(table, dict)]
        for held in (*reached.dictionaries, *reached.lists, *uncounted, *tensors):
            back.setdefault(id(held), _restoring(held))
        back[id(module)] = _restoring_attributes(vars(module), attributes)
        # A model that adds hooks in its first call, and notes that it has, would add them again. Those of lazy modules go for good.
        for table in (table for key, table in vars(module).items() if key in OF_EVERY_MODULE and "_hooks" in key):
            back[id(table)] = _removing_added(table)
    try:
        yield
    finally:
        for restore in back.values():
            restore()


def _restoring_attributes(table: dict[str, Any], began: dict[str, Any]) -> Callable[[], None]:
    def restore() -> None:
        for key in [key for key in table if key not in began and key not in OF_EVERY_MODULE]:
            del table[key]
        # Only what differs: whoever counts writes to this need not be told of none.
        table.update({key: value for key, value in began.items() if table.get(key, _GONE) is not value})

    return restore


def _removing_added(table: dict[int, Any]) -> Callable[[], None]:
    began = set(table)

    def restore() -> None:
        for key in table.keys() - began:
            del table[key]

    return restore


def _restoring(held: Any) -> Callable[[], None]:
    """Whatever the class of ``held`` adds to a container is not asked: it might refuse, or do more."""
    kind: Any = next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(held, kind))
    began = list(kind.items(held) if issubclass(kind, dict) else kind.__iter__(held))

    def restore() -> None:
        now = list(kind.items(held) if issubclass(kind, dict) else kind.__iter__(held))
        if len(now) == len(began) and all(map(_same, now, began) if issubclass(kind, dict) else map(is_, now, began)):
            return
        kind.clear(held)
        (kind.extend if issubclass(kind, list | deque) else kind.update)(held, began)

    return restore


def _same(item: tuple[object, object], other: tuple[object, object]) -> bool:
    return item[0] is other[0] and item[1] is other[1]
