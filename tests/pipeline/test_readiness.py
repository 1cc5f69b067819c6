"""Native lanes and searches are ready before a job measures anything, and what it measures says which lanes it is of."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autosched
from autosched.core.progress import Silent
from autosched.core.records import DeviceKey, Engine, Failure, SoloRecord
from autosched.core.schedule import sequential
from autosched.device.cpu import CpuDevice
from autosched.pipeline import contest, granularity, readiness
from autosched.pipeline.measuring import cost_table
from autosched.pipeline.readiness import begin_searches, ready_lanes, ready_searches
from autosched.search.compiled import ready
from tests.conformance.caches import own_cache
from tests.conformance.programs import branches_program


class _Told(Silent):
    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, name: str, left_s: float | None = None) -> None:
        self.stages.append(name)


def test_building_is_a_stage_and_a_failure_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "native_library", lambda: None)
    monkeypatch.setattr(readiness, "obstacle", lambda: "")
    monkeypatch.setattr(readiness, "build_native", lambda: "g++ failed: no such header")
    told = _Told()
    assert ready_lanes("cpu", told) == "lanes are threads of Python, which share its lock: g++ failed: no such header"
    assert told.stages == ["compiling the native lanes"]
    assert ready_lanes("cuda", told) == ""
    assert len(told.stages) == 1


def test_nothing_is_said_where_they_are_switched_off_or_there(monkeypatch: pytest.MonkeyPatch) -> None:
    told = _Told()
    assert ready_lanes("cpu", told) == ""
    monkeypatch.setattr(readiness, "native_library", object)
    assert ready_lanes("cpu", told) == ""
    assert told.stages == []


def test_searches_that_are_kept_are_loaded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = _Searches(kept=True).installed(monkeypatch)
    told = _Told()
    begin_searches(told)
    assert readiness._compilers == []
    ready_searches(told)
    assert told.stages == ["loading the searches"]
    assert loaded.done


def test_searches_are_compiled_beside_the_job_and_then_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = _Searches(kept=False).installed(monkeypatch)
    told = _Told()
    begin_searches(told)
    processes = [*readiness._compilers]
    assert processes
    begin_searches(told)
    assert readiness._compilers == processes
    assert not searches.done
    ready_searches(told)
    assert searches.done
    assert [process.returncode for process in processes] == [0] * len(processes)
    assert told.stages == ["loading the searches"] * 2
    assert readiness._compilers == []


def test_processes_that_hang_are_ended_and_the_job_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = _Searches(kept=False).installed(monkeypatch)
    monkeypatch.setattr(readiness, "_COMPILING_LIMIT_S", 0.2)
    hanging = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(readiness, "_start_compilers", lambda: readiness._compilers.append(hanging))
    begin_searches(_Told())
    ready_searches(_Told())
    assert hanging.returncode == -signal.SIGKILL
    assert searches.done


@pytest.mark.parametrize("lowering", [None, "rewritten"])
def test_a_job_waits_for_the_searches_before_it_measures_and_outside_its_budget(
    lowering: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path))
    searches = _Searches(kept=False).installed(monkeypatch)
    monkeypatch.setattr(readiness, "_start_compilers", lambda: None)
    monkeypatch.setattr(granularity, "missing_compiler", lambda kind: "none is needed for calls")
    told = _Told()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    call = (torch.zeros(1, 8),)
    report = autosched.tune(model, call, device="cpu", effort="quick", budget_s=2.0, lowering=lowering, progress=told).report
    assert searches.done
    assert told.stages.count("loading the searches") == 2
    at = len(told.stages) - 1 - told.stages[::-1].index("loading the searches")
    assert told.stages[at - 1].startswith(("starting the worker", "compiling regions"))
    assert told.stages[at + 1] == ("reference outputs" if lowering else "other lowerings")
    assert [stage.in_budget for stage in report.stages if stage.name == "loading the searches"] == [False]


def test_a_job_that_fails_leaves_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    _Searches(kept=False).installed(monkeypatch)
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(readiness, "_start_compilers", lambda: readiness._compilers.append(sleeping))

    def broken(*_: object) -> None:
        raise ValueError("no such model")

    monkeypatch.setattr(contest, "run_contest", broken)
    with pytest.raises(ValueError, match="no such model"):
        autosched.tune(torch.nn.Linear(2, 2), (torch.zeros(1, 2),), device="cpu", budget_s=1.0)
    assert sleeping.returncode == -signal.SIGKILL


class _Searches:
    """Searches that this process seems to lack."""

    def __init__(self, *, kept: bool) -> None:
        self.done = False
        self._kept = kept

    def load(self) -> None:
        self.done = True

    def load_kept(self) -> bool:
        self.done = self._kept
        return self._kept

    def installed(self, monkeypatch: pytest.MonkeyPatch) -> _Searches:
        monkeypatch.setattr(ready, "searches_loaded", lambda: self.done)
        monkeypatch.setattr(ready, "load_searches", self.load)
        monkeypatch.setattr(ready, "load_kept", self.load_kept)
        return self


@pytest.mark.usefixtures("native")
def test_the_measuring_process_runs_lanes_as_the_key_says() -> None:
    device = CpuDevice()
    assert device.software.engine is Engine.NATIVE
    program, constants = branches_program()
    with device.open(program, constants, timeout_s=120.0) as session:
        assert session.limits.native_lanes
        solo = session.solo((1,), repeats=2)
        assert all(isinstance(row[0], SoloRecord) for row in solo)
        assert not isinstance(session.paired([sequential(program.graph)], rounds=1), Failure)
        table = cost_table(session, program.graph, device.key, _both_widths(solo, session.limits.widths), (), {})
    # Nobody who polls takes a lock from anybody.
    assert table.polling_us == 0.0


def test_python_lanes_poll() -> None:
    device = CpuDevice()
    assert device.software.engine is Engine.PYTHON
    program, constants = branches_program()
    with device.open(program, constants, timeout_s=120.0) as session:
        assert not session.limits.native_lanes
        solo = session.solo((1,), repeats=2)
        key: DeviceKey = device.key
        table = cost_table(session, program.graph, key, _both_widths(solo, session.limits.widths), (), {})
    assert table.polling_us > 0.0


def _both_widths(solo: list[list[SoloRecord | Failure]], widths: tuple[int, ...]) -> list[list[SoloRecord | Failure]]:
    def at(record: SoloRecord | Failure, width: int) -> SoloRecord | Failure:
        return dataclasses.replace(record, width=width) if isinstance(record, SoloRecord) else record

    return [[at(row[0], width) for width in widths] for row in solo]
