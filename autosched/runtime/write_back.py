"""Around a run of a schedule whose model changes memory: reading the model's state before it, and writing what was changed after it.

What a run does not write in place (``runtime.in_place``) is written when it has succeeded. What is checked before the run is all that can
go wrong after it, but for an operator that fails when others have overwritten something: nobody may run the model on that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.utils.dlpack import from_dlpack

from autosched.core.errors import HalfWritten, IncompatibleArtifact
from autosched.core.extents import Extents, extent_of, overlap, reach_of
from autosched.core.in_place import Chain
from autosched.core.program import Program, Ref
from autosched.core.specs import TENSOR_TYPES
from autosched.runtime.state import Asked, Share, holders_of, turn_of

_to_capsule = torch._C._to_dlpack
# The public function only checks what kind of thing it was given.
_from_capsule = getattr(torch._C, "_from_dlpack", from_dlpack)
_MIXED_UP = "what it changes in place shares memory with something else that it is given"


class WriteBacks:
    """What one program reads of its model and writes to memory that outlives a call.

    Args:
        model: has the program's state.
        constants: whatever else the schedule reads where it lies.
        asked: what the model itself does with the memory.
        in_place: what runs may have written by themselves when they end.

    Raises:
        IncompatibleArtifact: if the model has no such state.
    """

    def __init__(
        self,
        program: Program,
        model: torch.nn.Module,
        constants: Sequence[torch.Tensor],
        asked: Asked,
        in_place: Sequence[Chain] = (),
    ) -> None:
        self.turn = turn_of(model)
        self.asked = asked
        self._names = [binding.name for binding in program.state]
        self._holders = holders_of(program, model)
        self._given = len(program.given)
        values = program.graph.values
        self._specs = [values[value].spec for value in program.graph.inputs[self._given :]]
        self._dtypes = [getattr(torch, spec.dtype) for spec in self._specs]
        self._constants = Extents(extent_of(tensor) for tensor in constants)
        place = {value: index for index, value in enumerate(program.graph.inputs)}
        made = {value: index for index, value in enumerate(program.graph.outputs)}
        self._targets = [place[item.target] for item in program.writes]
        self._values = [made[item.value] for item in program.writes]
        self._changed = {index for index, replaced in zip(self._targets, asked.replaced, strict=True) if not replaced}
        inputs = [values[value].spec for value in program.graph.inputs]
        reaches = [reach_of(spec.shape, spec.strides, getattr(torch, spec.dtype).itemsize) for spec in inputs]
        self._written = [(index, reaches[index]) for index in sorted(self._changed)]
        self._only_read = [(index, reach) for index, reach in enumerate(reaches) if index not in self._changed]
        # Where what is changed lay last time, which was apart from the weights and from each other.
        self._starts: list[int] = []
        self._memory = Extents(())
        self._shares = _shares_by_output(program, asked)
        # Their memory is changed by writing something else.
        roots = [values[value].storage for value in program.graph.outputs]
        changed = {values[program.graph.inputs[index]].storage for index in self._changed}
        kept = {roots[place] for place, replaced in zip(self._values, asked.replaced, strict=True) if replaced}
        returned = {made[leaf.value] for leaf in program.output_leaves if isinstance(leaf, Ref)} - self._shares.keys()
        self._copied_values = [index for index, place in enumerate(self._values) if roots[place] in changed]
        self._bytes = [values[item.target].spec.bytes for item in program.writes]
        self._in_place = frozenset(chain.write for chain in in_place)
        # Views of what is now the target's own memory, which the model has answered with copies.
        overwritten = {roots[self._values[write]] for write in self._in_place}
        self._copied_outputs = frozenset(place for place in returned if roots[place] in changed | kept | overwritten)

    @property
    def copied_bytes(self) -> int:
        """Bytes that are copied after each run; what the model replaces by another tensor is not."""
        return sum(size for index, size in enumerate(self._bytes) if index not in self._in_place and not self.asked.replaced[index])

    def inputs(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor] | str:
        """All inputs of the graph, or why this call may not run on the schedule. Under the model's turn.

        Args:
            given: the caller's, checked and laid out.
        """
        found = list(given)
        device = given[0].device if given else None
        for name, holder, spec, dtype in zip(self._names, self._holders, self._specs, self._dtypes, strict=True):
            tensor = holder.now()
            if type(tensor) not in TENSOR_TYPES or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
                return f"its {name!r} is no plain tensor now"
            if tuple(tensor.shape) != spec.shape or tensor.dtype is not dtype:
                return f"its {name!r} is {list(tensor.shape)} {tensor.dtype} now; the schedule was made for {list(spec.shape)} {spec.dtype}"
            if device is not None and tensor.device != device:
                return f"its {name!r} is on {tensor.device} now; the inputs are on {device}"
            if tensor.requires_grad and torch.is_grad_enabled():
                return f"its {name!r} requires gradients, and a schedule computes none"
            if tensor.stride() != spec.strides:
                if len(found) in self._changed:
                    return f"its {name!r} has another memory layout than in tuning"
                tensor = torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device=tensor.device).copy_(tensor.detach())
            found.append(tensor)
        return self._mixed_up(found) or found

    def finish(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Write back, and give the outputs that share memory with what was written. Under the model's turn.

        Args:
            inputs: as :meth:`inputs` gave them.
            outputs: of the graph, in order; the caller's to keep.

        Raises:
            HalfWritten: if writing failed, or anything before it did and the run itself has written in place.
        """
        begun = bool(self._in_place)
        with torch.no_grad():
            try:
                own = list(outputs) if torch.is_inference_mode_enabled() else [normal(tensor) for tensor in outputs]
                values = [own[place] for place in self._values]
                for index in self._copied_values:
                    values[index] = values[index].clone()
                results = [tensor.clone() if place in self._copied_outputs else tensor for place, tensor in enumerate(own)]
                ends: list[torch.Tensor] = []
                begun = True
                for index, (target, value, replaced) in enumerate(zip(self._targets, values, self.asked.replaced, strict=True)):
                    if replaced:
                        self._holders[target - self._given].put(value)
                    elif index not in self._in_place or value.data_ptr() != inputs[target].data_ptr():
                        inputs[target].copy_(value)
                    elif not inputs[target].is_inference():
                        # What a recorded graph or compiled code writes, nobody else counts.
                        torch.autograd.graph.increment_version(inputs[target])
                    ends.append(value if replaced else inputs[target])
                for place, share in self._shares.items():
                    results[place] = _view(ends[share.write], share)
            except (RuntimeError, MemoryError) as error:
                if not begun:
                    raise
                raise HalfWritten(f"what the model changes could not be written in full: {error}. Reset the model's state.") from error
        return results

    def _mixed_up(self, tensors: Sequence[torch.Tensor]) -> str:
        """Why what is changed cannot be told from what is only read, or nothing."""
        if not self._changed:
            return ""
        if not torch.is_inference_mode_enabled() and any(tensors[index].is_inference() for index in self._changed):
            return "what it changes in place was made in inference mode, and may be changed in it alone"
        # All are laid out as the graph has them, so an address says where a tensor ends, too.
        starts = [tensors[index].data_ptr() for index, _ in self._written]
        if starts != self._starts:
            extents = sorted((start, start + reach) for start, (_, reach) in zip(starts, self._written, strict=True) if reach)
            if any(map(self._constants.meets, extents)):
                return "what it changes in place shares memory with its weights"
            if any(overlap(one, other) for one, other in pairwise(extents)):
                return _MIXED_UP
            self._starts, self._memory = starts, Extents(extents)
        meets = self._memory.meets
        for index, reach in self._only_read:
            start = tensors[index].data_ptr()
            if meets((start, start + reach)):
                return _MIXED_UP
        return ""


