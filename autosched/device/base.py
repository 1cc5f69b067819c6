"""What a device is, for everything above it: a thing that measures operators, pairs and schedules, and never raises for one.

Contract. A device is opened for one program (:meth:`Device.open`); the returned :class:`Session` owns whatever it needs (a worker
process, streams, buffers) and gives it back in :meth:`Session.close`. Measuring calls return a record or a ``Failure`` for each
item asked, in the order asked; they raise only ``DeviceError`` when the device itself is gone for good. A session is used by
one thread. Measurements of several schedules are interleaved in random order, so that their ratios survive a drifting machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from autosched.core.program import Program
from autosched.core.records import DeviceKey, Failure, GroupRecord, PairRecord, ScheduleRecord, SoftwareKey, SoloRecord
from autosched.core.schedule import Schedule

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Pair:
    """Ask for two operators of the program together: ``first`` is started first. Widths and variants as in ``Schedule``."""

    first: int
    last: int
    first_width: int = 1
    last_width: int = 1
    first_variant: int = 0
    last_variant: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Ask for three or more operators of the program together, started in the order given. Widths as in ``Schedule``; empty for all 1."""

    operators: tuple[int, ...]
    widths: tuple[int, ...] = ()

    def width_of(self, place: int) -> int:
        """Width of the operator at ``place``."""
        return self.widths[place] if self.widths else 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What a schedule may use on a device.

    ``widths`` are ascending and start with 1. ``lanes_matter`` is the argument of ``canonical_key``. ``launch_gap_us`` and
    ``cross_lane_us`` are the device's measured costs between two operators on one lane, and of a wait across lanes;
    ``concurrent_gap_us`` is what the first of them grows by while another lane is at work. ``native_lanes``: whether a CPU's lanes do
    without the interpreter's lock, so that one that waits takes nothing from those that work. ``one_team``: whether a CPU's lanes are
    threads of one team, so that an operator of several threads runs alone: what was launched before it ends first, what comes after it
    begins after it.
    """

    max_lanes: int
    widths: tuple[int, ...]
    priorities: tuple[int, ...]
    lanes_matter: bool
    launch_gap_us: float
    cross_lane_us: float
    fixed_us: float
    concurrent_gap_us: float = 0.0
    native_lanes: bool = False
    one_team: bool = False

    @property
    def pair_widths(self) -> tuple[int, ...]:
        """Widths at which an operator may run beside another."""
        return self.widths[:1] if self.one_team else self.widths


@dataclass(frozen=True, slots=True)
class Comparison:
    """One schedule's numerics: largest absolute and relative error against the reference, and bitwise equality.

    ``bitwise`` compares with the same operators in the same widths on one lane. ``max_abs_error`` and ``within_tolerance`` compare
    with the original model.
    """

    bitwise: bool
    max_abs_error: float
    within_tolerance: bool


class Session(Protocol):
    """A device opened for one program."""

    @property
    def limits(self) -> Limits:
        """What schedules may use here."""

    def solo(self, widths: Sequence[int], *, repeats: int) -> list[list[SoloRecord | Failure]]:
        """Time every operator of the program alone: ``[n_operators][len(widths)]``."""

    def pairs(self, pairs: Sequence[Pair], *, repeats: int) -> list[PairRecord | Failure]:
        """Time operators together, each pair in the start order given."""

    def groups(self, groups: Sequence[Group], *, repeats: int) -> list[GroupRecord | Failure]:
        """Time three or more operators together, each group in the start order given; a device that cannot answers ``UNAVAILABLE``.

        A group may have more members than the device has cores or queues: that is then part of what is measured.
        """

    def schedules(
        self, schedules: Sequence[Schedule], *, rounds: int, trace: bool = False, min_block_us: float = 0.0
    ) -> list[ScheduleRecord | Failure]:
        """Time whole schedules, interleaved in a random order in each of ``rounds``."""

    def paired(self, schedules: Sequence[Schedule], *, rounds: int) -> list[list[float]] | Failure:
        """Raw times in microseconds, ``[len(schedules)][rounds]``: column j of every row was taken in the same round."""

    def compare(
        self, schedule: Schedule, inputs: Sequence[Sequence[torch.Tensor]], references: Sequence[Sequence[torch.Tensor]]
    ) -> Comparison | Failure:
        """Run the schedule on several input sets and compare with the original model's outputs (flattened tensors)."""

    def close(self) -> None:
        """Give everything back. May be called twice."""


class Device(Protocol):
    """A kind of device on this machine."""

    @property
    def key(self) -> DeviceKey:
        """What a schedule's speed depends on."""

    @property
    def software(self) -> SoftwareKey:
        """Versions that decide which kernels run."""

    def open(self, program: Program, constants: Mapping[int, torch.Tensor], *, timeout_s: float) -> Session:
        """Open for one program; ``constants`` holds the tensor of every ``Binding`` by value index.

        Raises:
            DeviceMissing: if this machine has no such device, saying what is missing and what to do.
        """


@runtime_checkable
class StartsEarly(Protocol):
    """A device whose measuring process can be started before there is a program for it."""

    def start_early(self, *, timeout_s: float, compiling: bool = False) -> None:
        """Start the process of the next :meth:`Device.open` with this ``timeout_s``, and do not wait for it. No second one is started.

        Args:
            compiling: that program will have regions to compile: where there are cores to spare, compilers may be started, too.
        """

    def drop_early(self) -> None:
        """End a process that no ``open`` has taken. May be called twice."""


@runtime_checkable
class TellsOtherWork(Protocol):
    """A device of which the share can be told that other processes take."""

    def other_work(self) -> float | None:
        """Share (0 to 1) of the time in which other processes' work runs on it, now; ``None`` where nobody tells.

        To be called while nothing that this process has started runs there. Takes up to three seconds where anything ran a moment ago,
        for that may have been this process's own.
        """


@runtime_checkable
class OneOfSeveral(Protocol):
    """A device that a machine may have several of: its class takes ``index``, the number after the colon of ``cuda:1``."""

    @property
    def index(self) -> int:
        """Which one, from 0."""

    @property
    def count(self) -> int:
        """How many of its kind this process sees."""
