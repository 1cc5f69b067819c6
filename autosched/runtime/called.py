"""Which operators a model calls, and with which numbers, as a word to be compared with that of the same model after it was changed.

A setting or a part that was replaced may answer differently only for inputs that a comparison has not drawn: a limit that none of them
reaches, another activation that is the same for small numbers. What is called then differs, whatever the inputs are.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autosched.core.from_outside import let_through
from autosched.core.parts import named_tensors
from autosched.core.program import ConstantSource
from autosched.runtime.trees import output_tensors

# Of a tensor that no operator was seen to make, such as a limit that is kept in an attribute. Larger ones hold data.
_MOST_READ = 4_096
_WEIGHTS = (f"{ConstantSource.PARAMETER} ", f"{ConstantSource.BUFFER} ")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Called:
    """What a model was seen to call, by the weights that it did so with."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}

    def differs(self, model: torch.nn.Module, inputs: Sequence[torch.Tensor], answer: Callable[[], Any]) -> bool:
        """Whether ``model`` calls something else than before; what it does with other weights than ever before is noted for the next time.

        Weights tell an adapter apart that was added and is still zero: it calls more, and nothing is wrong with that.

        Args:
            answer: calls ``model`` with ``inputs``.
        """
        found = _what_is_called(model, inputs, answer)
        if found is None or self._seen.setdefault(*found) == found[1]:
            return False
        # What differs from one call to the next says nothing of a change.
        return _what_is_called(model, inputs, answer) == found


def _what_is_called(model: torch.nn.Module, inputs: Sequence[torch.Tensor], answer: Callable[[], Any]) -> tuple[str, str] | None:
    """Digests of the weights read, and of all calls of operators with their operands; ``None`` if they cannot be noted."""
    calls = _Calls(model, inputs)
    try:
        # Whatever mode the caller is in: of tensors without a gradient's history other operators are called.
        with torch.inference_mode(mode=False), torch.no_grad(), calls:
            made = answer()
        return calls.digests(output_tensors(made))
    except Exception as error:
        let_through(error)
        # Not every operator runs where calls are noted, and not every tensor has numbers to read.
        return None


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down every operator with its operands: tensors by where they come from, everything else by what it is."""

    def __init__(self, model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made = 0
        self._words = hashlib.sha256()
        self._weights: set[str] = set()
        # A name is of no use once its tensor is gone, because another may have its identity: nothing is kept alive for that.
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        for place, tensor in enumerate(inputs):
            self._call_it(tensor, f"input {place}")
        for source, tensors in named_tensors(model).items():
            for name, tensor in tensors.items():
                if self._known(tensor) is None:
                    self._call_it(tensor, f"{source} {name}")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # To tell Dynamo to leave this alone would import all of it at every load.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs or {}))
        self._note(func, tree, *map(self._name, leaves))
        out = func(*args, **(kwargs or {}))
        for place, leaf in enumerate(pytree.tree_leaves(out)):
            # What is changed in place is still what it was: the order of the calls says the rest.
            if isinstance(leaf, torch.Tensor) and not any(leaf is given for given in leaves):
                self._call_it(leaf, f"{self._made}.{place}")
        self._made += 1
        return out

    def digests(self, answer: Sequence[torch.Tensor]) -> tuple[str, str]:
        """Of the weights read so far, and of all calls, and which results are returned."""
        self._note(*map(self._name, answer))
        return hashlib.sha256("\n".join(sorted(self._weights)).encode()).hexdigest(), self._words.hexdigest()

    def _note(self, *words: object) -> None:
        self._words.update(_ADDRESS.sub("", "\t".join(map(str, words)) + "\n").encode())

    def _call_it(self, tensor: torch.Tensor, name: str) -> None:
        self._names[id(tensor)] = weakref.ref(tensor), name

    def _known(self, tensor: torch.Tensor) -> str | None:
        found = self._names.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def _name(self, item: Any) -> str:
        if not isinstance(item, torch.Tensor):
            return f"{type(item).__name__} {item!r}"
        name = self._known(item) or _contents(item)
        if name.startswith(_WEIGHTS):
            self._weights.add(name)
        return name


def _contents(tensor: torch.Tensor) -> str:
    said = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.numel() > _MOST_READ:
        return said
    # A tensor that stands for none, of another device say, has no numbers to read.
    return said if tensor.is_meta else f"{said} {tensor.tolist()!r}"
