"""Whatever proofs and turns take, a job ends with its budget, or with the least verdict; and the least verdict is never cut. The clock is
the test's: it moves only when the device double works."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.program import Program
from autosched.core.progress import Silent
from autosched.core.records import (
    Contamination,
    DeviceKey,
    Failure,
    FailureKind,
    PairRecord,
    Samples,
    ScheduleRecord,
    SoftwareKey,
    SoloRecord,
)
from autosched.core.report import LoweringOutcome, TuneReport
from autosched.core.schedule import Schedule
from autosched.core.variants import Lowering
from autosched.device.base import Comparison, Pair
from autosched.pipeline import baselines, contest
from autosched.pipeline.budget import budget_for
from autosched.pipeline.contest import run_contest
from autosched.pipeline.granularity import Considered
from autosched.pipeline.job import Job
from autosched.pipeline.judge import LEAST_DUEL, LEAST_ROUNDS
from autosched.pipeline.left_out import LeftOut, left_out_sentence
from autosched.pipeline.options import Options
from autosched.pipeline.preparing import Prepared
from tests.conformance.session_double import SessionDouble


class Clock:
    """``time.monotonic`` of the test."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Wide(nn.Module):
    """Six branches: every scheduler has something of its own to propose."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.mm(x, x) + index for index in range(6)]
        for index in range(1, 5):
            parts[index] = torch.relu(torch.mm(parts[index], parts[index - 1] if index % 2 else x))
        return torch.stack(parts).sum(0)


class Slow(SessionDouble):
    """Takes ``proof_s`` for a proof, ``turn_s`` for each turn of a schedule, and says how often each schedule had its turn."""

    def __init__(self, program: Program, clock: Clock, proof_s: float, turn_s: float) -> None:
        super().__init__(lambda schedule: 1000.0 - 100.0 * len(set(schedule.lane)), noise=0.002)
        self.program, self.clock, self.proof_s, self.turn_s = program, clock, proof_s, turn_s
        self.asked: list[tuple[tuple[Schedule, ...], int]] = []

    def solo(self, widths: Sequence[int], *, repeats: int) -> list[list[SoloRecord | Failure]]:
        self.clock.now_s += self.turn_s * len(widths) * (repeats + 1)
        samples = Samples(100.0, 100.0, 100.0, 100.0, 100.0, repeats)
        return [[SoloRecord(item.signature, width, samples, Contamination()) for width in widths] for item in self.program.graph.operators]

    def pairs(self, pairs: Sequence[Pair], *, repeats: int) -> list[PairRecord | Failure]:
        self.clock.now_s += 1.0
        return [Failure(FailureKind.UNAVAILABLE, "not on this double")] * len(pairs)

    def compare(self, schedule: Schedule, inputs: object, references: object) -> Comparison | Failure:
        self.clock.now_s += self.proof_s
        return super().compare(schedule, inputs, references)

    def paired(self, schedules: Sequence[Schedule], *, rounds: int) -> list[list[float]] | Failure:
        self.clock.now_s += self.turn_s * len(schedules) * rounds
        self.asked.append((tuple(schedules), rounds))
        return super().paired(schedules, rounds=rounds)

    def schedules(
        self, schedules: Sequence[Schedule], *, rounds: int, trace: bool = False, min_block_us: float = 0.0
    ) -> list[ScheduleRecord | Failure]:
        self.clock.now_s += self.turn_s * len(schedules) * rounds
        return super().schedules(schedules, rounds=rounds, trace=trace, min_block_us=min_block_us)


class Device:
    """Opens nothing: the session is given."""

    key = DeviceKey("cpu", "double", (("cores", "2"),))
    software = SoftwareKey((("torch", "0"),))

    def open(self, program: Program, constants: Mapping[int, torch.Tensor], *, timeout_s: float) -> Slow:
        raise AssertionError("the lowering is prepared")


@dataclasses.dataclass(frozen=True)
class Found:
    """A finished job: its report, what it asked the device, and the seconds it took."""

    report: TuneReport
    session: Slow
    took_s: float
    left_out: tuple[LeftOut, ...]


Tuning = Callable[..., Found]


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tuning:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))
    monkeypatch.setattr(baselines, "eager_externals", lambda *call: contextlib.nullcontext([]))
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    model, args = Wide(), (torch.randn(4, 4),)
    captured = capture(model, args, lowering=Lowering.ATEN)

    def run(
        proof_s: float, turn_s: float, *, total_s: float = 60.0, meet: Callable[[Slow], object] = lambda session: None, **changes: Any
    ) -> Found:
        session = Slow(captured.program, clock, proof_s, turn_s)
        meet(session)
        preset = budget_for("quick", total_s)
        budget = dataclasses.replace(preset, search=dataclasses.replace(preset.search, evaluations=300))
        options = Options("cpu", "quick", budget, 0, Lowering.ATEN, True, None, True, False, "m")
        options = dataclasses.replace(options, **changes)
        prepared = Prepared(captured, Device(), session, (), 0.0)  # type: ignore[arg-type]
        begin_s = clock()
        outcome = Job(model, args, None, options, Silent(), prepared).run()
        return Found(outcome.report, session, clock() - begin_s, outcome.left_out)

    return run


@dataclasses.dataclass(frozen=True)
class Preparing:
    """What preparing a lowering takes: what a compiler needs, of which its limit lets it have no more, and what no limit ends."""

    compiled_s: float
    rest_s: float


@pytest.fixture
def contest_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Preparing], Found]:
    """A contest of a model like GoogLeNet on a CPU of two cores: 0.3 s for a proof, 0.06 s for a turn."""
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))
    monkeypatch.setattr(baselines, "eager_externals", lambda *call: contextlib.nullcontext([]))
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    device = Device()
    monkeypatch.setattr(contest, "open_device", lambda name: device)
    model, args = Wide(), (torch.randn(4, 4),)
    captured = capture(model, args, lowering=Lowering.ATEN)

    def run(takes: Preparing) -> Found:
        ready_s: list[float] = []
        sessions: list[Slow] = []

        def prepare(lowering: Lowering, *call: Any, limit_s: float | None = None) -> Prepared:
            begin_s = clock()
            clock.now_s += takes.rest_s + (min(takes.compiled_s, limit_s) if limit_s is not None else 0.0)
            ready_s.append(clock())
            program = dataclasses.replace(captured.program, lowering=str(lowering))
            sessions.append(Slow(program, clock, 0.3, 0.06))
            return Prepared(dataclasses.replace(captured, program=program), device, sessions[-1], (), clock() - begin_s)  # type: ignore[arg-type]

        monkeypatch.setattr(contest, "prepare", prepare)
        preset = budget_for("quick")
        budget = dataclasses.replace(preset, search=dataclasses.replace(preset.search, evaluations=300))
        options = Options("cpu", "quick", budget, 0, Lowering.REWRITTEN, True, None, True, False, "m")
        choice = Considered((Lowering.REWRITTEN, Lowering.FUSED, Lowering.INDUCTOR), (), chosen=True)
        outcome = run_contest(model, args, None, options, choice, Silent())
        return Found(outcome.report, sessions[0], clock() - ready_s[0], outcome.left_out)

    return run


def timed(report: TuneReport) -> list[str]:
    return [row.name for row in report.strategies if row.measured_us is not None]


def test_a_fast_model_leaves_nothing_out_and_ends_early(tuned: Tuning) -> None:
    found = tuned(0.001, 0.0005)
    assert found.took_s < 60.0
    assert found.left_out == ()
    assert {"sequential", "sequential_wide", "opara", "ios", "portfolio", "tuned"} <= set(timed(found.report))


@pytest.mark.parametrize(("proof_s", "turn_s"), [(0.3, 0.06), (0.1, 0.1), (1.0, 0.05), (2.0, 0.02), (0.05, 0.2), (0.4, 0.25)])
def test_a_slow_model_ends_with_its_budget_and_says_what_it_left_out(tuned: Tuning, proof_s: float, turn_s: float) -> None:
    found = tuned(proof_s, turn_s)
    assert found.took_s <= 60.0 * 1.15
    names = timed(found.report)
    assert {"sequential", "sequential_wide"} <= set(names)
    assert found.report.chosen not in ("sequential", "sequential_wide")
    assert found.report.search_s == pytest.approx(found.took_s)


@pytest.mark.parametrize(("proof_s", "turn_s"), [(0.3, 0.06), (1.0, 0.05), (0.05, 0.2)])
@pytest.mark.parametrize("total_s", [15.0, 25.0])
def test_what_is_left_after_compiling_is_kept_too(tuned: Tuning, proof_s: float, turn_s: float, total_s: float) -> None:
    found = tuned(proof_s, turn_s, total_s=total_s)
    least_s = turn_s * (LEAST_ROUNDS * 5 + 3 * LEAST_DUEL + 30) + 3 * proof_s + 2.0
    assert found.took_s <= max(total_s * 1.15, least_s)


def test_with_no_time_at_all_the_least_verdict_is_whole(tuned: Tuning) -> None:
    found = tuned(0.3, 0.06, total_s=0.0)
    names = timed(found.report)
    assert {"sequential", "sequential_wide"} <= set(names)
    assert len(names) > 2
    duels = [rounds for schedules, rounds in found.session.asked if len(schedules) == 3 and schedules[1] == schedules[2]]
    assert sum(duels) >= LEAST_DUEL
    assert found.report.chosen not in ("sequential", "sequential_wide")
    left_out = {item.what.partition(" (")[0]: item.more_s for item in found.left_out}
    assert any(what.startswith("proving and measuring") for what in left_out)
    assert left_out["the device loop"] > 0.0


@pytest.mark.parametrize("total_s", [0.0, 10.0, 20.0, 60.0])
def test_nobody_is_compared_on_fewer_rounds_than_the_least(tuned: Tuning, total_s: float) -> None:
    found = tuned(0.2, 0.1, total_s=total_s)
    # The anchor stands twice in each round of the final comparison: last and at its own place.
    finals = [(schedules, rounds) for schedules, rounds in found.session.asked if len(schedules) > 3 and schedules[-1] in schedules[:-1]]
    assert len({schedules for schedules, _ in finals}) == 1
    assert sum(rounds for _, rounds in finals) >= LEAST_ROUNDS


def test_a_table_of_everything_leaves_nothing_out(tuned: Tuning) -> None:
    asked = ("critical_path", "wavefront", "opara", "nimble", "ios")
    found = tuned(2.0, 0.3, strategies=asked, refine=False, complete=True)
    assert set(asked) <= set(timed(found.report))
    assert found.took_s > 60.0


def test_who_was_measured_fastest_before_is_in_a_final_that_has_little_room(tuned: Tuning) -> None:
    found = tuned(0.05, 0.2, total_s=45.0)
    assert "tuned" in timed(found.report)
    left_out = next(item.what for item in found.left_out if "in the final comparison" in item.what)
    assert not set(left_out.partition("(")[2].removesuffix(")").split(", ")) & set(timed(found.report))


@pytest.mark.parametrize(("proof_s", "turn_s"), [(0.3, 0.06), (0.1, 0.1), (1.0, 0.05)])
def test_the_budget_that_is_named_includes_what_was_left_out(tuned: Tuning, proof_s: float, turn_s: float) -> None:
    found = tuned(proof_s, turn_s, total_s=20.0)
    assert found.left_out
    sentence = left_out_sentence(found.left_out, 20.0)
    named_s = float(sentence.partition("--budget ")[2].partition("s ")[0])
    again = tuned(proof_s, turn_s, total_s=named_s)
    assert set(timed(found.report)) < set(timed(again.report))
    assert not [item.what for item in again.left_out if "strategies" in item.what]
    assert "tuned" in timed(again.report)


class Killed(BaseException):
    """The job was killed."""


@pytest.mark.parametrize(("failure", "again"), [(FailureKind.TIMEOUT, False), (FailureKind.CRASH, False), (FailureKind.MISMATCH, True)])
def test_what_cost_an_interrupted_job_its_process_is_not_proved_again(
    tuned: Tuning, monkeypatch: pytest.MonkeyPatch, failure: FailureKind, again: bool
) -> None:
    """Each time takes a process's start, or its time limit; a sequential schedule is proved all the same."""
    asked = ("wavefront", "opara")
    sessions: list[Slow] = []

    def meet(session: Slow) -> None:
        compare = session.compare
        sessions.append(session)

        def failing(schedule: Schedule, inputs: object, references: object) -> Comparison | Failure:
            found = compare(schedule, inputs, references)
            guilty = len(set(schedule.lane)) > 1 or (len(sessions) == 1 and max(schedule.width) > 1)
            return Failure(failure, "it is gone") if guilty else found

        monkeypatch.setattr(session, "compare", failing)

    def killed(*call: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("autosched.pipeline.job._refined", killed)
        with pytest.raises(Killed):
            tuned(0.01, 0.001, meet=meet, strategies=asked, fresh=False)
    found = tuned(0.01, 0.001, meet=meet, strategies=asked, fresh=False)
    first, second = (session.compared for session in sessions)
    spread = [schedule for schedule in first if len(set(schedule.lane)) > 1]
    assert spread
    assert all((schedule in second) == again for schedule in spread)
    rows = {row.name: row.failure for row in found.report.strategies}
    assert rows["sequential"] is rows["sequential_wide"] is None
    assert all(rows[name] == Failure(failure, "it is gone") for name in asked)


def test_what_an_interrupted_job_had_no_time_to_prove_is_proved(tuned: Tuning, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*call: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("autosched.pipeline.job._refined", killed)
        with pytest.raises(Killed):
            tuned(5.0, 0.06, total_s=1.0, fresh=False)
    found = tuned(0.01, 0.001, fresh=False)
    assert {"wavefront", "opara", "ios"} <= set(timed(found.report))


@pytest.mark.parametrize("rest_s", [2.0, 5.0, 10.0, 15.0])
@pytest.mark.parametrize("compiled_s", [3.0, 12.0, 100.0])
def test_a_contest_of_lowerings_ends_with_its_budget(contest_of: Callable[[Preparing], Found], compiled_s: float, rest_s: float) -> None:
    found = contest_of(Preparing(compiled_s, rest_s))
    assert found.took_s <= 60.0 * 1.15
    assert found.report.search_s == pytest.approx(found.took_s)
    assert {"sequential", "sequential_wide"} <= set(timed(found.report))
    assert len(timed(found.report)) > 2


def test_a_lowering_whose_capture_alone_needs_what_is_left_is_not_begun(contest_of: Callable[[Preparing], Found]) -> None:
    found = contest_of(Preparing(100.0, 15.0))
    outcomes = {row.lowering: row.outcome for row in found.report.lowerings}
    assert outcomes["inductor"] is LoweringOutcome.SKIPPED
    assert outcomes["fused"] is not LoweringOutcome.SKIPPED
    assert "the lowering inductor" in [item.what for item in found.left_out]
    found = contest_of(Preparing(100.0, 40.0))
    outcomes = {row.lowering: row.outcome for row in found.report.lowerings}
    assert outcomes["inductor"] is outcomes["fused"] is LoweringOutcome.SKIPPED
