"""Recorded runs of a real device as a device: for searching and comparing where the device itself is not at hand.

It answers what was recorded (``Source.REPLAYED``), else what a simulator calibrated on the records predicts (``Source.SIMULATED``), else
with a ``Failure``; nothing it answers says ``MEASURED``. Records and simulator are handed in, because both know things that a device may
not. Numbers are still computed for real: schedules are compared with the model on this machine's CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from autosched.core.errors import DeviceError
from autosched.core.graph import OpGraph
from autosched.core.program import Program
from autosched.core.records import DeviceKey, Failure, FailureKind, GroupRecord, PairRecord, ScheduleRecord, SoftwareKey, SoloRecord, Source
from autosched.core.schedule import Schedule, canonical_key, violations
from autosched.core.variants import Variant, variant_signature
from autosched.device.base import Comparison, Group, Limits, Pair
from autosched.device.cpu_session import CpuSession
from autosched.device.requests import group_refusal, pair_refusal

if TYPE_CHECKING:
    import torch


class Recording(Protocol):
    """What was recorded on one device. ``None`` where nothing was."""

    @property
    def key(self) -> DeviceKey:
        """The device that was recorded."""

    @property
    def software(self) -> SoftwareKey:
        """What ran on it."""

    def limits(self, graph: OpGraph) -> Limits:
        """What schedules of ``graph`` may use; of the recorded graphs most like it if it was not recorded itself."""

    def offered(self, graph: OpGraph) -> tuple[tuple[int, ...], ...]:
        """The variants of each operator that were recorded, its calls first."""

    def solo(self, signature: str, width: int) -> SoloRecord | None:
        """One kernel alone; of a variant by its name (``core.variants.variant_signature``), here as in what follows."""

    def pair(self, first: str, first_width: int, last: str, last_width: int) -> PairRecord | None:
        """Two kernels in this start order."""

    def group(self, signatures: tuple[str, ...], widths: tuple[int, ...]) -> GroupRecord | None:
        """Three kernels or more in this start order."""

    def schedule(self, graph: str, key: str) -> ScheduleRecord | None:
        """The schedule with canonical key ``key`` of the graph with hash ``graph``."""


class Predictor(Protocol):
    """A simulator of one program, calibrated on what was recorded. ``None`` where it cannot say."""

    def pair(self, pair: Pair) -> PairRecord | None:
        """Two operators together."""

    def group(self, group: Group) -> GroupRecord | None:
        """Three operators or more together."""

    def schedule(self, schedule: Schedule) -> ScheduleRecord | None:
        """A whole schedule, with the times of its operators."""


_Record = TypeVar("_Record", SoloRecord, PairRecord, GroupRecord, ScheduleRecord)


class ReplaySession:
    """See ``base.Session``. Every record says whether it was recorded or predicted; :attr:`sources` says it of schedules.

    Recorded schedules have no operator times. Repeats and rounds asked for change nothing: a replay is what was recorded, and every
    round of a schedule takes its recorded median.

    Args:
        program, constants: as in ``Device.open``; they are run on this machine's CPU when outputs are compared.
        recording, predictor: see their classes; without a predictor, what was not recorded is a ``Failure``.
    """

    def __init__(
        self,
        program: Program,
        constants: Mapping[int, torch.Tensor],
        recording: Recording,
        predictor: Predictor | None,
        *,
        timeout_s: float,
    ) -> None:
        self.sources: dict[str, Source] = {}
        self._program = program
        self._constants = constants
        self._recording = recording
        self._predictor = predictor
        self._timeout_s = timeout_s
        self._limits: Limits | None = None
        self._numbers: CpuSession | None = None
        self._closed = False

    @property
    def limits(self) -> Limits:
        """As ``base.Session.limits``, as recorded."""
        self._require_open()
        if self._limits is None:
            self._limits = self._recording.limits(self._program.graph)
        return self._limits

    def solo(self, widths: Sequence[int], *, repeats: int) -> list[list[SoloRecord | Failure]]:
        """As ``base.Session.solo``; a kernel that was not recorded is a ``Failure``: nothing predicts times alone."""
        return self.solo_variants([(width, Variant.CALLS) for width in widths], repeats=repeats)

    def offered(self) -> tuple[tuple[int, ...], ...]:
        """As ``variants.VariantSession.offered``, as recorded."""
        self._require_open()
        return self._recording.offered(self._program.graph)

    def prepare_variants(self, columns: Sequence[tuple[int, int]], limit_s: float | None = None) -> tuple[int, int]:
        """As ``variants.VariantSession.prepare_variants``: nothing is compiled."""
        return 0, 0

    def compile_variant(self, width: int, variant: int, limit_s: float | None = None) -> dict[int, str]:
        """As ``variants.VariantSession.compile_variant``: what was recorded can be had."""
        return {operator: "" for operator, variants in enumerate(self.offered()) if variant in variants}

    def solo_variants(self, columns: Sequence[tuple[int, int]], *, repeats: int) -> list[list[SoloRecord | Failure]]:
        """As ``variants.VariantSession.solo_variants``, as recorded."""
        self._require_open()
        return [
            [
                _replayed(self._recording.solo(variant_signature(operator.signature, variant), width))
                or _missing(f"operator {operator.name} at width {width}")
                for width, variant in columns
            ]
            for operator in self._program.graph.operators
        ]

    def pairs(self, pairs: Sequence[Pair], *, repeats: int) -> list[PairRecord | Failure]:
        """As ``base.Session.pairs``."""
        self._require_open()
        return [self._pair(pair) for pair in pairs]

    def groups(self, groups: Sequence[Group], *, repeats: int) -> list[GroupRecord | Failure]:
        """As ``base.Session.groups``."""
        self._require_open()
        return [self._group(group) for group in groups]

    def schedules(
        self, schedules: Sequence[Schedule], *, rounds: int, trace: bool = False, min_block_us: float = 0.0
    ) -> list[ScheduleRecord | Failure]:
        """As ``base.Session.schedules``."""
        self._require_open()
        found = [self._schedule(schedule) for schedule in schedules]
        if trace:
            return found
        return [
            item if isinstance(item, Failure) else dataclasses.replace(item, operator_start_us=(), operator_end_us=()) for item in found
        ]

    def paired(self, schedules: Sequence[Schedule], *, rounds: int) -> list[list[float]] | Failure:
        """As ``base.Session.paired``: each round is the recorded, or predicted, median."""
        self._require_open()
        columns = []
        for place, schedule in enumerate(schedules):
            record = self._schedule(schedule)
            if isinstance(record, Failure):
                return Failure(record.kind, f"schedule {place}: {record.detail}")
            columns.append([record.samples.median_us] * max(1, rounds))
        return columns

    def compare(
        self, schedule: Schedule, inputs: Sequence[Sequence[torch.Tensor]], references: Sequence[Sequence[torch.Tensor]]
    ) -> Comparison | Failure:
        """As ``base.Session.compare``, computed now on this machine's CPU."""
        self._require_open()
        if self._numbers is None:
            limits = self.limits
            self._numbers = CpuSession(
                self._program, self._constants, timeout_s=self._timeout_s, max_lanes=limits.max_lanes, widths=limits.widths
            )
        # This machine need not have the variants of the one that was recorded.
        calls = dataclasses.replace(schedule, variant=(int(Variant.CALLS),) * len(schedule.variant))
        return self._numbers.compare(calls, inputs, references)

    def close(self) -> None:
        """As ``base.Session.close``."""
        self._closed = True
        if self._numbers is not None:
            self._numbers.close()

    def _pair(self, pair: Pair) -> PairRecord | Failure:
        graph = self._program.graph
        if (refusal := pair_refusal(graph, pair, wide=self.limits.widths != (1,))) is not None:
            return refusal
        first = variant_signature(graph.operators[pair.first].signature, pair.first_variant)
        last = variant_signature(graph.operators[pair.last].signature, pair.last_variant)
        predicted = self._predictor.pair(pair) if self._predictor is not None else None
        found = _replayed(self._recording.pair(first, pair.first_width, last, pair.last_width))
        return found or _simulated(predicted) or _missing(f"pair {pair.first} and {pair.last}")

    def _group(self, group: Group) -> GroupRecord | Failure:
        graph = self._program.graph
        if (refusal := group_refusal(graph, group, wide=self.limits.widths != (1,))) is not None:
            return refusal
        names = tuple(graph.operators[operator].signature for operator in group.operators)
        widths = tuple(group.width_of(place) for place in range(len(names)))
        predicted = self._predictor.group(group) if self._predictor is not None else None
        found = _replayed(self._recording.group(names, widths))
        return found or _simulated(predicted) or _missing(f"group {group.operators}")

    def _schedule(self, schedule: Schedule) -> ScheduleRecord | Failure:
        graph = self._program.graph
        if problems := violations(graph, schedule):
            return Failure(FailureKind.ILLEGAL, "; ".join(problems[:3]))
        key = canonical_key(graph, schedule, lanes_matter=self.limits.lanes_matter)
        found = _replayed(self._recording.schedule(graph.hash, key))
        if found is None and self._predictor is not None:
            found = _simulated(self._predictor.schedule(schedule))
        if found is None:
            return _missing("this schedule")
        self.sources[key] = found.source
        return dataclasses.replace(found, key=key)

    def _require_open(self) -> None:
        if self._closed:
            raise DeviceError("the session is closed; open the device again")


