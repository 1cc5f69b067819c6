"""Noticing that a model is no longer the one a schedule was bound to: changed or replaced weights, modules, modes, hooks.

Everything is read at every call, so every reading is one pass of C code over flat lists. A large model leaves nothing of this in the
processor's caches, and then what counts is how many places in memory are read: of a dictionary that nobody wrote to, one. Where native
lanes were built, one call tells that nothing was changed (``native.watch``), and only after something was is any of this looked at.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import torch

from autosched.core.parts import parts_of, whole_of
from autosched.core.program import Binding, ConstantSource, Program
from autosched.core.variants import WHOLE
from autosched.runtime.attribute_contents import Harmless, places_of, version_of
from autosched.runtime.dict_counts import DictCounts
from autosched.runtime.memory_words import MemoryWords
from autosched.runtime.module_attributes import Entries, Entry, Hooks, Items, Modes, Settings
from autosched.runtime.native.watch import NativeWatch, Watched, can_watch, native_watch
from autosched.runtime.optimizer_steps import OptimizerSteps
from autosched.runtime.reads import NO_VALUE
from autosched.runtime.state import holders_of


class Change(enum.StrEnum):
    """What happened to the model since the last look, the gravest first."""

    MODE = "mode"  # a module went into or out of training mode
    HOOKS = "hooks"  # forward hooks were added or removed
    STRUCTURE = "structure"  # a module, parameter, buffer or setting was replaced, added, removed or laid out otherwise
    MOVED = "moved"  # a parameter has other memory
    CONTENT = "content"  # a parameter was changed in place
    NONE = "none"


class ModelWatch:
    """Compares a model with how it was when this was made; memory and contents of weights, with the last :meth:`accept`.

    In-place changes are seen through ``Tensor._version``, and steps of optimizers by themselves. What PyTorch counts nowhere (written
    through ``parameter.data``, NumPy, a collective of ``torch.distributed``, another process) is of consequence only for weights that
    something was computed from ahead; on a CPU it is seen in a word or two of the memory of each (``memory_words``), and on a GPU not.
    Nor are changes of a class's methods, of long lists and large dictionaries, and of what is deeper in these than ``attribute_reach``
    says. Whoever makes one calls ``refresh`` on the loaded model.

    Args:
        model: the module that was tuned.
        program: what was captured from it; its bindings say which tensors matter.
        beside: others that the model reads and the program does not (``runtime.reads``). Whatever happens to them is a change of structure:
            only a comparison with the model tells whether the program may still do without them.
        frozen: the caller vouches that modules and weights stay as they are; only modes and hooks are then looked at.
        all_words: whether uncounted writes are of consequence for every weight.
        packed: values that kernels have read ahead, and packed for themselves, beside what the program's prologue reads.

    ``reads_ahead`` is whether there are any of either.

    Raises:
        UnwatchableModel: if a parameter carries no version counter (it was made under ``torch.inference_mode``).
        IncompatibleArtifact: if the model lacks what the program changes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        program: Program,
        beside: Sequence[Binding] = (),
        *,
        frozen: bool = False,
        all_words: bool = False,
        packed: Collection[int] = (),
    ) -> None:
        self._frozen = frozen
        modules = list(model.modules())
        self._modes = Modes(modules_with_a_mode(model))
        self._hooks = Hooks(modules)
        self._harmless = Harmless()
        self._settings = Settings(modules)
        # A scripted module keeps its parts elsewhere than in dictionaries, and nobody replaces them there.
        plain = [module for module in modules if isinstance(module._modules, dict)]
        self._children = Entries([module._modules for module in plain if module._modules])
        self._childless = [module._modules for module in plain if not module._modules]
        parts: dict[int, Entry] = {id(module._modules): (module.__dict__, "_modules") for module in plain if "_modules" in module.__dict__}
        bindings = [binding for binding in program.bindings if binding.source is not ConstantSource.LITERAL]
        # What it decides by is among these, whether or not the program computes with it, too.
        beside = [*(Binding(NO_VALUE, item.source, item.name) for item in program.decided), *beside]
        places, self._tensors = _bound_to(model, [*bindings, *beside])
        self._beside = self._tensors[len(bindings) :]
        # A tied weight is bound under one of its names, and may be replaced under another.
        places += _other_names(plain, places)
        self._bound: list[Entry] = [(getattr(owner, kind), key) for owner, kind, key in places]
        # All there are: a model may well ask whether it has a bias.
        kinds = [(module, kind) for module in modules for kind in ("_parameters", "_buffers")]
        tables = {id(table): table for module, kind in kinds if isinstance(table := getattr(module, kind), dict)}
        parts |= {id(getattr(module, kind)): (module.__dict__, kind) for module, kind in kinds if kind in module.__dict__}
        self._parts = Items(parts.values())
        # A parameter may be several tensors; it is replaced as a whole.
        self._wholes = [table[key] for table, key in self._bound]
        self._devices = [tensor.device for tensor in self._tensors]
        # A sparse tensor has no one place in memory.
        self._placed = [tensor for tensor in self._tensors if tensor.layout is torch.strided]
        self._steps = OptimizerSteps(() if frozen else self._wholes)
        if not frozen and any(tensor.is_inference() for tensor in self._tensors):
            raise UnwatchableModel(
                "its parameters were made under torch.inference_mode, so changes could not be noticed; make the model outside of it, "
                "or give load() frozen=True if its weights never change"
            )
        # What calls replace is looked at by each call that reads it.
        self._state = {(id(holder.table), holder.key) for holder in holders_of(program, model)}
        self._weights = Entries([table for table in tables.values() if any((id(table), key) not in self._state for key in table)])
        self._weightless = [table for table in tables.values() if not table]
        # That one is empty is seen sooner than its count is read.
        self._empty = [*self._hooks.empty, *self._childless, *self._weightless]
        filled = (self._hooks.filled, self._children, self._weights)
        self._fixed = [*(module.__dict__ for module in modules), *chain.from_iterable(each.tables for each in filled)]
        self._count()
        # Nothing is computed ahead from what operators read otherwise, nor need one that vouches for them be told.
        ahead = {*packed, *(value for call in program.prologue for value in call.reads())}
        self.reads_ahead = bool(ahead)
        whole = all_words or any(in_its_code(program, tensor.device.type) for tensor in self._tensors)
        taken = [tensor for tensor, binding in zip(self._tensors, bindings, strict=False) if whole or binding.value in ahead]
        self._ahead = [*taken, *self._beside] if not frozen else []
        self._native: NativeWatch | None = None
        self._watchable = not self._modes.elsewhere and can_watch()
        self._calm = True
        self.accept()

    def accept(self) -> None:
        """Take the contents of all parameters, and where they are, for what the schedule is bound to."""
        self._native = None
        if self._frozen:
            return
        # Before the counts are read: what is changed meanwhile is then seen at the next call.
        self._steps.taken = False
        # Held, because an address says nothing once its memory was given back: the next parameter may get it.
        self._held = [tensor.detach() for tensor in self._tensors]
        self._places = places_of(self._placed)
        self._versions = list(map(version_of, self._tensors))
        self._words = MemoryWords(self._ahead)
        self._beside_were = self._of_beside()

    def renew(self) -> bool:
        """Call after the model ran: what it set itself in ``forward`` is what it has from now on. Whether it did set anything."""
        self._native = None
        found = self._settings.renew()
        self._count()
        return found

    def settle(self) -> None:
        """Call after it ran once more: what it sets in each ``forward`` is nothing to watch."""
        self._native = None
        self._settings.settle()
        self._count()

    def learn(self, before: ModelWatch) -> None:
        """Take over what ``before`` has learnt, and that the change of structure that it saw was of no consequence."""
        self._native = None
        self._harmless = before._harmless
        self._harmless.note(before._settings.in_vain())
        self._settings.set_by_calls |= before._settings.set_by_calls
        self._settings.leave_out(self._harmless.places())
        self._count()

    def what_changed(self) -> str:
        """The name of an attribute or a tensor that is another one, if there is such."""
        entries = zip(self._bound, self._wholes, strict=True)
        tensors = (key for (table, key), tensor in entries if _replaced(table, key, tensor))
        return next(chain(map(repr, self._settings.different()), map(repr, tensors)), "")

    def moved_to(self) -> str:
        """The device that a weight has been moved to since this was made, or nothing."""
        now: list[Any] = self._tensors
        if any(_replaced(table, key, tensor) for (table, key), tensor in zip(self._bound, self._wholes, strict=True)):
            # In their order, and the parts of a whole are where it is.
            now = [table.get(key) for table, key in self._bound[: len(now)]]
        pairs = zip(now, self._devices, strict=False)
        return next((str(tensor.device) for tensor, device in pairs if isinstance(tensor, torch.Tensor) and tensor.device != device), "")

    def _count(self) -> None:
        self._counts = DictCounts([*self._fixed, *self._settings.contents.tables])
        self._settled: int | None = None

    def change(self) -> Change:
        """The gravest change."""
        if self._native is not None and not self._steps.taken and self._native.unchanged() and not self._changed_uncounted():
            return Change.NONE
        # One that is written to between any two calls, were it only its counter of calls, costs less without.
        restless, self._native = self._native is not None, None
        # Before the look: what is written during it is then seen at the next call.
        native = native_watch(self._watched()) if self._watchable and self._calm and not restless else None
        found = self._look()
        if found is Change.STRUCTURE and not self._frozen and self._settings.took_equal_lists():
            # What was put together before the look knows nothing of the new lists.
            restless = True
            self._count()
            found = self._look()
        if found is Change.STRUCTURE and in_training(self._settings.modules[0]):
            # A part that was put in another one's place is in that mode until somebody calls eval().
            found = Change.MODE
        self._calm = found is Change.NONE and not restless
        self._native = native if self._calm else None
        return found

    def _watched(self) -> Watched:
        """All that a look looks at."""
        if self._frozen:
            return Watched(sized=self._hooks.empty, tables=[*self._modes.tables, *self._hooks.filled.tables])
        contents = self._settings.contents
        return Watched(
            objects=self._settings.modules,
            sized=[*self._empty, *contents.sized],
            tables=self._counts.tables,
            placed=[*self._placed, *contents.tensors.placed],
            counted=[*self._tensors, *contents.tensors.counted],
            lists=contents.lists,
            words=[*self._words.places, *contents.tensors.words],
        )

    def _look(self) -> Change:
        if self._frozen:
            return self._of_calls()
        # Before the look: what is written during it is then seen at the next call.
        counts = self._counts.now()
        if counts is None or counts != self._settled or self._changed_elsewhere():
            change = self._of_calls()
            if change is Change.NONE:
                change = self._of_parts()
            if change is not Change.NONE:
                return change
            self._settled = counts
        if (places := places_of(self._placed)) != self._places:
            # Code that was compiled for one layout refuses another: only a comparison tells.
            addresses = len(self._placed)
            return Change.STRUCTURE if places[addresses:] != self._places[addresses:] else self._graver(Change.MOVED)
        # The words last: where memory is another, that was said before they are read.
        if self._steps.taken or list(map(version_of, self._tensors)) != self._versions or self._words.changed():
            return self._graver(Change.CONTENT)
        return Change.NONE

    def _graver(self, change: Change) -> Change:
        """``change``, unless it is, or may be, of a tensor that the program does without."""
        if not self._beside:
            return change
        written = any(tensor is other for tensor in self._words.different() for other in self._beside)
        return Change.STRUCTURE if self._steps.taken or written or self._of_beside() != self._beside_were else change

    def _of_beside(self) -> list[object]:
        placed = [tensor for tensor in self._beside if tensor.layout is torch.strided]
        return [*places_of(placed), *map(version_of, self._beside)]

    def _changed_elsewhere(self) -> bool:
        """Whether anything was changed that is in no counted dictionary."""
        return any(self._empty) or self._settings.changed_elsewhere() or self._modes.changed_elsewhere()

    def _changed_uncounted(self) -> bool:
        """Whether anything was changed that no word in memory tells of."""
        return not self._frozen and self._settings.contents.changed_uncounted()

    def _of_calls(self) -> Change:
        """What was changed of how the model is called."""
        if self._modes.changed():
            return Change.MODE
        return Change.HOOKS if self._hooks.changed() else Change.NONE

    def _of_parts(self) -> Change:
        """Whether anything was replaced, added or removed."""
        if self._parts.changed() or self._children.changed() or any(self._childless) or any(self._weightless) or self._settings.changed():
            return Change.STRUCTURE
        if self._weights.changed():
            read = zip(self._bound, self._wholes, strict=True)
            # A bias where there was none is read from now on.
            if any(_replaced(table, key, tensor) for (table, key), tensor in read) or self._weights.other_forms(self._state):
                return Change.STRUCTURE
            # A neighbour that the program does not read.
            self._weights.accept()
        return Change.NONE


