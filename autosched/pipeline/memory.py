"""What jobs leave to each other: the journal of measurements, and the runs that a cost model learns from."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from autosched.config import measurements_dir, runs_dir
from autosched.core.errors import AutoschedError, IncompatibleArtifact
from autosched.core.graph import OpGraph
from autosched.core.records import Contamination, Engine, Failure, PairRecord, ScheduleRecord, SoloRecord
from autosched.core.scratch import Scratch
from autosched.core.variants import operator_signature
from autosched.datasets.collect import rows_of_tuning
from autosched.datasets.facts import LaunchFacts
from autosched.datasets.journal import Journal, Scope
from autosched.datasets.schema import GraphRow, ScheduleRow, ScopeRow
from autosched.datasets.splits import family_of
from autosched.datasets.store import Store
from autosched.device.base import Device, Limits
from autosched.pipeline.candidates import Candidate
from autosched.pipeline.judge import Times
from autosched.pipeline.schedule_runs import limits_row, schedule_row
from autosched.pipeline.scope import software_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a job measured of a graph's parts, under the names of ``core.variants.variant_signature``.

    Args:
        solo: by operator all that was measured of it alone.
        pairs: of this graph's operators and of others.
        launches: how the kernels are launched, where the device can tell.
    """

    solo: Sequence[Sequence[SoloRecord | Failure]]
    pairs: Sequence[PairRecord]
    launches: Mapping[str, LaunchFacts]


def open_journal(scope: Scope, *, private: bool) -> Journal:
    """The journal of what is measured in ``scope``; ``private`` gives one that nobody reads later, for what is not measured."""
    path = _journal_path(scope)
    if not private:
        try:
            return Journal.open(path, scope)
        except OSError as error:
            # A job must not fail for want of a place to remember in; it only cannot be resumed.
            _log.warning("measurements are not kept: %s cannot be written (%s); set AUTOSCHED_CACHE to a folder that can", path, error)
        except IncompatibleArtifact as error:
            # Several versions may share one cache folder.
            _log.warning("measurements are not kept, nor those of earlier jobs used: %s", error)
    return _private_journal(path.name, scope)


_forgotten: ContextVar[set[Path] | None] = ContextVar("journals begun anew", default=None)


@contextlib.contextmanager
def forgetting_once() -> Iterator[None]:
    """Within, :func:`forget_measurements` forgets a device only once: what one of several jobs measures is for those after it."""
    token = _forgotten.set(set())
    try:
        yield
    finally:
        _forgotten.reset(token)


def forget_measurements(device: Device) -> None:
    """Begin the journals of a device anew, under the settings of this process and whatever runs the lanes of a program."""
    begun = _forgotten.get()
    for engine in Engine:
        path = _journal_path(Scope(device.key, software_of(device).on(engine)))
        if begun is not None:
            if path in begun:
                continue
            begun.add(path)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("what was measured before is not forgotten: %s cannot be removed (%s)", path, error)


def _journal_path(scope: Scope) -> Path:
    return measurements_dir() / f"{scope.digest}.jsonl"


def _private_journal(name: str, scope: Scope) -> Journal:
    """Gone with its object, and if this process is killed, with the next one."""
    scratch = Scratch()
    journal = Journal.open(scratch.path / name, scope)
    weakref.finalize(journal, scratch.close)
    return journal


def remember_runs(
    device: ScopeRow,
    graph: OpGraph,
    model: str,
    limits: Limits,
    measured: Measured,
    timed: Sequence[ScheduleRow],
) -> Path | None:
    """Add what a job measured to the runs of this device that ``autosched train`` learns from; ``None`` if it cannot be written."""
    folder = runs_dir() / device.device.digest
    of_graph = {operator.signature for operator in graph.operators}
    pairs = [pair for pair in measured.pairs if {operator_signature(pair.first), operator_signature(pair.last)} <= of_graph]
    rows = rows_of_tuning(graph, device, model=model, solo=measured.solo, pairs=pairs, launches=measured.launches)
    try:
        Store.create(folder).append(
            [*rows, *timed, GraphRow(family_of(model), model, graph), limits_row(device.scope, model, graph, limits)]
        )
    except (OSError, MemoryError, AutoschedError) as error:
        _log.warning("what was measured is not kept for training: %s", str(error) or "there was no memory for it")
        return None
    return folder


def timed_schedules(
    scope: str,
    graph: OpGraph,
    model: str,
    predictor: str,
    groups: Mapping[str, Sequence[Candidate]],
    times: Times,
    peaks: Mapping[str, int | None],
) -> list[ScheduleRow]:
    """The schedules of a final comparison as rows; ``groups`` are by canonical key, ``peaks`` are bytes by strategy."""
    rows = []
    for key, group in groups.items():
        first = group[0]
        samples = times.samples(first.name)
        if samples is None:
            continue
        record = ScheduleRecord(key, samples, peaks.get(first.name) or 0, Contamination())
        rows.append(
            schedule_row(scope, model, graph, first.name, first.is_baseline, first.schedule, (first.predicted_us, predictor), record)
        )
    return rows
