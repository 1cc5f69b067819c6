"""What was measured: medians with their spread, how disturbed the machine was, or why there is no number.

Every record says which device and which source it comes from, so that no simulated figure can pass as measured.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

import msgspec

MAX_SLOWDOWN = 24.0
"""Labels and predictions of slowdowns stop here: below a 24th of its speed an operator is in effect queued behind the other."""


class Source(enum.StrEnum):
    """Where a figure comes from."""

    MEASURED = "measured"  # on the device the record names
    REPLAYED = "replayed"  # a measured record, answered again
    SIMULATED = "simulated"  # computed by a simulator


class Engine(enum.StrEnum):
    """What runs the lanes of a plan on a CPU."""

    NATIVE = "native"  # one call without the interpreter's lock for each lane
    PYTHON = "python"  # threads of Python, which share that lock


class FailureKind(enum.StrEnum):
    """Why a candidate has no time. The closed set that reports group by."""

    TIMEOUT = "timeout"
    CRASH = "crash"
    OOM = "oom"
    NONFINITE = "nonfinite"
    MISMATCH = "mismatch"
    UNSTABLE = "unstable"
    CAPTURE = "capture"
    ILLEGAL = "illegal"
    UNAVAILABLE = "unavailable"  # the device or a tool it needs (a compiler, say) is not there


@dataclass(frozen=True, slots=True)
class Failure:
    """A candidate that failed, as a value: the search goes on without it."""

    kind: FailureKind
    detail: str


BY_OTHERS = " (by someone, or because memory ran out)"
"""In the ``detail`` of a process's end that may be somebody else's doing: it says nothing of what was worked on."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Times of one thing measured several times, in microseconds.

    ``ci_low_us`` and ``ci_high_us`` bound the median with 95 % confidence (order statistics).
    """

    median_us: float
    ci_low_us: float
    ci_high_us: float
    p95_us: float
    min_us: float
    count: int


@dataclass(frozen=True, slots=True)
class Contamination:
    """What else the machine was doing while a sample was taken.

    ``foreign_load`` is the share (0 to 1) of the time of the cores that it may use that other processes took; -1 if unknown.
    ``clock_mhz`` is the device's clock, 0 if unknown.
    """

    foreign_load: float = -1.0
    clock_mhz: float = 0.0


@dataclass(frozen=True, slots=True)
class SoloRecord:
    """One operator alone. ``signature`` is ``Operator.signature``; ``width`` as in ``Schedule``.

    ``engine`` is what ran it on a CPU; ``None`` elsewhere, and in records from before they said so.
    """

    signature: str
    width: int
    samples: Samples
    contamination: Contamination
    source: Source = Source.MEASURED
    engine: Engine | None = None


@dataclass(frozen=True, slots=True)
class PairRecord:
    """Two operators at the same time, ``first`` started first.

    ``slowdown_first`` and ``slowdown_last`` are each one's time beside the other over its time alone (1.0 = undisturbed).
    ``makespan_ratio`` is ``t_ab / (t_a + t_b)``: 0.5 perfect overlap of equals, 1.0 no gain, above 1.0 harmful.
    ``repeats_first`` and ``repeats_last`` say how often each was repeated in a run to balance their lengths. ``engine`` is as in
    ``SoloRecord``.
    """

    first: str
    first_width: int
    last: str
    last_width: int
    solo_first_us: float
    solo_last_us: float
    together_us: float
    slowdown_first: float
    slowdown_last: float
    makespan_ratio: float
    repeats_first: int
    repeats_last: int
    count: int
    contamination: Contamination
    source: Source = Source.MEASURED
    engine: Engine | None = None


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """Three or more operators started together, in the order given; each is repeated to balance their lengths, as in a pair.

    Args:
        solo_us: time of one run of each alone.
        repeats: how often each was run.
        finish_us: when each was done with all its repeats, from the start of the first.
        together_us: when the last of them was done.
    """

    signatures: tuple[str, ...]
    widths: tuple[int, ...]
    solo_us: tuple[float, ...]
    repeats: tuple[int, ...]
    finish_us: tuple[float, ...]
    together_us: float
    count: int
    contamination: Contamination
    source: Source = Source.MEASURED

    @property
    def slowdowns(self) -> tuple[float, ...]:
        """Each one's time until it was done over its time alone; the start of the first is where all are counted from."""
        return tuple(done / (once * times) for done, once, times in zip(self.finish_us, self.solo_us, self.repeats, strict=True))

    @property
    def makespan_ratio(self) -> float:
        """Time of all together over the sum of their times alone: ``1 / k`` for perfect overlap of ``k`` equals, 1.0 for no gain."""
        return self.together_us / sum(once * times for once, times in zip(self.solo_us, self.repeats, strict=True))


