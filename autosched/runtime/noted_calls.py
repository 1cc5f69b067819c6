"""Every operator that a model calls, noted in words that another run of the same operators on the same operands gives, too."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class NotedCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator with its operands: tensors by where they come from, everything else by what it is."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made = 0
        # A name is of no use once its tensor is gone, because another may have its identity: nothing is kept alive for that.
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # To tell Dynamo to leave this alone would import all of it at every load.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs or {}))
        self._note(func, tree, [self.name(leaf) for leaf in leaves])
        out = func(*args, **(kwargs or {}))
        for place, leaf in enumerate(pytree.tree_leaves(out)):
            # What is changed in place is still what it was: the order of the calls says the rest.
            if isinstance(leaf, torch.Tensor) and not any(leaf is given for given in leaves):
                self._call_it(leaf, f"{self._made}.{place}")
        self._made += 1
        return out

    def name(self, item: Any) -> object:
        """What stands for ``item``."""
        if not isinstance(item, torch.Tensor):
            return f"{type(item).__name__} {item!r}"
        return self._known(item) or self._name_unknown(item)

    @abstractmethod
    def _note(self, func: object, tree: object, operands: Sequence[object]) -> None:
        """Take down one call: the operator, the form of its arguments, and what stands for each."""

    @abstractmethod
    def _name_unknown(self, tensor: torch.Tensor) -> object:
        """What stands for a tensor that comes from nowhere that was seen."""

    def _call_it(self, tensor: torch.Tensor, name: str) -> None:
        self._names[id(tensor)] = weakref.ref(tensor), name

    def _known(self, tensor: torch.Tensor) -> str | None:
        found = self._names.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None
