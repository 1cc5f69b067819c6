"""A timeline that Perfetto and Chrome open: one track for each lane, the planned run above the measured one, waits as arrows.

*Source:* Trace Event Format (Google, 2016): complete events ``X``, metadata ``M``, flows ``s`` and ``f``; times in microseconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from autosched.core.atomic_write import write_atomically
from autosched.core.errors import UsageError, why_of
from autosched.core.graph import OpGraph
from autosched.core.schedule import Schedule
from autosched.runtime.bundle.format import OperatorTimes
from autosched.runtime.plan import Plan, make_plan

_PLANNED = 1
_MEASURED = 2


class _Event(msgspec.Struct, frozen=True, omit_defaults=True):
    ph: str
    pid: int
    tid: int
    name: str
    cat: str = ""
    ts: float = -1.0
    dur: float = -1.0
    id: int = -1
    bp: str = ""
    args: dict[str, str | int | float] = {}


class _Trace(msgspec.Struct, frozen=True):
    traceEvents: list[_Event]
    displayTimeUnit: str = "ns"


def trace_json(graph: OpGraph, schedule: Schedule, *, planned: OperatorTimes | None = None, measured: OperatorTimes | None = None) -> bytes:
    """The timeline as JSON.

    Args:
        planned, measured: start and end of each operator in microseconds; left out where ``None`` or empty.

    Raises:
        UsageError: if neither holds times, or their number is not that of the operators.
        IllegalSchedule: if the schedule is not one of the graph.
    """
    given = {_PLANNED: planned or OperatorTimes(), _MEASURED: measured or OperatorTimes()}
    for times in given.values():
        if len(times.start_us) != len(times.end_us) or len(times.start_us) not in (0, len(graph)):
            raise UsageError(f"times of {len(times.start_us)} operators for a graph of {len(graph)}; trace the schedule again")
    if not any(times.start_us for times in given.values()):
        raise UsageError("neither planned nor measured times are known; trace the schedule on its device first ('autosched trace')")
    plan = make_plan(graph, schedule)
    events: list[_Event] = []
    for process, times in given.items():
        if times.start_us:
            events += _tracks(process, plan)
            events += _operators(process, graph, plan, given)
            events += _waits(process, plan, times)
    return msgspec.json.encode(_Trace(events))


def write_trace(
    path: str | os.PathLike[str],
    graph: OpGraph,
    schedule: Schedule,
    *,
    planned: OperatorTimes | None = None,
    measured: OperatorTimes | None = None,
) -> None:
    """Write :func:`trace_json` to ``path``.

    Raises:
        UsageError: as :func:`trace_json`, or if the file cannot be written.
    """
    data = trace_json(graph, schedule, planned=planned, measured=measured)
    try:
        write_atomically(Path(path), data)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {os.fspath(path)}: {why_of(error)}. Choose a folder that exists and is writable.") from error


def _tracks(process: int, plan: Plan) -> Iterator[_Event]:
    title = "planned" if process == _PLANNED else "measured"
    yield _Event("M", process, 0, "process_name", args={"name": title})
    yield _Event("M", process, 0, "process_sort_index", args={"sort_index": process})
    for lane in sorted({step.lane for step in plan.steps}):
        yield _Event("M", process, lane, "thread_name", args={"name": f"lane {lane}"})
        yield _Event("M", process, lane, "thread_sort_index", args={"sort_index": lane})


def _operators(process: int, graph: OpGraph, plan: Plan, given: dict[int, OperatorTimes]) -> Iterator[_Event]:
    times = given[process]
    for place, step in enumerate(plan.steps):
        operator = graph.operators[step.operator]
        start, end = times.start_us[step.operator], times.end_us[step.operator]
        facts: dict[str, str | int | float] = {
            "operator": step.operator,
            "launch": place,
            "width": step.width,
            "priority": step.priority,
            "variant": step.variant,
            "flops": operator.flops,
            "bytes": operator.bytes_read + operator.bytes_written,
            "waits_for": ", ".join(graph.operators[producer].name for producer in step.waits),
        }
        if operator.source:
            facts["source"] = operator.source
        other = given[_MEASURED if process == _PLANNED else _PLANNED]
        if other.start_us:
            name = "measured_us" if process == _PLANNED else "planned_us"
            facts[name] = other.end_us[step.operator] - other.start_us[step.operator]
        yield _Event("X", process, step.lane, operator.name, operator.kind, start, max(0.0, end - start), args=facts)


def _waits(process: int, plan: Plan, times: OperatorTimes) -> Iterator[_Event]:
    lane_of = {step.operator: step.lane for step in plan.steps}
    number = 0
    for step in plan.steps:
        for producer in step.waits:
            # An arrow is tied to the slice that encloses its end, so it leaves just inside the producer's.
            leave = max(times.start_us[producer], times.end_us[producer] - 1e-3)
            # Flow ids are global: the two processes must not share them.
            flow = number * 2 + process
            yield _Event("s", process, lane_of[producer], "wait", "wait", leave, id=flow)
            yield _Event("f", process, step.lane, "wait", "wait", times.start_us[step.operator], id=flow, bp="e")
            number += 1
