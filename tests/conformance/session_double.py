"""A device session whose times are decided by the test, so that the right conclusion is known beforehand. Simulated, never measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autosched.core.records import Contamination, Failure, GroupRecord, PairRecord, Samples, ScheduleRecord, SoloRecord, Source
from autosched.core.schedule import Schedule
from autosched.device.base import Comparison, Group, Limits, Pair

Truth = Callable[[Schedule], "float | Failure"]


class SessionDouble:
    """Answers with ``truth(schedule)`` microseconds, times ``1 + noise`` of a seeded normal. Counts what it was asked.

    Args:
        noise: standard deviation of the relative noise of one round.
        drift: relative growth of every time per round, as of a machine that gets slower.
    """

    def __init__(self, truth: Truth, *, noise: float = 0.0, drift: float = 0.0, max_lanes: int = 2, seed: int = 0) -> None:
        self.limits = Limits(max_lanes, (1, 2), (0,), True, 1.0, 5.0, 10.0)
        self.comparisons: dict[tuple[int, ...], Comparison | Failure] = {}
        self.asked_solo = 0
        self.compared: list[Schedule] = []
        self._truth = truth
        self._noise = noise
        self._drift = drift
        self._round = 0
        self._rng = np.random.default_rng(seed)

    def _time_us(self, schedule: Schedule) -> float:
        truth = self._truth(schedule)
        assert not isinstance(truth, Failure)
        return truth * (1 + self._drift * self._round) * max(0.01, 1 + self._noise * float(self._rng.standard_normal()))

    def solo(self, widths: Sequence[int], *, repeats: int) -> list[list[SoloRecord | Failure]]:
        self.asked_solo += 1
        raise NotImplementedError("set in a subclass that knows its program")

    def pairs(self, pairs: Sequence[Pair], *, repeats: int) -> list[PairRecord | Failure]:
        raise NotImplementedError("set in a subclass that knows its program")

    def groups(self, groups: Sequence[Group], *, repeats: int) -> list[GroupRecord | Failure]:
        raise NotImplementedError("set in a subclass that knows its program")

    def schedules(
        self, schedules: Sequence[Schedule], *, rounds: int, trace: bool = False, min_block_us: float = 0.0
    ) -> list[ScheduleRecord | Failure]:
        answers: list[ScheduleRecord | Failure] = []
        for schedule in schedules:
            truth = self._truth(schedule)
            if isinstance(truth, Failure):
                answers.append(truth)
                continue
            samples = Samples(truth, truth, truth, truth, truth, rounds)
            answers.append(ScheduleRecord("", samples, 1024, Contamination(), source=Source.SIMULATED))
        return answers

    def paired(self, schedules: Sequence[Schedule], *, rounds: int) -> list[list[float]] | Failure:
        for schedule in schedules:
            truth = self._truth(schedule)
            if isinstance(truth, Failure):
                return truth
        columns: list[list[float]] = [[] for _ in schedules]
        for _ in range(rounds):
            for column, schedule in zip(columns, schedules, strict=True):
                column.append(self._time_us(schedule))
            self._round += 1
        return columns

    def compare(self, schedule: Schedule, inputs: object, references: object) -> Comparison | Failure:
        self.compared.append(schedule)
        return self.comparisons.get(schedule.lane, Comparison(True, 0.0, True))

    def close(self) -> None:
        """Nothing to give back."""
