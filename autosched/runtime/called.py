"""Which operators a model calls, and with which numbers, as a word to be compared with that of the same model after it was changed.

A setting or a part that was replaced may answer differently only for inputs that a comparison has not drawn: a limit that none of them
reaches, another activation that is the same for small numbers. What is called then differs, whatever the inputs are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autosched.core.from_outside import let_through
from autosched.core.parts import named_tensors
from autosched.core.program import ConstantSource
from autosched.runtime.noted_calls import NotedCalls
from autosched.runtime.thread_state import inference_mode
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
        with inference_mode(False), torch.no_grad(), calls:
            made = answer()
        return calls.digests(output_tensors(made))
    except Exception as error:
        let_through(error)
        # Not every operator runs where calls are noted, and not every tensor has numbers to read.
        return None


class _Calls(NotedCalls):  # type: ignore[no-untyped-call]
    """Digests of what is called; a tensor that comes from nowhere that was seen is noted by its contents."""

    def __init__(self, model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._words = hashlib.sha256()
        self._weights: set[str] = set()
        for place, tensor in enumerate(inputs):
            self._call_it(tensor, f"input {place}")
        for source, tensors in named_tensors(model).items():
            for name, tensor in tensors.items():
                if self._known(tensor) is None:
                    self._call_it(tensor, f"{source} {name}")

    def digests(self, answer: Sequence[torch.Tensor]) -> tuple[str, str]:
        """Of the weights read so far, and of all calls, and which results are returned."""
        self._add(*map(self.name, answer))
        return hashlib.sha256("\n".join(sorted(self._weights)).encode()).hexdigest(), self._words.hexdigest()

    def name(self, item: Any) -> object:
        """As the base has it; weights are remembered."""
        name = super().name(item)
        if isinstance(item, torch.Tensor) and str(name).startswith(_WEIGHTS):
            self._weights.add(str(name))
        return name

    def _note(self, func: object, tree: object, operands: Sequence[object]) -> None:
        self._add(func, tree, *operands)

    def _add(self, *words: object) -> None:
        self._words.update(_ADDRESS.sub("", "\t".join(map(str, words)) + "\n").encode())

    def _name_unknown(self, tensor: torch.Tensor) -> object:
        return _contents(tensor)


def _contents(tensor: torch.Tensor) -> str:
    said = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.numel() > _MOST_READ:
        return said
    # A tensor that stands for none, of another device say, has no numbers to read.
    return said if tensor.is_meta else f"{said} {tensor.tolist()!r}"