def normal(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that may be changed and used anywhere: one made in inference mode may not."""
    if not tensor.is_inference():
        return tensor
    if tensor.is_conj() or tensor.is_neg():
        # A capsule has no word for values that are to be conjugated or negated when read.
        return tensor.resolve_conj().resolve_neg().clone()
    try:
        # By capsule: several times cheaper than the protocol's handshake, which is for strangers.
        return _from_capsule(_to_capsule(tensor))
    except (RuntimeError, BufferError, TypeError):
        return tensor.clone()


def _shares_by_output(program: Program, asked: Asked) -> dict[int, Share]:
    """What each output of the graph is to be a view of.

    Raises:
        IncompatibleArtifact: if one value is returned twice, and shares memory in one place only.
    """
    made = {value: index for index, value in enumerate(program.graph.outputs)}
    returned = [leaf.value for leaf in program.output_leaves if isinstance(leaf, Ref)]
    found: dict[int, Share | None] = {}
    for value, share in zip(returned, asked.shares, strict=True):
        known = found.setdefault(made[value], share)
        if share == known:
            continue
        if share is None or known is None or dataclasses.replace(share, whole=known.whole) != known:
            raise IncompatibleArtifact("the schedule", ["the model returns one value twice, and only one of the two is what it changed"])
        # Itself and as another tensor of its memory (``x, x.detach()``): itself both times.
        found[made[value]] = dataclasses.replace(share, whole=True)
    return {place: share for place, share in found.items() if share is not None}


def _view(end: torch.Tensor, share: Share) -> torch.Tensor:
    if share.whole:
        return end
    whole = end.detach()
    return whole.as_strided(share.size, share.stride, whole.storage_offset() + share.offset)