@dataclass(frozen=True, slots=True)
class Paging:
    """What a run on a CPU pays for memory that it gave back after the last one, and takes again.

    ``anew_bytes`` is what the operating system gave in one run; ``system_share`` the share (0 to 1) of the processors' time in it that
    went to the operating system. Both 0 if unknown.
    """

    anew_bytes: int = 0
    system_share: float = 0.0


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """One schedule, the whole model. ``key`` is ``canonical_key``.

    ``operator_start_us`` and ``operator_end_us`` (by operator index, from the start of the run) are empty unless traced, and ``paging`` is
    unknown.
    """

    key: str
    samples: Samples
    peak_memory_bytes: int
    contamination: Contamination
    operator_start_us: tuple[float, ...] = ()
    operator_end_us: tuple[float, ...] = ()
    source: Source = Source.MEASURED
    paging: Paging = Paging()


@dataclass(frozen=True, slots=True)
class DeviceKey:
    """What a schedule's speed depends on. ``details`` are sorted ``(name, value)`` pairs compared one by one."""

    kind: str
    name: str
    details: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        """The device without its software, as a name: 24 hexadecimal digits."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:24]

    def differences(self, other: DeviceKey) -> list[str]:
        """One line for each field in which ``other`` differs from this one; of another kind of device, kind and name say it all."""
        alike = self.kind == other.kind
        mine = {"kind": self.kind, "name": self.name, **dict(self.details if alike else ())}
        theirs = {"kind": other.kind, "name": other.name, **dict(other.details if alike else ())}
        return [
            f"{field}: {mine.get(field, 'absent')} there, {theirs.get(field, 'absent')} here"
            for field in sorted(mine.keys() | theirs.keys())
            if mine.get(field) != theirs.get(field)
        ]


@dataclass(frozen=True, slots=True)
class SoftwareKey:
    """Versions that decide which kernels run and what they compute; sorted ``(name, version)`` pairs."""

    versions: tuple[tuple[str, str], ...]

    @property
    def engine(self) -> Engine:
        """What runs lanes on a CPU with this software; what says nothing is from before there was a choice."""
        return Engine.NATIVE if ("lanes", Engine.NATIVE) in self.versions else Engine.PYTHON

    def on(self, engine: Engine) -> SoftwareKey:
        """The same versions with lanes run by ``engine``, said only where it is not what it has always been: old keys stay known."""
        return self._saying("lanes", "" if engine is Engine.PYTHON else engine.value)

    @property
    def keeps_memory(self) -> bool:
        """Whether freed memory stayed with the process (``runtime.kept_memory``)."""
        return ("memory", "kept") in self.versions

    def keeping_memory(self, kept: bool) -> SoftwareKey:
        """The same versions, in a process that keeps freed memory or, which is not said, does not."""
        return self._saying("memory", "kept" if kept else "")

    def _saying(self, name: str, value: str) -> SoftwareKey:
        """The same versions with ``value`` under ``name``; nothing there if it is empty."""
        others = tuple(item for item in self.versions if item[0] != name)
        return SoftwareKey(tuple(sorted((*others, (name, value)))) if value else others)

    def differences(self, other: SoftwareKey) -> list[str]:
        """One line for each differing version."""
        mine, theirs = dict(self.versions), dict(other.versions)
        return [
            f"{name}: {mine.get(name, 'absent')} there, {theirs.get(name, 'absent')} here"
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        ]
