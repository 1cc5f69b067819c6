"""Which of its parameters and buffers a model reads that its schedule does without.

A layer that was put in another one's place, an adapter say, may add nothing as long as its new weights are zero: it then answers as its
schedule does, which knows nothing of those weights. They have to be watched like the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autosched.core.extents import storage_of
from autosched.core.from_outside import let_through
from autosched.core.parts import named_tensors, parts_of
from autosched.core.program import Binding, Program

T = TypeVar("T")

NO_VALUE = -1
"""The value of a binding that is no constant of the program."""


class Reads:
    """Notes what calls of ``model`` read, as far as ``program`` does without it.

    Args:
        known: what earlier calls read. Of these, ``known`` holds those that the model still has.
    """

    def __init__(self, program: Program, model: torch.nn.Module, known: Sequence[Binding] = ()) -> None:
        named = named_tensors(model)
        bound = {id(named[item.source].get(item.name)) for item in (*program.bindings, *program.state) if item.source in named}
        self._unbound: dict[int, tuple[Binding, torch.Tensor]] = {}
        for source, tensors in named.items():
            for name, tensor in tensors.items():
                # Of what consists of several tensors, these are in the list as well.
                if id(tensor) not in bound and not parts_of(tensor):
                    self._unbound.setdefault(id(tensor), (Binding(NO_VALUE, source, name), tensor))
        before = set(known)
        self.known = tuple(binding for binding, _ in self._unbound.values() if binding in before)
        self._read: set[Hashable] = set()
        self._all = False

    def during(self, answer: Callable[[], T]) -> T:
        """What ``answer`` returns, which calls the model."""
        if not self._unbound:
            return answer()
        try:
            with _Operands(self._read):
                return answer()
        except Exception as error:
            let_through(error)
            # Not every operator runs where calls are noted. Then it may have read anything.
            self._all = True
        return answer()

    def found(self) -> tuple[Binding, ...]:
        """What was read by now, or before. Changes of tensors made in inference mode nobody can tell: they are left out."""
        before = set(self.known)
        return tuple(
            binding
            for binding, tensor in self._unbound.values()
            if binding in before or ((self._all or storage_of(tensor) in self._read) and not tensor.is_inference())
        )


def storages_written(answer: Callable[[], object]) -> set[Hashable] | None:
    """The storages that operators of this thread change in place while ``answer`` calls a model; ``None`` if they cannot be noted."""
    noted = _Operands(set(), only_written=True)
    try:
        with noted:
            answer()
    except Exception as error:
        let_through(error)
        return None
    return noted.storages


class _Operands(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages that operators are given, or of these only those that they change in place."""

    def __init__(self, storages: set[Hashable], *, only_written: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = storages
        self._only_written = only_written

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # To tell Dynamo to leave this alone would import all of it.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = _written(func, args, kwargs or {}) if self._only_written else (args, kwargs or {})
        for leaf in pytree.tree_leaves(given):
            if isinstance(leaf, torch.Tensor):
                self.storages.update(map(storage_of, parts_of(leaf) or [leaf]))
        return func(*args, **(kwargs or {}))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The operands that an operator's schema says are changed."""
    arguments = func._schema.arguments
    changed = {item.name for item in arguments if item.alias_info is not None and item.alias_info.is_write}
    given = [*zip((item.name for item in arguments), args, strict=False), *kwargs.items()]
    return [value for name, value in given if name in changed]
