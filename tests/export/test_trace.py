"""The timeline: one track for each lane, every operator once in each process, every wait an arrow."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from autosched.core.errors import UsageError
from autosched.core.graph import OpGraph
from autosched.core.schedule import Schedule
from autosched.export.trace import trace_json, write_trace
from autosched.runtime.bundle.format import OperatorTimes
from autosched.runtime.plan import make_plan
from tests.conformance.graphs import random_placement, random_program


@pytest.fixture
def graph() -> OpGraph:
    return random_program(random.Random(6), 15)[0].graph


@pytest.fixture
def schedule(graph: OpGraph) -> Schedule:
    return random_placement(random.Random(6), graph, 3)


def _times(graph: OpGraph, length: float) -> OperatorTimes:
    starts = tuple(float(index * 10) for index in range(len(graph)))
    return OperatorTimes(starts, tuple(start + length for start in starts))


def _events(data: bytes, kind: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(data)["traceEvents"] if event["ph"] == kind]


def test_planned_and_measured_stand_beside_each_other(graph: OpGraph, schedule: Schedule) -> None:
    data = trace_json(graph, schedule, planned=_times(graph, 4.0), measured=_times(graph, 5.0))
    slices = _events(data, "X")
    assert len(slices) == 2 * len(graph)
    for event in slices:
        index = event["args"]["operator"]
        assert event["name"] == graph.operators[index].name
        assert event["tid"] == schedule.lane[index]
        assert event["ts"] == index * 10
        assert event["dur"] == (4.0 if event["pid"] == 1 else 5.0)
        assert event["args"]["measured_us" if event["pid"] == 1 else "planned_us"] == (5.0 if event["pid"] == 1 else 4.0)
    names = {(event["pid"], event["args"]["name"]) for event in _events(data, "M") if event["name"] == "process_name"}
    assert names == {(1, "planned"), (2, "measured")}
    tracks = [event for event in _events(data, "M") if event["name"] == "thread_name"]
    assert len(tracks) == 2 * schedule.lanes


def test_every_wait_is_an_arrow(graph: OpGraph, schedule: Schedule) -> None:
    data = trace_json(graph, schedule, measured=_times(graph, 5.0))
    waits = sum(len(step.waits) for step in make_plan(graph, schedule).steps)
    assert waits > 0
    starts, ends = _events(data, "s"), _events(data, "f")
    assert [event["id"] for event in starts] == [event["id"] for event in ends]
    assert len({event["id"] for event in starts}) == waits
    assert all(first["tid"] != last["tid"] for first, last in zip(starts, ends, strict=True))
    assert {event["pid"] for event in _events(data, "X")} == {2}


def test_times_must_be_known_and_of_this_graph(graph: OpGraph, schedule: Schedule) -> None:
    with pytest.raises(UsageError, match="neither planned nor measured"):
        trace_json(graph, schedule, planned=OperatorTimes())
    with pytest.raises(UsageError, match="times of 1 operators"):
        trace_json(graph, schedule, planned=OperatorTimes((0.0,), (1.0,)))
    times = _times(graph, 1.0)
    with pytest.raises(UsageError, match="trace the schedule again"):
        trace_json(graph, schedule, measured=dataclasses.replace(times, end_us=times.end_us[1:]))


def test_a_trace_is_written_or_the_reason_is_given(graph: OpGraph, schedule: Schedule, tmp_path: Path) -> None:
    write_trace(tmp_path / "t.json", graph, schedule, measured=_times(graph, 5.0))
    assert json.loads((tmp_path / "t.json").read_text())["displayTimeUnit"] == "ns"
    with pytest.raises(UsageError, match="cannot write"):
        write_trace(tmp_path / "absent" / "t.json", graph, schedule, measured=_times(graph, 5.0))
