"""A model that changes what it has or what it is given: where that lies, and asking it without leaving a trace."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from autosched.core.containers import map_packed
from autosched.core.errors import IncompatibleArtifact
from autosched.core.extents import overlaps_itself, storage_of
from autosched.core.forks import RenewedLock
from autosched.core.program import ConstantSource, Program
from autosched.core.watch import Watch
from autosched.runtime.thread_state import inference_mode
from autosched.runtime.trees import flatten_inputs, objects_given, output_tensors, packed_outputs, unflatten_inputs

_turns: weakref.WeakKeyDictionary[torch.nn.Module, RenewedLock] = weakref.WeakKeyDictionary()
_making = RenewedLock()


def turn_of(model: torch.nn.Module) -> RenewedLock:
    """Held by whoever reads the state of ``model`` and writes it back: all its schedules share the one state."""
    with _making.lock:
        return _turns.setdefault(model, RenewedLock())


@dataclass(frozen=True, slots=True)
class Holder:
    """Where a tensor of a module is kept: the module's own dictionary of parameters or of buffers."""

    table: dict[str, Any]
    key: str

    def now(self) -> Any:
        """What is there now; ``None`` if nothing is."""
        return self.table.get(self.key)

    def put(self, tensor: torch.Tensor) -> None:
        """Another tensor in its place."""
        self.table[self.key] = tensor


def holders_of(program: Program, model: torch.nn.Module) -> list[Holder]:
    """Where ``program.state`` is in ``model``.

    Raises:
        IncompatibleArtifact: naming what is not there.
    """
    found: list[Holder] = []
    for binding in program.state:
        owner_name, _, key = binding.name.rpartition(".")
        try:
            owner = model.get_submodule(owner_name)
        except AttributeError:
            owner = None
        table: Any = None
        if owner is not None:
            table = owner._parameters if binding.source is ConstantSource.PARAMETER else owner._buffers
        if not isinstance(table, dict) or not isinstance(table.get(key), torch.Tensor):
            raise IncompatibleArtifact("the schedule", [f"{binding.source} {binding.name}: the model has none that a call could change"])
        found.append(Holder(table, key))
    return found


