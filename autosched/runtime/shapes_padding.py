"""Padding a call to the next larger shape there is a schedule for, where that is shown to be right.

The rows added repeat the last one, so that whatever a model expects of its inputs (token ids in range, lengths above zero) holds of them
too. It is right if no row that is kept depends on a row that is added. Nothing promises that: a mean over the batch, or attention over a
padded sequence, breaks it. So every shape is tried before it may be padded to, with added rows of several contents, against the model's
own answer to the unpadded call. What is seen so is seen of the weights there are (one that is still zero may hide everything): after a
change of the model, padding is tried again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autosched.core.errors import IncompatibleArtifact
from autosched.core.from_outside import let_through
from autosched.core.program import Program, Ref
from autosched.core.standing_aside import all_aside
from autosched.runtime.agreement import models_answer, require_agreement
from autosched.runtime.call_form import CallReader, expected_key, leaf_key
from autosched.runtime.kernels import random_inputs
from autosched.runtime.no_memory import lacks_memory
from autosched.runtime.prepared import OPERATOR_ERRORS, Prepared
from autosched.runtime.shapes import Buckets
from autosched.runtime.slot import reading_order
from autosched.runtime.telling_inputs import telling_inputs
from autosched.runtime.unrest import Unrest
from autosched.runtime.weights import Change

_SEED = 31_337
_MAX_TRIED = 4
_FAR = 1000.0  # added rows of this size make even a faint dependence show
_UNREST = (
    "calls of other shapes are not padded now: the model was changed before each of the last ones, and to try padding again takes longer "
    "than a call; it is tried again at the first one before which it was not"
)
_CHANGED = "the call is not padded: the model was changed, by another thread, while padding was tried"
_NO_MEMORY = "the call is not padded: there was not enough memory to try whether it may be"
# Trials, one for each call, until padding ends.
_MOST_SHORT = 16


class Padding:
    """How calls are padded to a shape of ``programs``, and outputs cut.

    ``refused`` says why nothing is padded any more, and is empty while it is right.

    Args:
        programs: in the order of the bundle's shapes.
        buckets: of these programs.
        model: what they were captured from.
        label: of the bundle, for messages.
    """

    def __init__(self, programs: Sequence[Program], buckets: Buckets, model: torch.nn.Module, label: str) -> None:
        self._programs = tuple(programs)
        self._buckets = buckets
        self._model, self._label = model, label
        self.refused = ""
        # Of each shape, what the model was (``Prepared.seen``) when padding was tried, and when it was asked for, last.
        self._seen: dict[int, object] = {}
        self._asked: dict[int, object] = {}
        self._unrest = tuple(Unrest() for _ in programs)
        self._short = 0  # trials, since the last that told something, for which there was no memory
        program = self._programs[0]
        self._reader = CallReader(program.input_tree)
        self._plain = {place: expected_key(program, leaf) for place, leaf in enumerate(program.input_leaves) if not isinstance(leaf, Ref)}
        self._order = reading_order(program)

    def fit(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, list[torch.Tensor], int] | str:
        """The place of the shape to run, its padded inputs, and the size to cut outputs to; or why the call cannot be padded."""
        if self.refused:
            return self.refused
        leaves = self._reader.read(args, kwargs)
        if leaves is None or any(leaf_key(leaves[place]) != key for place, key in self._plain.items()):
            return "its containers or plain values are not those of tuning"
        tensors = [leaves[place] for place in self._order]
        size: int | None = None
        for position, (tensor, dimension) in enumerate(zip(tensors, self._buckets.inputs, strict=True)):
            spec = self._programs[0].graph.values[self._programs[0].graph.inputs[position]].spec
            if not isinstance(tensor, torch.Tensor) or tensor.dtype is not getattr(torch, spec.dtype) or tensor.dim() != len(spec.shape):
                return f"input {position} has another dtype or rank"
            if tensor.is_nested or tensor.layout is not torch.strided:
                return f"input {position} is no strided tensor"
            for axis, (given, wanted) in enumerate(zip(tensor.shape, spec.shape, strict=True)):
                if axis == dimension:
                    if size is not None and given != size:
                        return f"input {position} has {given} where another has {size}"
                    size = int(given)
                elif given != wanted:
                    return f"input {position} has size {given} in dimension {axis}; only dimension {dimension} may differ"
        if size is None or size < 1:
            return "there is no row to repeat"
        place = self._buckets.next_above(size)
        if place is None:
            return f"{size} is larger than the largest size, {max(self._buckets.sizes)}"
        return place, self._padded(tensors, size, self._buckets.sizes[place]), size

    def cut(self, outputs: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
        """Outputs without the rows that were added; dense, as a model returns them."""
        return [
            tensor if dimension is None else tensor.narrow(dimension, 0, size).clone(memory_format=torch.contiguous_format)
            for tensor, dimension in zip(outputs, self._buckets.outputs, strict=True)
        ]

    def settle(self, place: int, prepared: Prepared) -> None:
        """Verify shape ``place`` on the model as it is; if padding to it is wrong, it ends for all shapes, and :attr:`refused` says why."""
        if self.refused:
            return
        seen = prepared.seen
        try:
            with all_aside(), torch.no_grad():
                self.verify(place, prepared)
        except OPERATOR_ERRORS as error:
            let_through(error)
            # By another thread, and then the two were not asked of one model: the next call that would be padded tries again.
            if prepared.watch.change() is not Change.NONE:
                return
            # Others may have it for a moment.
            if lacks_memory(error) and self._short < _MOST_SHORT:
                self._short += 1
                return
            said = error.differences if isinstance(error, IncompatibleArtifact) else [f"padding: {type(error).__name__}: {error}"]
            self.refused = "; ".join(said)
        self._short = 0
        self._seen[place] = seen

    def barred(self, place: int, prepared: Prepared) -> str:
        """Why a call may not be padded to shape ``place``, with the model as ``prepared`` has seen it last; empty if it may."""
        unrest = self._unrest[place]
        at_rest = self._asked.get(place) is prepared.seen
        self._asked[place] = prepared.seen
        if self._seen.get(place) is prepared.seen:
            unrest.calm()
        elif not at_rest and unrest.leaves():
            return _UNREST
        else:
            self.settle(place, prepared)
        if self.refused:
            return f"calls of other shapes are not padded: {self.refused}"
        if self._seen.get(place) is prepared.seen:
            return ""
        return _NO_MEMORY if self._short else _CHANGED

    def verify(self, place: int, prepared: Prepared) -> None:
        """Show that calls may be padded to shape ``place``, by calls of several sizes and with several contents of the added rows.

        Raises:
            IncompatibleArtifact: if an output depends on the rows that were added, or the model takes no call of such a size.
        """
        program, bucket, model, label = self._programs[place], self._buckets.sizes[place], self._model, self._label
        below = max((size for size in self._buckets.sizes if size < bucket), default=0)
        sizes = sorted({below + 1, (below + bucket) // 2, bucket - 1} & set(range(below + 1, bucket)))[:_MAX_TRIED]
        for size in sizes:
            full = _drawn(program, model, _SEED + size, prepared.device)
            kept = self._narrowed(full, size)
            try:
                answer = models_answer(program, model, kept)
            except Exception as error:
                let_through(error)
                raise IncompatibleArtifact(label, [f"padding: the model takes no call of size {size} ({type(error).__name__})"]) from error
            for rows in (self._padded(kept, size, bucket), full, self._far(full, size)):
                try:
                    require_agreement(program, self.cut(prepared.runner(rows), size), answer, label)
                except IncompatibleArtifact as error:
                    why = "; ".join(error.differences)
                    raise IncompatibleArtifact(
                        label, [f"padding {size} to {bucket}: rows that are added change the others: {why}"]
                    ) from error

    def _padded(self, tensors: Sequence[torch.Tensor], size: int, bucket: int) -> list[torch.Tensor]:
        padded: list[torch.Tensor] = []
        for tensor, dimension in zip(tensors, self._buckets.inputs, strict=True):
            if dimension is None or size == bucket:
                padded.append(tensor)
                continue
            shape = list(tensor.shape)
            shape[dimension] = bucket - size
            padded.append(torch.cat([tensor, tensor.narrow(dimension, size - 1, 1).expand(shape)], dimension))
        return padded

    def _narrowed(self, tensors: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
        return [
            tensor if dimension is None else tensor.narrow(dimension, 0, size).clone()
            for tensor, dimension in zip(tensors, self._buckets.inputs, strict=True)
        ]

    def _far(self, tensors: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        for tensor, dimension in zip(tensors, self._buckets.inputs, strict=True):
            far = tensor.clone()
            if dimension is not None and tensor.is_floating_point():
                added = far.narrow(dimension, size, tensor.shape[dimension] - size)
                # Formats of eight bits have no arithmetic of their own.
                wide = added.float() if tensor.element_size() == 1 else added
                added.copy_(wide * min(_FAR, torch.finfo(tensor.dtype).max / 1e3))
            made.append(far)
        return made


def _drawn(program: Program, model: torch.nn.Module, seed: int, device: torch.device) -> list[torch.Tensor]:
    """Inputs on which the model answers with numbers, where it answers to random ones at all: a mask may hide all there is."""
    try:
        return telling_inputs(program, seed, device, lambda tensors: models_answer(program, model, tensors))[0]
    except Exception as error:
        let_through(error)
        return random_inputs(program, seed, device)