def in_its_code(program: Program, kind: str) -> bool:
    """Whether numbers of the model's may be in the very code of a program on a device of ``kind``, where no prologue tells of them.

    Inductor writes the smallest of the constants that it computes with into what it generates.
    """
    return program.lowering in WHOLE and (program.frozen or kind == "cpu")


def part_in_training(model: torch.nn.Module) -> str:
    """The first module in training mode, by its name in ``model``, which itself is ``the model``; empty if there is none."""
    switched = next((module for module in modules_with_a_mode(model) if module.training), None)
    if switched is None:
        return ""
    return next(name for name, module in model.named_modules() if module is switched) or "the model"


def modules_with_a_mode(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Modules that ``train()`` and ``eval()`` switch, each once.

    A program of ``torch.export`` is left out: it has the mode it was exported in, whatever its flags say, and answers both with an error.
    """
    seen: set[torch.nn.Module] = set()
    pending = [model]
    while pending:
        module = pending.pop()
        if module in seen or "train" in module.__dict__:
            continue
        seen.add(module)
        yield module
        pending += module.children()


def in_training(model: torch.nn.Module) -> bool:
    """Whether any of them is in training mode."""
    return any(module.training for module in modules_with_a_mode(model))


_Kept = tuple[torch.nn.Module, str, str]
"""A module, which of its dictionaries of tensors, and a key there."""


def _bound_to(model: torch.nn.Module, bindings: Iterable[Binding]) -> tuple[list[_Kept], list[torch.Tensor]]:
    """Where ``bindings`` are kept in ``model``, and the tensors that they mean: of some parameters, a part."""
    # Most modules own several tensors, and to find one by its name walks the whole way to it.
    owner_of = lru_cache(maxsize=None)(model.get_submodule)
    kept: list[_Kept] = []
    tensors: list[torch.Tensor] = []
    for binding in bindings:
        name, part = _whole_here(binding.name, owner_of)
        owner_name, _, key = name.rpartition(".")
        kind = "_parameters" if binding.source is ConstantSource.PARAMETER else "_buffers"
        try:
            owner = owner_of(owner_name)
            whole = getattr(owner, kind)[key]
            tensors.append(whole if part is None else parts_of(whole)[part])
        except (AttributeError, IndexError, KeyError):
            whole = None
        if whole is None:
            raise UnwatchableModel(f"it has no {kind[1:-1]} {binding.name!r} now, which the schedule reads") from None
        kept.append((owner, kind, key))
    return kept, tensors


def _other_names(modules: Iterable[torch.nn.Module], kept: Sequence[_Kept]) -> list[_Kept]:
    """Where else in ``modules`` the same tensors are."""
    names = {(id(owner), kind, key) for owner, kind, key in kept}
    tensors = {id(getattr(owner, kind)[key]) for owner, kind, key in kept}
    return [
        (module, kind, key)
        for module in modules
        for kind in ("_parameters", "_buffers")
        if isinstance(table := getattr(module, kind), dict)
        for key, tensor in table.items()
        if id(tensor) in tensors and (id(module), kind, key) not in names
    ]


def _whole_here(name: str, owner_of: Callable[[str], torch.nn.Module]) -> tuple[str, int | None]:
    """The parameter of the model that ``name`` stands for, and which part of it that is; None: all of it."""
    if (found := whole_of(name)) is None:
        return name, None
    try:
        # A parametrisation of the user's own has the names that export makes up.
        owner_of(name.rpartition(".")[0])
    except AttributeError:
        return found
    return name, None


def _replaced(table: dict[str, Any], key: str, tensor: torch.Tensor) -> bool:
    return isinstance(table, dict) and table.get(key) is not tensor


class UnwatchableModel(Exception):
    """A model whose weights could change unseen; the loader keeps the model as it came."""