class ReplayDevice:
    """See ``base.Device``; its key is that of the device that was recorded.

    Args:
        recording: what was recorded.
        predictor_for: makes the simulator of a graph; ``None`` from it, or in its place, where nothing is predicted.
    """

    def __init__(self, recording: Recording, predictor_for: Callable[[OpGraph], Predictor | None] | None = None) -> None:
        self.recording = recording
        self._predictor_for = predictor_for

    @property
    def key(self) -> DeviceKey:
        """The recorded device's."""
        return self.recording.key

    @property
    def software(self) -> SoftwareKey:
        """The recorded device's."""
        return self.recording.software

    def open(self, program: Program, constants: Mapping[int, torch.Tensor], *, timeout_s: float) -> ReplaySession:
        """As ``base.Device.open``. No process starts before outputs are compared."""
        predictor = self._predictor_for(program.graph) if self._predictor_for is not None else None
        return ReplaySession(program, constants, self.recording, predictor, timeout_s=timeout_s)


def _replayed(record: _Record | None) -> _Record | None:
    """A record as an answer; one that was simulated when it was stored stays so."""
    if record is None or record.source is Source.SIMULATED:
        return record
    return dataclasses.replace(record, source=Source.REPLAYED)


def _simulated(record: _Record | None) -> _Record | None:
    return dataclasses.replace(record, source=Source.SIMULATED) if record is not None else None


def _missing(what: str) -> Failure:
    return Failure(FailureKind.UNAVAILABLE, f"{what} was not recorded, and nothing predicts it")
