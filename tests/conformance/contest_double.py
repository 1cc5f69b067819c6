"""A device whose times a test decides, lowering by lowering, and comparisons of all lowerings on it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autosched import pipeline
from autosched.capture.export import lower_draft
from autosched.core.errors import AutoschedError
from autosched.core.program import Program
from autosched.core.records import Contamination, DeviceKey, Failure, FailureKind, PairRecord, Samples, SoftwareKey, SoloRecord
from autosched.core.report import LoweringRow, TuneReport
from autosched.core.schedule import Schedule
from autosched.core.variants import WHOLE, Lowering
from autosched.device.base import Comparison, Device, Pair
from autosched.pipeline import baselines, contest, granularity, job, preparing
from autosched.pipeline.original import Original
from autosched.pipeline.preparing import NotHad
from tests.conformance.session_double import SessionDouble


class Chain(nn.Module):
    """Nothing can run beside anything."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.mm(torch.softmax(torch.mm(x, x), -1), x), -1)


class Branches(nn.Module):
    """Two products that do not wait for each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x) + torch.mm(x.t(), x)


@dataclasses.dataclass
class Speed:
    """What a lowering takes on the device, microseconds: in order, and on two lanes (``None``: as long as in order)."""

    sequential_us: float
    lanes_us: float | None = None
    broken: Failure | None = None
    wrong: Failure | None = None


class Session(SessionDouble):
    """Its operators take equal parts of the sequential time."""

    def __init__(self, program: Program, speed: Speed) -> None:
        super().__init__(self._takes, noise=0.001)
        self.program, self.speed, self.closed = program, speed, False

    def _takes(self, schedule: Schedule) -> float | Failure:
        if self.speed.broken is not None:
            return self.speed.broken
        lanes_us = self.speed.lanes_us
        return lanes_us if len(set(schedule.lane)) > 1 and lanes_us is not None else self.speed.sequential_us

    def solo(self, widths: Sequence[int], *, repeats: int) -> list[list[SoloRecord | Failure]]:
        self.asked_solo += 1
        count = len(self.program.graph)
        time_us = self.speed.sequential_us / count
        samples = Samples(time_us, time_us, time_us, time_us, time_us, repeats)
        signatures = [operator.signature for operator in self.program.graph.operators]
        return [[SoloRecord(signature, width, samples, Contamination()) for width in widths] for signature in signatures]

    def pairs(self, pairs: Sequence[Pair], *, repeats: int) -> list[PairRecord | Failure]:
        return [Failure(FailureKind.UNAVAILABLE, "not on this double")] * len(pairs)

    def compare(self, schedule: Schedule, inputs: object, references: object) -> Comparison | Failure:
        return self.speed.wrong or super().compare(schedule, inputs, references)

    def close(self) -> None:
        self.closed = True


class Bench:
    """A device: its speeds by lowering, and what was opened on it."""

    key = DeviceKey("cpu", "double", (("cores", "2"),))
    software = SoftwareKey((("torch", "0"),))

    def __init__(self, **speeds: Speed) -> None:
        self.speeds = speeds
        self.sessions: dict[str, Session] = {}

    def open(self, program: Program, constants: Mapping[int, torch.Tensor], *, timeout_s: float) -> Session:
        session = Session(program, self.speeds[program.lowering])
        self.sessions[program.lowering] = session
        return session


def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by how often it is looked at: however long a busy machine takes to export a model, shares stay what they are."""
    looks = itertools.count(1000.0, 1e-4)
    monkeypatch.setattr(time, "monotonic", lambda: next(looks))


def comparing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[..., TuneReport]:
    """``pipeline.compare`` on a bench; ``refuse`` says what becomes of a lowering in the place of its capture."""
    runs = itertools.count()
    # The model as it came is no part of the choice, and would be timed for real.
    monkeypatch.setattr(baselines, "eager_externals", lambda *call: contextlib.nullcontext([]))
    monkeypatch.setattr(granularity, "missing_compiler", lambda kind: "")

    def run(
        bench: Bench, model: nn.Module | None = None, refuse: Mapping[str, str | NotHad | AutoschedError] | None = None, **options: Any
    ) -> TuneReport:
        def capture_as(lowering: Lowering, original: Original, device: Device, limit_s: float | None = None) -> Any:
            answer = (refuse or {}).get(lowering)
            if isinstance(answer, AutoschedError):
                raise answer
            if answer is not None:
                return answer if isinstance(answer, NotHad) else NotHad(answer)
            # Inductor's launches are not what is tested here: the calls stand in for them.
            found = lower_draft(original.draft(), Lowering.ATEN if lowering in WHOLE else lowering)
            return dataclasses.replace(found, program=dataclasses.replace(found.program, lowering=str(lowering)))

        monkeypatch.setattr(preparing, "capture_as", capture_as)
        # Operators of one signature take what this bench says, not what an earlier one did.
        monkeypatch.setenv("AUTOSCHED_CACHE", str(folder / str(next(runs))))
        for room in (contest, job):
            monkeypatch.setattr(room, "open_device", lambda name: bench)
        monkeypatch.setattr("autosched.pipeline.replaying.open_device", lambda name: bench)
        asked: dict[str, Any] = {"effort": "quick", "strategies": ["critical_path", "wavefront"], "compiled": False, **options}
        return pipeline.compare(model or Chain(), (torch.randn(8, 8),), device="cpu", **asked)

    return run


def rows(report: TuneReport) -> dict[str, LoweringRow]:
    return {row.lowering: row for row in report.lowerings}
