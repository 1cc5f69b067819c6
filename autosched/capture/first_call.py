"""What a model makes at its first call and keeps: tables in its buffers, and numbers in attributes that say how far they are filled.

Or weights, which it scales once (RWKV). Traced as it came, such a model would write its tables at each call, and scale again. And whoever
gives it back its buffers after a call, and not the numbers, leaves it with tables that it takes for filled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.utils._pytree import tree_map

from autosched.core.attribute_reach import END, OF_EVERY_MODULE, is_literal, put_item
from autosched.core.extents import storage_address


@dataclass(frozen=True)
class Changes:
    """What one call has changed in a model.

    Args:
        numbers: the attributes of modules that it has set to another number or text: whose, which, what was there (or ``END``), what is.
        tables: what it has written to in buffers and parameters, as views of them, with copies of what was there and of what is.
        others: whether it has changed anything else.
    """

    numbers: tuple[tuple[dict[str, Any], str, object, object], ...] = ()
    tables: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...] = ()
    others: bool = False

    @property
    def are_of_a_first_call(self) -> bool:
        """Whether they may be: tables, with numbers that say so, and nothing else."""
        return bool(self.numbers and self.tables) and not self.others

    def same(self, other: Changes) -> bool:
        """Whether ``other``, of a call that began where this one did, has left the same."""
        numbers, others = ([(id(table), key, now) for table, key, _, now in each.numbers] for each in (self, other))
        return (
            self.others == other.others
            and numbers == others
            and len(self.tables) == len(other.tables)
            and all(_equal(one, another) for (_, _, one), (_, _, another) in zip(self.tables, other.tables, strict=True))
        )

    def put(self) -> None:
        """Leave the model as the call has left it."""
        for table, key, _, now in self.numbers:
            put_item(table, key, now)
        for place, _, now_there in self.tables:
            place.copy_(now_there)

    def take_back(self) -> None:
        """Leave the model as it was before the call."""
        for table, key, before, _ in self.numbers:
            put_item(table, key, before)
        for place, there_before, _ in reversed(self.tables):
            place.copy_(there_before)


class Before:
    """A model before a call."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = list(model.modules())
        self._attributes = [_attributes(module) for module in self._modules]
        self._buffers = [dict(module._buffers) for module in self._modules]
        kept = [*model.buffers(), *model.parameters()]
        self._storages = {storage_address(item) for item in kept if _is_dense(item)} - {0}

    def changes(self, written: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Changes:
        """What has been changed since.

        Args:
            written: views of what calls have written to, each with a copy of what was there.
        """
        numbers, others = [], False
        for module, before, buffers in zip(self._modules, self._attributes, self._buffers, strict=True):
            now = _attributes(module)
            for key in before.keys() | now.keys():
                was, is_now = before.get(key, END), now.get(key, END)
                if was is is_now:
                    continue
                if is_now is END or not is_literal(is_now) or not (was is END or is_literal(was)):
                    others = True
                elif type(was) is not type(is_now) or was != is_now:
                    numbers.append((vars(module), key, was, is_now))
            there = dict(module._buffers)
            others = others or there.keys() != buffers.keys() or any(there[key] is not item for key, item in buffers.items())
        if others or not numbers:
            return Changes(tuple(numbers), (), others)
        changed = [(place, before) for place, before in written if not _equal(place, before)]
        if any(not _is_dense(place) or 0 in place.stride() or storage_address(place) not in self._storages for place, _ in changed):
            return Changes(tuple(numbers), (), True)
        return Changes(tuple(numbers), tuple((place, before, place.clone()) for place, before in changed))


def with_other_values(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call of the same form; each number in it is one that was there, in another place, and those with a point are smaller, too."""

    def other(leaf: Any) -> Any:
        if type(leaf) is not torch.Tensor or not _is_dense(leaf) or leaf.dtype is torch.bool:
            return leaf
        rolled = leaf.detach().flatten().roll(1).view(leaf.shape)
        return rolled * 0.75 if leaf.is_floating_point() or leaf.is_complex() else rolled

    found: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(other, (args, dict(kwargs)))
    return found


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in OF_EVERY_MODULE}


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _is_dense(item: object) -> TypeGuard[torch.Tensor]:
    return isinstance(item, torch.Tensor) and item.layout is torch.strided
