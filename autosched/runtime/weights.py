"""Noticing that a model is no longer the one a schedule was bound to: changed or replaced weights, modules, modes, hooks.

Everything is read at every call, so every reading is one pass of C code over flat lists.
"""

from __future__ import annotations

import enum
from operator import attrgetter, getitem
from typing import Any

import torch

from autosched.core.program import ConstantSource, Program

_version_of = attrgetter("_version")
_training_of = attrgetter("training")
_address_of = torch.Tensor.data_ptr


class Change(enum.StrEnum):
    """What happened to the model since the last look, the gravest first."""

    MODE = "mode"  # a module went into or out of training mode
    HOOKS = "hooks"  # forward hooks were added or removed
    STRUCTURE = "structure"  # a module, parameter or buffer was replaced, added or removed
    MOVED = "moved"  # a parameter has other memory
    CONTENT = "content"  # a parameter was changed in place
    NONE = "none"


class ModelWatch:
    """Compares a model with how it was when this was made; memory and contents of weights, with the last :meth:`accept`.

    In-place changes are seen through ``Tensor._version``. Not seen, because PyTorch counts it nowhere, is an in-place change through
    ``parameter.data``; whoever does that calls ``refresh`` on the loaded model.

    Args:
        model: the module that was tuned.
        program: what was captured from it; its bindings say which tensors matter.

    Raises:
        UnwatchableModel: if a parameter carries no version counter (it was made under ``torch.inference_mode``).
    """

    def __init__(self, model: torch.nn.Module, program: Program) -> None:
        self._modules = list(model.modules())
        self._training = list(map(_training_of, self._modules))
        self._hooks: list[dict[Any, Any]] = [
            hooks for module in self._modules for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._hook_count = sum(map(len, self._hooks))
        self._children = [module._modules for module in self._modules]
        self._child_count = sum(map(len, self._children))
        self._tables: list[dict[str, Any]] = [children for children in self._children for _ in children]
        self._keys = [name for children in self._children for name in children]
        self._tensors: list[torch.Tensor] = []
        for binding in program.bindings:
            if binding.source is ConstantSource.LITERAL:
                continue
            owner_name, _, key = binding.name.rpartition(".")
            owner = model.get_submodule(owner_name)
            table: dict[str, Any] = owner._parameters if binding.source is ConstantSource.PARAMETER else owner._buffers
            self._tables.append(table)
            self._keys.append(key)
            self._tensors.append(table[key])
        if any(tensor.is_inference() for tensor in self._tensors):
            raise UnwatchableModel(
                "its parameters were made under torch.inference_mode, so changes to them could not be noticed; make them outside of it"
            )
        self._identities = list(map(id, map(getitem, self._tables, self._keys)))
        self.accept()

    def accept(self) -> None:
        """Take the contents of all parameters, and where they are, for what the schedule is bound to."""
        self._addresses = list(map(_address_of, self._tensors))
        self._versions = list(map(_version_of, self._tensors))

    def change(self) -> Change:
        """The gravest change."""
        if list(map(_training_of, self._modules)) != self._training:
            return Change.MODE
        if sum(map(len, self._hooks)) != self._hook_count:
            return Change.HOOKS
        try:
            identities = list(map(id, map(getitem, self._tables, self._keys)))
        except KeyError:
            return Change.STRUCTURE
        if identities != self._identities or sum(map(len, self._children)) != self._child_count:
            return Change.STRUCTURE
        if list(map(_address_of, self._tensors)) != self._addresses:
            return Change.MOVED
        if list(map(_version_of, self._tensors)) != self._versions:
            return Change.CONTENT
        return Change.NONE


class UnwatchableModel(Exception):
    """A model whose weights could change unseen; the loader keeps the model as it came."""