def state_of(program: Program, model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of the tensors of ``program.state`` as they are now, in order; errors as :func:`holders_of`."""
    return [holder.now().detach().clone() for holder in holders_of(program, model)]


class Kept:
    """Tensors as they are now, and the places that hold some of them, to be given back after calls that change them.

    Args:
        holders: of tensors that a call may replace.
        tensors: others that it may change in place.
    """

    def __init__(self, holders: Sequence[Holder], tensors: Sequence[torch.Tensor]) -> None:
        self._held = [(holder, holder.now()) for holder in holders]
        self._tensors = [*(tensor for _, tensor in self._held), *tensors]
        self._saved = [tensor.detach().clone() for tensor in self._tensors]
        self._versions = [version_of(tensor) for tensor in self._tensors]

    @classmethod
    def anything(cls, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kept:
        """All that a call may change, whatever the model is: its buffers and its inputs."""
        tables = [module._buffers for module in model.modules() if isinstance(module._buffers, dict)]
        holders = [Holder(table, key) for table in tables for key, item in table.items() if isinstance(item, torch.Tensor)]
        return cls(holders, output_tensors((tuple(args), dict(kwargs))))

    @classmethod
    def by(cls, program: Program, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Kept:
        """What a call of ``model``, captured as ``program``, changes; errors as :func:`holders_of`."""
        given = dict(zip(program.given, flatten_inputs(program, args, kwargs), strict=True))
        return cls(holders_of(program, model), [given[item.target] for item in program.writes if item.target in given])

    def changed(self) -> bool:
        """Whether a call has changed anything."""
        replaced = any(holder.now() is not tensor for holder, tensor in self._held)
        return replaced or [version_of(tensor) for tensor in self._tensors] != self._versions

    def restore(self) -> None:
        """Give everything back."""
        for holder, tensor in self._held:
            holder.put(tensor)
        mode = inference_mode(True) if any(tensor.is_inference() for tensor in self._tensors) else nullcontext()
        with mode, torch.no_grad():
            for tensor, value in zip(self._tensors, self._saved, strict=True):
                tensor.copy_(value)


class OtherBuffers:
    """Whether calls of a model change buffers that its program says nothing of: then the program is not the model."""

    def __init__(self, program: Program, model: torch.nn.Module) -> None:
        state = {binding.name for binding in program.state}
        self._tables = [(name, module._buffers) for name, module in model.named_modules() if isinstance(module._buffers, dict)]
        named = [(f"{name}.{key}" if name else key, (id(table), key)) for name, table in self._tables for key in table]
        self._known = {place for name, place in named if name in state}
        self._before = self._now()

    def changed(self) -> str:
        """The name of one that has other contents than when this was asked last, or nothing."""
        before, self._before = self._before, self._now()
        names = {(id(table), key): f"{name}.{key}" if name else key for name, table in self._tables for key in table}
        return next((name for place, name in names.items() if _other(self._before.get(place), before.get(place))), "")

    def _now(self) -> dict[tuple[int, str], tuple[torch.Tensor, int]]:
        places = [(table, key) for _, table in self._tables for key in table if (id(table), key) not in self._known]
        return {(id(table), key): (item, version_of(item)) for table, key in places if isinstance(item := table[key], torch.Tensor)}


def _other(now: tuple[torch.Tensor, int] | None, before: tuple[torch.Tensor, int] | None) -> bool:
    if now is None or before is None:
        return now is not before
    if now[0] is before[0]:
        return now[1] != before[1]
    # Many a model puts one of a few fixed tensors there, most often the one that is there.
    return not torch.equal(now[0], before[0])


@dataclass(frozen=True, slots=True)
class Share:
    """An output of the model that is, or is a view of, what a call changed.

    Args:
        write: which of ``program.writes``.
        whole: whether it is that very tensor.
        size, stride, offset: of the view, the offset from the first element of what was changed.
    """

    write: int
    whole: bool
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Asked:
    """What the model did in one call, apart from its answer.

    Args:
        replaced: for each of ``program.writes``, whether the model has put another tensor in its place.
        shares: for each tensor of the answer, what it shares memory with.
    """

    replaced: tuple[bool, ...]
    shares: tuple[Share | None, ...]


def ask(program: Program, model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor], Asked]:
    """What the model answers to ``inputs`` (in the order of ``program.graph.inputs``), packed, and what it then has in place of each target
    of ``program.writes``. Neither its own tensors nor ``inputs`` are changed in the end.

    Raises:
        IncompatibleArtifact: as :func:`holders_of`, or if it does to its memory what cannot be done for it.
        Exception: whatever the model raises.
    """
    given = len(program.given)
    copies = copies_of(inputs[:given])
    with turn_of(model).lock:
        holders = holders_of(program, model)
        began = [holder.now() for holder in holders]
        kept = Kept(holders, ())
        # A tensor made in inference mode may be changed in it alone.
        mode = inference_mode(True) if any(tensor.is_inference() for tensor in began) else nullcontext()
        with mode, torch.no_grad():
            try:
                for tensor, value in zip(began, inputs[given:], strict=True):
                    tensor.copy_(value)
                args, kwargs = unflatten_inputs(program, copies)
                watch = Watch((args, kwargs), objects_given(program, args, kwargs))
                answer = watch.packed(model(*args, **kwargs))
                place = {value: index for index, value in enumerate(program.graph.inputs)}
                ends: list[torch.Tensor] = []
                replaced: list[bool] = []
                for item in program.writes:
                    index = place[item.target]
                    begin = copies[index] if index < given else began[index - given]
                    end = copies[index] if index < given else holders[index - given].now()
                    if not isinstance(end, torch.Tensor) or end.layout is not torch.strided:
                        raise _unlike("it leaves no strided tensor where it had one")
                    ends.append(end)
                    replaced.append(end is not begin)
                if any(storage_of(one) == storage_of(other) for one, other in combinations(ends, 2)):
                    raise _unlike("two of the tensors that it changes share memory after a call")
                shares = tuple(_share(tensor, ends) for tensor in output_tensors(answer))
                # What is returned may be what is given back its contents now.
                answer = map_packed(torch.Tensor.clone, answer)
                written = [tensor.clone() for tensor in ends]
            finally:
                kept.restore()
    return answer, written, Asked(tuple(replaced), shares)


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies with the strides of ``tensors``; dense ones of those whose elements share memory, which nothing can be copied into."""
    return [item.clone() if overlaps_itself(item.shape, item.stride()) else _copy_of(item) for item in tensors]


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    # A clone leaves no gaps between rows.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def whole_answer(program: Program, outputs: Sequence[torch.Tensor]) -> Any:
    """A schedule's answer, packed (``core.containers``), with what it writes back beside it if there is anything.

    Args:
        outputs: in the order of ``program.graph.outputs``.
    """
    answer = packed_outputs(program, outputs)
    if not program.writes:
        return answer
    place = dict(zip(program.graph.outputs, outputs, strict=True))
    return answer, [place[item.value] for item in program.writes]


def _share(tensor: torch.Tensor, ends: Sequence[torch.Tensor]) -> Share | None:
    if tensor.layout is not torch.strided:
        return None
    for index, end in enumerate(ends):
        if storage_of(end) != storage_of(tensor):
            continue
        if tensor.dtype != end.dtype or tensor.is_conj() != end.is_conj() or tensor.is_neg() != end.is_neg():
            raise _unlike("it returns what it changed under another dtype")
        offset = int(tensor.storage_offset()) - int(end.storage_offset())
        return Share(index, tensor is end, tuple(tensor.shape), tuple(tensor.stride()), offset)
    return None


def version_of(tensor: torch.Tensor) -> int:
    """How often PyTorch has counted an in-place change of it."""
    # Tensors made in inference mode have no counter.
    return -1 if tensor.is_inference() else tensor._version


def _unlike(what: str) -> IncompatibleArtifact:
    return IncompatibleArtifact("the schedule", [f"the model changes its memory in a way that is not done for it: {what}"])
