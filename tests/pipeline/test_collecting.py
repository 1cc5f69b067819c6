"""What a collection does with its time. The clock is the test's; nothing is measured."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from autosched.core.errors import UnsupportedGraph, UsageError, WorkerLost
from autosched.core.program import Program
from autosched.core.records import Contamination, Engine, Failure, FailureKind, Samples, ScheduleRecord, SoloRecord
from autosched.core.schedule import Schedule, canonical_key, sequential
from autosched.datasets.schema import ScopeRow
from autosched.datasets.store import Store
from autosched.pipeline import collecting
from autosched.pipeline.collecting import Subject, collect
from autosched.pipeline.measuring import cost_table
from autosched.pipeline.schedule_runs import measure_schedules
from autosched.pipeline.scope import scope_row
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.search.compiled.ready import load_searches
from autosched.search.problem import Problem
from tests.conformance.graphs import TwoBranches, two_branches_program
from tests.conformance.precision import rounding
from tests.conformance.session_double import SessionDouble

PROGRAM = two_branches_program(TwoBranches())[0]


class Device:
    key, software = cpu_device_key(), software_key()

    def open(self, *_: object, **__: object) -> SessionDouble:
        return SessionDouble(lambda schedule: 1.0)


def test_a_folder_that_cannot_be_is_named_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setattr(collecting, "ready_lanes", None)  # nor is anything compiled
    for folder in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(UsageError, match=r"cannot write runs to .*file"):
            collect([Subject("a", TwoBranches(), (), {})], folder, device="cpu")


def test_a_store_that_this_user_may_not_add_to_is_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store.create(tmp_path / "runs")
    monkeypatch.setattr(collecting, "os", SimpleNamespace(W_OK=os.W_OK, X_OK=os.X_OK, access=lambda place, _: place.name != "pairs"))
    with pytest.raises(UsageError, match=r"cannot write runs to .*runs: its permissions"):
        collect([Subject("a", TwoBranches(), (), {})], tmp_path / "runs", device="cpu")


@pytest.mark.parametrize(("each_s", "begun", "unfinished"), [(90.0, 1, 2), (40.0, 2, 1), (15.0, 3, 0)])
def test_a_model_whose_turn_comes_when_the_time_is_up_is_not_begun_but_named(
    each_s: float, begun: int, unfinished: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    asked: list[str] = []

    def collect_graph(*_: object, name: str, **__: object) -> SimpleNamespace:
        nonlocal now_s
        now_s += each_s
        asked.append(name)
        return SimpleNamespace(kept=2, disturbed=0, failures=0, finished=True)

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(collecting, "collect_graph", collect_graph)
    monkeypatch.setattr(collecting, "device_named", lambda name: Device())
    monkeypatch.setattr(collecting, "capture", lambda *_, **__: SimpleNamespace(program=PROGRAM, constants={}))
    subjects = [Subject(name, TwoBranches(), (), {}) for name in ("a", "b", "c")]
    found = collect(subjects, tmp_path / "runs", device="cpu", budget_s=60.0)
    assert asked == ["a", "b", "c"][:begun]
    assert found.unfinished == ("a", "b", "c")[begun:]
    assert len(found.unfinished) == unfinished
    assert ("run the command again to continue" in found.summary()) == bool(unfinished)


@pytest.mark.parametrize("died", ["ab", "a", "b", ""])
def test_a_model_whose_process_is_lost_is_left_out_and_the_others_go_on(died: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def collect_graph(*_: object, name: str, **__: object) -> SimpleNamespace:
        if name in died:
            raise WorkerLost(f"the process of {name} died")
        return SimpleNamespace(kept=2, disturbed=0, failures=0, finished=True)

    monkeypatch.setattr(collecting, "collect_graph", collect_graph)
    monkeypatch.setattr(collecting, "device_named", lambda name: Device())
    monkeypatch.setattr(collecting, "capture", lambda *_, **__: SimpleNamespace(program=PROGRAM, constants={}))
    subjects = [Subject(name, TwoBranches(), (), {}) for name in "ab"]
    if died == "ab":
        with pytest.raises(WorkerLost, match="the process of b died"):
            collect(subjects, tmp_path / "runs", device="cpu", budget_s=60.0)
        return
    found = collect(subjects, tmp_path / "runs", device="cpu", budget_s=60.0)
    assert found.not_measured == tuple(died)
    assert found.kept == 2 * (2 - len(died))
    assert all(f"{name} left out: the process of {name} died" in found.left_out for name in died)


def test_a_model_that_its_device_cannot_hold_is_left_out_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Gpu(Device):
        def start_early(self, *, timeout_s: float, compiling: bool = False) -> None:
            said.append("start")

        def drop_early(self) -> None:
            said.append("drop")

        def open(self, program: Program, *_: object, **__: object) -> SessionDouble:
            said.append("open")
            if program is held:
                return super().open()
            raise UnsupportedGraph("operator nonzero waits for the device")

    def capture(model: object, args: tuple[str, ...], kwargs: object, *, target: str) -> SimpleNamespace:
        said.append("capture")
        if args == ("a",):
            raise UnsupportedGraph("it cannot be exported")
        return SimpleNamespace(program=held if args == ("c",) else PROGRAM, constants={})

    held = dataclasses.replace(PROGRAM)
    done = SimpleNamespace(kept=2, disturbed=0, failures=0, finished=True)
    monkeypatch.setattr(collecting, "collect_graph", lambda *_, **__: done)
    monkeypatch.setattr(collecting, "device_named", lambda name: Gpu())
    monkeypatch.setattr(collecting, "capture", capture)
    found = collect([Subject(name, TwoBranches(), (name,), {}) for name in "abc"], tmp_path / "runs", device="cpu", budget_s=60.0)
    assert (found.not_measured, found.kept) == (("a", "b"), 2)
    assert "b left out: operator nonzero waits for the device" in found.left_out
    assert " ".join(said) == "start capture drop start capture open drop start capture open"


def test_what_became_of_a_run_is_added_up_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_one = SimpleNamespace(kept=12, disturbed=5, failures=4, finished=False)
    monkeypatch.setattr(collecting, "collect_graph", lambda *_, **__: of_one)
    monkeypatch.setattr(collecting, "device_named", lambda name: Device())
    monkeypatch.setattr(collecting, "capture", lambda *_, **__: SimpleNamespace(program=PROGRAM, constants={}))
    found = collect([Subject(name, TwoBranches(), (), {}) for name in "ab"], tmp_path / "runs", device="cpu", budget_s=60.0)
    assert (found.kept, found.disturbed, found.failures, found.unfinished) == (24, 10, 8, ("a", "b"))
    assert "10 measurements were disturbed" in found.summary()
    assert f"8 measurements failed: {tmp_path / 'runs'}/failures.jsonl" in found.summary()
    one = dataclasses.replace(found, disturbed=1, failures=1).summary()
    assert "1 measurement was disturbed" in one
    assert "1 measurement failed" in one


@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("engine", list(Engine))
def test_a_model_on_lanes_of_python_beside_native_ones_is_named(
    engine: Engine, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Native(Device):
        software = Device.software.on(engine)

    scopes: list[ScopeRow] = []

    def collect_graph(session: object, graph: object, store: object, scope: ScopeRow, **_: object) -> SimpleNamespace:
        scopes.append(scope)
        return SimpleNamespace(kept=2, disturbed=0, failures=0, finished=True)

    monkeypatch.setattr(collecting, "collect_graph", collect_graph)
    monkeypatch.setattr(collecting, "device_named", lambda name: Native())
    monkeypatch.setattr(collecting, "ready_lanes", lambda kind, progress: "")
    monkeypatch.setattr(collecting, "capture", lambda *_, **__: SimpleNamespace(program=PROGRAM, constants={}))
    with rounding():
        torch.set_float32_matmul_precision(precision)
        found = collect([Subject("a", TwoBranches(), (), {})], tmp_path / "runs", device="cpu", budget_s=60.0)
    # The double's lanes are Python's.
    assert [scope.software.engine for scope in scopes] == [Engine.PYTHON]
    assert any("a has an operator that native lanes do not take" in line for line in found.left_out) == (engine is Engine.NATIVE)


class Schedules(SessionDouble):
    """Every second schedule is timed while others have the cores."""

    def schedules(self, schedules: Sequence[Schedule], **options: Any) -> list[ScheduleRecord | Failure]:
        found: list[ScheduleRecord | Failure] = []
        for place, (schedule, item) in enumerate(zip(schedules, super().schedules(schedules, **options), strict=True)):
            assert isinstance(item, ScheduleRecord)
            key = canonical_key(PROGRAM.graph, schedule, lanes_matter=True)
            found.append(dataclasses.replace(item, key=key, contamination=Contamination(0.9 * (place % 2))))
        return found


def problem_of(session: SessionDouble, *, timed_at: Sequence[int] = (1, 2)) -> Problem:
    graph, missing = PROGRAM.graph, Failure(FailureKind.UNAVAILABLE, "not recorded")

    def record(signature: str, width: int) -> SoloRecord:
        time_us = 10.0 / width
        return SoloRecord(signature, width, Samples(time_us, time_us, time_us, time_us, time_us, 9), Contamination(0.0))

    solo = [[record(item.signature, width) if width in timed_at else missing for width in (1, 2)] for item in graph.operators]
    return Problem.make(graph, cost_table(session, graph, Device.key, solo, [], {}))


# A minute is what numba takes to compile the searches in a fresh checkout on a busy machine: they are loaded first, as `collect` does.
@pytest.mark.parametrize(("budget_s", "finished"), [(60.0, True), (0.0, False)])
def test_disturbed_schedules_are_counted_and_those_without_time_are_no_end(budget_s: float, finished: bool, tmp_path: Path) -> None:
    load_searches()
    session, store = Schedules(lambda schedule: 1.0), Store.create(tmp_path)
    problem = problem_of(session)
    scope = scope_row(Device(), session.limits)  # type: ignore[arg-type]
    given: dict[str, Any] = {"model": "zoo:net1", "predictor": "analytic", "most": 6, "budget_s": budget_s, "rng": np.random.default_rng(0)}
    timed = measure_schedules(session, problem, store, scope, **given)
    assert timed.finished is finished
    assert timed.added == len(store.schedules()) > 0
    assert timed.disturbed > 0
    assert timed.added + timed.disturbed == (6 if finished else 3)


def test_what_has_no_time_at_a_width_is_no_costed_schedule_and_none_is_recorded_of_it(tmp_path: Path) -> None:
    """Where others have one of two cores, nothing is kept of operators on both: what stands for their times is no prediction."""
    load_searches()
    graph, session = PROGRAM.graph, Schedules(lambda schedule: 1.0)
    wide, scope = sequential(graph, width=2), scope_row(Device(), session.limits)  # type: ignore[arg-type]
    given: dict[str, Any] = {"model": "zoo:net1", "predictor": "analytic", "most": 6, "budget_s": 60.0, "keep_disturbed": True}
    for timed_at in ((1,), (1, 2)):
        problem = problem_of(session, timed_at=timed_at)
        assert problem.is_costed(sequential(graph))
        assert problem.is_costed(wide) is (2 in timed_at)
        store = Store.create(tmp_path / str(len(timed_at)))
        measure_schedules(session, problem, store, scope, rng=np.random.default_rng(0), **given)
        assert any(2 in row.schedule.width for row in store.schedules()) is (2 in timed_at)
        assert max(row.predicted_us for row in store.schedules()) < 1000.0
