"""The table of costs that the cost model hands to the search: solo times and slowdowns, by kernel.

A *kernel* here is an operator signature at a width: equal kernels share a row, so the matrices stay small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosched.core.errors import UsageError

LONGEST_US = 1e15
"""No time is longer: thirty years. The compiled simulators do not look at their times, and one that is not a number, or that adds up to
what stands for never there, makes them loop for ever or write beside their arrays."""

UNATTRACTIVE = 1000.0
"""An operator that has no time at a width costs this many times the whole graph at the first width there: finite, and never chosen."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Everything a simulator needs to know about a graph on a device.

    Args:
        widths: the widths an operator may have, ascending, first 1; length ``n_widths``.
        kernel: int32 ``[n_operators, n_widths]``, row of the kernel matrices.
        solo_us: float64 ``[n_kernels]``, time alone in microseconds.
        slowdown_first: float64 ``[n_beside, n_beside]``: ``[a, b]`` is a's slowdown beside b when a started first. With ``one_team``,
            kernels from ``n_beside`` on are those of operators that run alone, and have no slowdown; else ``n_beside`` is ``n_kernels``.
        slowdown_last: float64 ``[n_beside, n_beside]``: ``[a, b]`` is a's slowdown beside b when a started last.
        launch_gap_us: time between two operators on one lane.
        cross_lane_us: added when an operator waits for one on another lane.
        fixed_us: once for each run.
        max_lanes: most lanes worth using.
        measured_pairs: share (0 to 1) of the pairs of kernels that may meet whose slowdowns were measured rather than predicted.
        concurrent_gap_us: added before an operator that would start while another lane is at work: what threads that launch at the same
            time cost each other (the interpreter's lock on a CPU).
        polling_us: how long a lane that waits asks again and again before it sleeps; 0 where none does (a GPU). While it asks, an operator
            that ends on another lane ends ``cross_lane_us`` later, and its wait costs nothing more.
        team_spin_us: how long the helper threads of an operator of several threads keep their cores after it; 0 where there are none.
        one_team: whether a CPU's lanes are threads of one team, so that an operator wider than the first width runs alone: what was
            launched before it ends first, on every lane, and what comes after it begins after it.
        variant: int32 ``[n_operators, n_widths]``: the variant (see ``Schedule``) that the times are of, and that a schedule made from this
            table runs; ``None`` for 0 everywhere.
        other_kernel: int32 ``[n_operators]``: the row of another variant of each operator at the first width, one that is slower alone and
            may be the better neighbour; its own row where it has none. ``None`` where no operator has one.
        other_variant: int32 ``[n_operators]``: that variant; given if ``other_kernel`` is.
        room: float64 ``[n_kernels]``: share (0 to 1) of the device's cores or block slots that each kernel takes, 0 where that is not
            known; ``None`` for 0 everywhere. Pairs show what two share; this says what three and more do.
    """

    widths: tuple[int, ...]
    kernel: NDArray[np.int32]
    solo_us: NDArray[np.float64]
    slowdown_first: NDArray[np.float64]
    slowdown_last: NDArray[np.float64]
    launch_gap_us: float
    cross_lane_us: float
    fixed_us: float
    max_lanes: int
    measured_pairs: float = 0.0
    concurrent_gap_us: float = 0.0
    variant: NDArray[np.int32] | None = None
    room: NDArray[np.float64] | None = None
    polling_us: float = 0.0
    team_spin_us: float = 0.0
    one_team: bool = False
    other_kernel: NDArray[np.int32] | None = None
    other_variant: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        kernels = len(self.solo_us)
        if self.kernel.ndim != 2 or self.kernel.shape[1] != len(self.widths):
            raise UsageError(f"kernel has shape {self.kernel.shape}; expected [n_operators, {len(self.widths)}]")
        if self.variant is not None and self.variant.shape != self.kernel.shape:
            raise UsageError(f"variant has shape {self.variant.shape}; expected {self.kernel.shape}, a number for each operator and width")
        for name in ("other_kernel", "other_variant"):
            other: NDArray[np.int32] | None = getattr(self, name)
            if (other is None) != (self.other_kernel is None) or (other is not None and other.shape != self.kernel.shape[:1]):
                given = None if other is None else other.shape
                raise UsageError(f"{name} has shape {given}; expected [{len(self.kernel)}], or neither of other_kernel and other_variant")
        for name in ("slowdown_first", "slowdown_last"):
            matrix: NDArray[np.float64] = getattr(self, name)
            beside = len(self.slowdown_first) if self._is_within(len(self.slowdown_first)) else kernels
            if matrix.shape != (beside, beside):
                raise UsageError(f"{name} has shape {matrix.shape}; expected [{beside}, {beside}]")
            if not np.isfinite(matrix).all() or (matrix <= 0).any():
                raise UsageError(f"{name} holds values that are not finite and positive; drop the records that made them")
        if not np.isfinite(self.solo_us).all() or (self.solo_us < 0).any() or (self.solo_us > LONGEST_US).any():
            raise UsageError(f"solo_us holds values that are negative, not finite or above {LONGEST_US:g}; drop the records that made them")
        for name in ("launch_gap_us", "cross_lane_us", "fixed_us", "concurrent_gap_us", "polling_us", "team_spin_us"):
            value: float = getattr(self, name)
            if not 0 <= value <= LONGEST_US:
                raise UsageError(f"{name} is {value}; expected a number of microseconds from 0 to {LONGEST_US:g}")
        if self.room is not None and (self.room.shape != (kernels,) or not ((self.room >= 0) & (self.room <= 1)).all()):
            raise UsageError(f"room has shape {self.room.shape}, or values outside 0 to 1; expected [{kernels}] shares of the device")
        if self.max_lanes < 1:
            raise UsageError(f"max_lanes is {self.max_lanes}; expected at least 1")

    def _is_within(self, beside: int) -> bool:
        """Whether no operator that may run beside others has a kernel from ``beside`` on."""
        may = [self.kernel[:, 0], *([] if self.other_kernel is None else [self.other_kernel])]
        return self.one_team and all(int(rows.max(initial=0)) < beside for rows in may) and beside <= len(self.solo_us)

    def slowdowns(self, kernels: Sequence[int] | NDArray[np.int32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """``slowdown_first`` and ``slowdown_last`` among some kernels, in their order; 1 where one of the two runs alone."""
        chosen = np.asarray(kernels, dtype=np.int64)
        inside = np.flatnonzero(chosen < len(self.slowdown_first))
        found = np.ones((2, len(chosen), len(chosen)))
        for table, matrix in zip(found, (self.slowdown_first, self.slowdown_last), strict=True):
            table[np.ix_(inside, inside)] = matrix[np.ix_(chosen[inside], chosen[inside])]
        return found[0], found[1]

    def operator_us(self, width: int = 1) -> NDArray[np.float64]:
        """Time alone of each operator at ``width``: float64 ``[n_operators]``, microseconds."""
        return self.solo_us[self.kernel[:, self.widths.index(width)]]
