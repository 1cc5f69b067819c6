"""Tensors that a call leaves in attributes of a model that are no buffers: another form of call may read them, and a schedule leaves none.

Buffers that a call leaves are ``state.OtherBuffers``' to notice, and are given back here with the others.

One that is the same after every call (a mask, the anchors of a detector) is no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autosched.core.attribute_reach import END, OF_EVERY_MODULE, is_literal, put_item, reach
from autosched.runtime.module_attributes import settings_of
from autosched.runtime.state import version_of

_MOST_NAMED = 16
_Held = tuple[torch.Tensor, int]
"""A tensor, and how often it was changed in place."""


class AttributeTensors:
    """Tensors in the attributes of ``model`` and its parts, and in what those hold, as they are when this is made."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._known = frozenset(id(module) for _, module in self._modules)
        reached = reach([value for _, module in self._modules for value in _attributes(module).values()], known=self._known)
        tables = [*(vars(module) for _, module in self._modules), *reached.dictionaries]
        self._tables = [(table, dict(dict.items(table))) for table in tables]
        buffers = [module._buffers for _, module in self._modules if isinstance(module._buffers, dict)]
        self._buffers = [(table, dict(table)) for table in buffers]
        self._lists = [(held, list(list.__iter__(held))) for held in reached.lists]
        self._began = self._now()
        self._left: dict[str, list[torch.Tensor]] = {}

    def note(self) -> None:
        """A call has been made."""
        now = self._now()
        self._noted = now
        changed = [name for name, held in now.items() if not _same(held, self._began.get(name, []))]
        self._left = {name: [tensor.detach().clone() for tensor, _ in now[name]] for name in changed}

    def state(self) -> str:
        """After another call with other inputs: which attributes both have changed, and not to the same, as text; or nothing."""
        now = self._now()
        names = []
        for name, left in self._left.items():
            held = now.get(name, [])
            if not _same(held, self._noted[name]) and not _equal([tensor for tensor, _ in held], left):
                names.append(repr(name))
        # All at once: a model that notes what it computes, to be looked at later, may leave a dozen.
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return f"attribute{'s' if len(names) > 1 else ''} {', '.join(names[:_MOST_NAMED])}{more}" if names else ""

    def give_back(self, *, numbers: bool = False) -> None:
        """Put every tensor, and what holds some, back where it was, and take away those that were put where none was.

        Numbers and texts beside these, of the same module or dictionary, go with them: the shape that anchors were made for, with others
        than those, would be taken for theirs. What else was changed is left as it is, and buffers in the place of others, too: another
        thread may have loaded them.

        Args:
            numbers: give back those of all modules.
        """
        for table, began in self._tables:
            keys = began.keys() | dict(dict.items(table)).keys()
            given = [_give_back(table, key, began.get(key, END)) for key in keys]
            if numbers or any(given):
                # Its mode may be changed by whoever has the model.
                for key in keys - OF_EVERY_MODULE:
                    _give_back_number(table, key, began.get(key, END))
        for table, began in self._buffers:
            for key in [key for key in table if not isinstance(began.get(key), torch.Tensor)]:
                _give_back(table, key, began.get(key, END))
        for held, items in self._lists:
            now = list(list.__iter__(held))
            if any(isinstance(item, torch.Tensor) for item in (*now, *items)):
                list.__setitem__(held, slice(None), items)

    def _now(self) -> dict[str, list[_Held]]:
        found: dict[str, list[_Held]] = {}
        # Parts of a model most often share one configuration.
        known = set(self._known)
        for path, module in self._modules:
            for key, value in _attributes(module).items():
                if tensors := reach([value], known=known).tensors:
                    found[f"{path}.{key}".lstrip(".")] = [(tensor, version_of(tensor)) for tensor in tensors]
                if not isinstance(value, torch.Tensor):
                    known.add(id(value))
        return found


@contextmanager
def tensors_kept(model: torch.nn.Module) -> Iterator[None]:
    """Tensors in attributes and buffers of ``model``, and numbers in its attributes, are afterwards what they are now, as
    :meth:`AttributeTensors.give_back` says."""
    began = AttributeTensors(model)
    try:
        yield
    finally:
        began.give_back(numbers=True)


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    plain = (type(None), bool, int, float, str)
    return {key: value for key in settings_of(module) if type(value := vars(module)[key]) not in plain}


def _give_back(table: dict[str, Any], key: str, was: object) -> bool:
    """What was at ``key``, if that or what is there now is or holds a tensor; whether it was another."""
    now = dict.get(table, key, END)
    if was is now or not (_holds_tensors(was) or _holds_tensors(now)):
        return False
    put_item(table, key, was)
    return True


def _give_back_number(table: dict[str, Any], key: str, was: object) -> None:
    now = dict.get(table, key, END)
    if was is not now and all(value is END or is_literal(value) for value in (was, now)):
        put_item(table, key, was)


def _holds_tensors(value: object) -> bool:
    # Functions and modules are no results of a call, and may lead anywhere.
    return isinstance(value, torch.Tensor) or (not callable(value) and bool(reach([value]).tensors))


def _same(one: list[_Held], other: list[_Held]) -> bool:
    return len(one) == len(other) and all(a is b and count == was for (a, count), (b, was) in zip(one, other, strict=True))


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(_equals, one, other))


def _equals(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.layout, one.device) != (other.shape, other.dtype, other.layout, other.device):
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    floating = one.is_floating_point() or one.is_complex()
    return bool(torch.all((one == other) | (one.isnan() & other.isnan()))) if floating else torch.equal(one, other)
