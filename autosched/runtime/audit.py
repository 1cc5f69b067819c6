"""Run a program once, in order, and see whether its operators do to memory what the graph says they do.

Waits and frees follow from what the graph says about aliases and in-place changes. A graph that lies about them, by a bug or by
design, gives a plan with a race in it, which a comparison of outputs may miss. What an operator aliases and changes depends on
its arguments' shapes and layouts, never on their contents, so one run settles it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from autosched.core.extents import storage_of
from autosched.core.graph import Operator, ValueRole
from autosched.runtime.calls import Slots
from autosched.runtime.kernels import BoundProgram, dtype_name
from autosched.runtime.thread_state import inference_mode


def audit_run(bound: BoundProgram, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[str]]:
    """Run every operator on the calling thread and compare shapes, dtypes, aliases and in-place changes with the graph.

    Nothing runs after the first operator that did otherwise: the next one may change what that one has made a view of.

    Args:
        inputs: in the order of ``program.graph.inputs``.

    Returns:
        The output tensors, and one line for each difference. There are outputs only if there is none, and the graph tells the truth.
    """
    graph = bound.program.graph
    if lie := _untold_memory(bound):
        return [], [lie]
    # Version counters exist only outside inference mode.
    with inference_mode(False), torch.no_grad():
        slots = bound.new_slots(inputs)
        memory = _Memory(bound, slots)
        for operator in graph.operators:
            changed = _outsiders(bound, operator)
            before = {value: _version(slots[value]) for value in changed}
            bound.kernels[operator.index](slots)
            found = [
                f"operator {operator.name} changes value {value} in place and the graph does not say so"
                for value, version in before.items()
                if _version(slots[value]) != version
            ]
            found += memory.enter(operator, slots)
            if found:
                return [], found
            memory.leave(operator, slots)
        return bound.outputs(slots), []


def _untold_memory(bound: BoundProgram) -> str:
    """Why it could not be seen what is changed in place, or an empty string."""
    graph = bound.program.graph
    # Code that was compiled here changes only buffers that it has made itself.
    changes = "" if bound.program.source else next((operator.name for operator in graph.operators if operator.mutates), "")
    if changes and any(isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided for tensor in bound.constants):
        return f"operator {changes} changes a tensor in place, beside constants that are not strided, whose views nobody can tell"
    return ""


def _outsiders(bound: BoundProgram, operator: Operator) -> list[int]:
    values = bound.program.graph.values
    allowed = {values[value].storage for value in operator.mutates}
    if bound.program.source:
        # A launch that fills its window of a shared buffer says so by making that window, which is its alone.
        allowed |= {values[value].storage for value in operator.writes}
    return [value for value in operator.reads if values[value].storage not in allowed]


def _version(tensor: object) -> int:
    # Tensors made in inference mode have no counter, and refuse to be changed outside of it.
    return tensor._version if isinstance(tensor, torch.Tensor) and not tensor.is_inference() else -1


class _Memory:
    """Which declared storage lives in which real one, while it lives."""

    def __init__(self, bound: BoundProgram, slots: Slots) -> None:
        self._graph = bound.program.graph
        self._real: dict[int, Hashable] = {}  # declared storage -> real storage
        self._taken: dict[Hashable, int] = {}  # real storage -> how many declared ones live there
        self._members: dict[int, list[int]] = {}
        for value in self._graph.values:
            self._members.setdefault(value.storage, []).append(value.index)
            # Constants may share memory (tied weights); nothing changes them, so sharing is harmless. Those that the graph puts into one
            # storage may be several.
            if slots[value.index] is not None:
                real = storage_of(slots[value.index])
                self._real.setdefault(value.storage, real)
                self._taken[real] = self._taken.get(real, 0) + 1
        kept = {self._graph.values[value].storage for value in self._graph.outputs}
        self._last: dict[int, list[int]] = {}
        for storage, uses in self._graph.storage_uses.items():
            if self._graph.values[storage].role in (ValueRole.INTERMEDIATE, ValueRole.INTERNAL) and storage not in kept:
                self._last.setdefault(uses[-1], []).append(storage)

    def enter(self, operator: Operator, slots: Slots) -> list[str]:
        """Compare what ``operator`` made with what it should have made."""
        found: list[str] = []
        for index in operator.writes:
            value, tensor = self._graph.values[index], slots[index]
            if not isinstance(tensor, torch.Tensor):
                found.append(f"operator {operator.name} makes {type(tensor).__name__}, not a tensor, as value {index}")
                continue
            if tuple(tensor.shape) != value.spec.shape or dtype_name(tensor.dtype) != value.spec.dtype:
                found.append(
                    f"operator {operator.name} makes {list(tensor.shape)} {dtype_name(tensor.dtype)} as value {index}; "
                    f"the graph says {list(value.spec.shape)} {value.spec.dtype}"
                )
            real = storage_of(tensor)
            known = self._real.get(value.storage)
            if known is None and real in self._taken:
                found.append(f"operator {operator.name} makes value {index} as a view of older memory and the graph does not say so")
            elif known is not None and known != real:
                found.append(f"operator {operator.name} makes value {index} in memory of its own; the graph calls it a view")
            self._settle(value.storage, real)
        return found

    def leave(self, operator: Operator, slots: Slots) -> None:
        """Forget memory whose last user was ``operator``."""
        for storage in self._last.get(operator.index, ()):
            for value in self._members[storage]:
                slots[value] = None
            real = self._real.pop(storage, None)
            if real is not None:
                self._taken[real] -= 1
                if not self._taken[real]:
                    del self._taken[real]

    def _settle(self, storage: int, real: Hashable) -> None:
        if storage not in self._real:
            self._real[storage] = real
            self._taken[real] = self._taken.get(real, 0) + 1
