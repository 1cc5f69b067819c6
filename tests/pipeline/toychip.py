"""A device as another package would bring it: four queues, simulated; numbers are computed on this machine's CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autosched.core.errors import DeviceError
from autosched.core.program import Program
from autosched.core.records import (
    Contamination,
    DeviceKey,
    Failure,
    FailureKind,
    GroupRecord,
    PairRecord,
    Samples,
    ScheduleRecord,
    SoftwareKey,
    SoloRecord,
    Source,
)  # fmt: skip
from autosched.core.schedule import Schedule, canonical_key, violations
from autosched.device.base import Comparison, Group, Limits, Pair
from autosched.device.cpu import CpuDevice
from autosched.device.requests import group_refusal, pair_refusal
from autosched.runtime.host_key import software_key

_QUIET = Contamination()


class ToyChip:
    key = DeviceKey("toychip", "Toy Chip 4", (("queues", "4"),))

    @property
    def software(self) -> SoftwareKey:
        return software_key()

    def open(self, program: Program, constants: Mapping[int, torch.Tensor], *, timeout_s: float) -> ToySession:
        return ToySession(program, constants, timeout_s)


class ToySession:
    limits = Limits(4, (1,), (0,), False, 0.5, 1.0, 5.0)

    def __init__(self, program: Program, constants: Mapping[int, torch.Tensor], timeout_s: float) -> None:
        self._graph = program.graph
        self._numbers = CpuDevice().open(program, constants, timeout_s=timeout_s)
        self._closed = False

    def solo(self, widths: Sequence[int], *, repeats: int) -> list[list[SoloRecord | Failure]]:
        self._require_open()
        return [[self._solo(index, width) for width in widths] for index in range(len(self._graph))]

    def pairs(self, pairs: Sequence[Pair], *, repeats: int) -> list[PairRecord | Failure]:
        self._require_open()
        return [pair_refusal(self._graph, pair, wide=False) or self._pair(pair) for pair in pairs]

    def groups(self, groups: Sequence[Group], *, repeats: int) -> list[GroupRecord | Failure]:
        self._require_open()
        cannot = Failure(FailureKind.UNAVAILABLE, "the toy chip runs no groups")
        return [group_refusal(self._graph, group, wide=False) or cannot for group in groups]

    def schedules(
        self, schedules: Sequence[Schedule], *, rounds: int, trace: bool = False, min_block_us: float = 0.0
    ) -> list[ScheduleRecord | Failure]:
        self._require_open()
        return [self._schedule(schedule, trace) for schedule in schedules]

    def paired(self, schedules: Sequence[Schedule], *, rounds: int) -> list[list[float]] | Failure:
        self._require_open()
        return [[max(self._ends(schedule)[1], default=1.0)] * rounds for schedule in schedules]

    def compare(
        self, schedule: Schedule, inputs: Sequence[Sequence[torch.Tensor]], references: Sequence[Sequence[torch.Tensor]]
    ) -> Comparison | Failure:
        self._require_open()
        return self._numbers.compare(schedule, inputs, references)

    def close(self) -> None:
        self._closed = True
        self._numbers.close()

    def _require_open(self) -> None:
        if self._closed:
            raise DeviceError("the session is closed; open the device again")

    def _alone_us(self, operator: int) -> float:
        return 2.0 + self._graph.operators[operator].flops / 1e5

    def _solo(self, operator: int, width: int) -> SoloRecord:
        return SoloRecord(self._graph.operators[operator].signature, width, _samples(self._alone_us(operator)), _QUIET, Source.SIMULATED)

    def _pair(self, pair: Pair) -> PairRecord:
        first, last = self._alone_us(pair.first), self._alone_us(pair.last)
        together, names = 1.1 * max(first, last), [self._graph.operators[index].signature for index in (pair.first, pair.last)]
        ratio = together / (first + last)
        return PairRecord(names[0], 1, names[1], 1, first, last, together, 1.1, 1.1, ratio, 1, 1, 3, _QUIET, Source.SIMULATED)

    def _schedule(self, schedule: Schedule, trace: bool) -> ScheduleRecord | Failure:
        if problems := violations(self._graph, schedule):
            return Failure(FailureKind.ILLEGAL, problems[0])
        begins, ends = self._ends(schedule) if trace else ((), ())
        total = _samples(max(self._ends(schedule)[1], default=1.0))
        key = canonical_key(self._graph, schedule, lanes_matter=False)
        return ScheduleRecord(key, total, 4096, _QUIET, begins, ends, Source.SIMULATED)

    def _ends(self, schedule: Schedule) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """When operators begin and end, by their index: each queue in order, each operator after those that it reads."""
        begins, ends, free = [0.0] * len(self._graph), [0.0] * len(self._graph), [0.0] * schedule.lane_slots
        for operator in schedule.order:
            lane = schedule.lane[operator]
            begins[operator] = max([free[lane], *(ends[before] for before in self._graph.predecessors[operator])])
            ends[operator] = free[lane] = begins[operator] + self._alone_us(operator)
        return tuple(begins), tuple(ends)


def _samples(time_us: float) -> Samples:
    return Samples(time_us, time_us, time_us, time_us, time_us, 3)
