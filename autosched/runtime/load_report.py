"""What a loaded model says of itself: which schedules run, or why the model runs as it came, and what memory they take."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from autosched.runtime.prepared import Prepared
from autosched.runtime.slot import Slot


@dataclass(frozen=True, slots=True)
class ShapeReport:
    """One shape of a loaded bundle.

    Args:
        shape: its inputs, for people.
        ready: whether its schedule is bound, verified and in memory now.
        refused: why its schedule is not used, if it is not.
        calls: calls that ran its schedule.
        workspace_bytes: memory its schedule takes while ready, beside the model's weights; some of it other shapes may take as well.
        max_abs_error: largest difference from the model when it was compared last.
        copied_back_bytes: what each call copies into memory that the model changes in place; 0 where the schedule changes it there.
    """

    shape: str
    ready: bool
    refused: str
    calls: int
    workspace_bytes: int
    max_abs_error: float
    copied_back_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a loaded model does.

    Args:
        scheduled: whether calls run a schedule (those that pass the guard).
        reason: why not, if not.
        schedule: name of the strategy that made the schedule, empty if none was read; of several shapes, the first's.
        operators, lanes: size of the schedule; of several, the largest.
        verdict: ``exact``, ``degraded`` or ``incompatible``; empty if no bundle could be read.
        differences: one line for each field in which the bundle and this host or model differ.
        max_abs_error: largest difference from the model in the comparisons made so far.
        calls: calls that ran a schedule.
        stepped_aside: ``(reason, calls)`` for calls that ran the model as it came; reasons beyond a thousand are one together.
        shapes: one entry for each shape of the bundle.
        padding: whether calls of other shapes are padded: ``on``, ``off``, or why not.
        evictions: how often a ready schedule made room for another.
        notes: what was not checked, and what would make it so; what schedules in memory run without, and why.
        shared_bytes: of the shapes' ``workspace_bytes``, what is in memory once and counted by several: weights that were packed alike.
    """

    scheduled: bool
    reason: str
    schedule: str = ""
    operators: int = 0
    lanes: int = 0
    verdict: str = ""
    differences: tuple[str, ...] = ()
    max_abs_error: float = 0.0
    calls: int = 0
    stepped_aside: tuple[tuple[str, int], ...] = ()
    shapes: tuple[ShapeReport, ...] = ()
    padding: str = "off"
    evictions: int = 0
    notes: tuple[str, ...] = ()
    shared_bytes: int = 0

    @property
    def ready(self) -> int:
        """How many schedules are in memory now."""
        return sum(shape.ready for shape in self.shapes)

    @property
    def workspace_bytes(self) -> int:
        """Memory that the schedules in memory take now, beside the model's weights."""
        return sum(shape.workspace_bytes for shape in self.shapes if shape.ready) - self.shared_bytes


def shape_report(slot: Slot, prepared: Prepared | None) -> ShapeReport:
    """Of a slot whose schedule is in memory as ``prepared``, if it is."""
    workspace, copied = (prepared.workspace_bytes, prepared.copied_back_bytes) if prepared else (0, 0)
    return ShapeReport(slot.label, prepared is not None, slot.refused, slot.calls, workspace, slot.max_abs_error, copied)


def shared_bytes(packed: Sequence[Mapping[Hashable, int]]) -> int:
    """What several schedules count that is in memory once: bytes by what memory they are in, of each schedule."""
    once = {memory: size for each in packed for memory, size in each.items()}
    return sum(size for each in packed for size in each.values()) - sum(once.values())
