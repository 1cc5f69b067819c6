"""Jobs on a CPU have the native lanes ready before anything is measured, and what they measure says which lanes it is of."""

from __future__ import annotations

import dataclasses

import pytest

from autosched.core.progress import Silent
from autosched.core.records import DeviceKey, Engine, Failure, SoloRecord
from autosched.core.schedule import sequential
from autosched.device.cpu import CpuDevice
from autosched.pipeline import readiness
from autosched.pipeline.measuring import cost_table
from autosched.pipeline.readiness import ready_lanes
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
