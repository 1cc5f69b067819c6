"""Collecting runs for a cost model: operators, pairs, groups and schedules of some models, into a store, within a time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autosched.capture.export import capture
from autosched.capture.screen import require_operators
from autosched.core.errors import AutoschedError, DeviceError, UsageError, why_of
from autosched.core.graph import OpGraph
from autosched.core.progress import Progress, Silent
from autosched.costmodel.active import ModelUncertainty
from autosched.costmodel.persist import load_model
from autosched.costmodel.trained import TrainedModel
from autosched.datasets.audit import Audit, audit
from autosched.datasets.collect import Collected, collect_model
from autosched.datasets.schema import TABLES, ScopeRow
from autosched.datasets.session_measurer import SessionMeasurer
from autosched.datasets.store import Store
from autosched.device.base import Device, Session, StartsEarly
from autosched.device.registry import device_named
from autosched.pipeline.graph_proofs import launch_facts
from autosched.pipeline.other_work import COLLECT_AGAIN, other_work_note
from autosched.pipeline.readiness import begin_searches, ready_lanes, ready_searches
from autosched.pipeline.replaying import StoreRecording
from autosched.pipeline.schedule_runs import measure_schedules
from autosched.pipeline.scope import scope_row

_TIMEOUT_S = 120.0
_REPEATS = 9
# Share of a model's time that operators, pairs and groups leave to whole schedules, where any are wanted.
_SCHEDULE_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to collect from."""

    name: str
    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Aims:
    """Most rows of each kind that the store should hold of one model afterwards; pairs count each start order.

    ``probes``: whether each kernel's probe runs come first among the pairs, as a device needs that nothing is known of.
    """

    pairs: int = 400
    groups: int = 24
    schedules: int = 12
    probes: bool = False


@dataclass(frozen=True, slots=True)
class Totals:
    """What became of the measurements of one run, over all models."""

    kept: int = 0
    disturbed: int = 0
    failures: int = 0

    def with_those_of(self, done: Collected) -> Totals:
        """These, and one model's."""
        return Totals(self.kept + done.kept, self.disturbed + done.disturbed, self.failures + done.failures)


@dataclass(frozen=True, slots=True)
class CollectResult:
    """``autosched collect``: rows in the store afterwards, and what an audit says of them.

    ``unfinished`` are models whose aims the time did not suffice for: the same command goes on with them. ``kept``, ``disturbed`` and
    ``failures`` are measurements of this run. ``not_measured`` are models that could not be captured, or whose measuring process was lost;
    ``left_out`` says why, and what else is left out.
    """

    store: str
    device: str
    models: tuple[str, ...]
    left_out: tuple[str, ...]
    unfinished: tuple[str, ...]
    solo_rows: int
    pair_rows: int
    group_rows: int
    schedule_rows: int
    usable_pairs: int
    kept: int
    disturbed: int
    failures: int
    noise_floor_pct: float | None
    findings: tuple[str, ...]
    not_measured: tuple[str, ...] = ()

    def summary(self) -> str:
        """For people."""
        noise = f"{self.noise_floor_pct:.1f} %" if self.noise_floor_pct is not None else "unknown (no repeats)"
        lines = [
            f"{self.store}: {self.solo_rows} solo, {self.pair_rows} pair ({self.usable_pairs} usable), {self.group_rows} group and "
            f"{self.schedule_rows} schedule runs on {self.device}",
            f"  noise floor of repeats: {noise}",
        ]
        if self.disturbed:
            were = "measurement was" if self.disturbed == 1 else "measurements were"
            lines.append(f"  {self.disturbed} {were} disturbed: other processes had the cores")
        if self.failures:
            lines.append(
                f"  {self.failures} measurement{'s' if self.failures != 1 else ''} failed: {self.store}/failures.jsonl has the operators "
                "and pairs among them that are not tried again, with the reasons"
            )
        if self.unfinished:
            lines.append(f"  there was no time for {', '.join(self.unfinished)}: run the command again to continue")
        return "\n".join([*lines, *(f"  {line}" for line in (*self.left_out, *self.findings))])


def collect(
    subjects: Sequence[Subject],
    folder: str | os.PathLike[str],
    *,
    device: str = "auto",
    budget_s: float = 120.0,
    aims: Aims | None = None,
    cost_model: str | os.PathLike[str] | None = None,
    keep_disturbed: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> CollectResult:
    """Measure operators alone, pairs in both orders, groups and schedules of some models; call it again to go on where it stopped.

    Args:
        budget_s: for all models together, each an equal share of what is left.
        aims: rows of each kind.
        cost_model: a folder of ``autosched train``; half of the pairs are then those it is least sure of.
        keep_disturbed: keep what was timed while others had the cores, marked as such, instead of leaving it for a later run;
            training leaves it out. For rehearsals.

    A model that cannot be captured, or that the device cannot hold, or whose measuring process is lost, is left out and named; the rest
    goes on. One whose turn comes when the time is up is not begun.

    Raises:
        UsageError: before anything is measured, if there can be no such folder.
        DeviceError: if a process was lost, and no model could be measured.
    """
    told, wanted = progress or Silent(), aims or Aims()
    model = load_model(Path(cost_model)) if cost_model is not None else None
    opened = device_named(device)
    store = _store_at(Path(folder))
    if wanted.schedules:
        begin_searches(told)
    lanes_note = ready_lanes(opened.key.kind, told)
    if wanted.schedules:
        ready_searches(told)
    left_out = [note for note in (lanes_note, other_work_note(opened, "at the beginning", COLLECT_AGAIN)) if note]
    not_measured: list[str] = []
    unfinished: list[str] = []
    lost: DeviceError | None = None
    total = Totals()
    deadline = time.monotonic() + budget_s
    for index, subject in enumerate(subjects):
        if index and time.monotonic() >= deadline:
            # Operators alone, which no share of the time ends, would teach nothing without pairs.
            unfinished.append(subject.name)
            continue
        told.stage(f"collect {subject.name}", max(deadline - time.monotonic(), 0.0))
        try:
            graph, session = _opened(subject, opened)
        except AutoschedError as error:
            left_out.append(f"{subject.name} left out: {error}")
            not_measured.append(subject.name)
            lost = error if isinstance(error, DeviceError) else lost
            continue
        try:
            with contextlib.closing(session):
                # Starts the worker, so that its start is not taken from this model's share.
                scope = scope_row(opened, session.limits)
                left_out += _on_other_lanes(subject, scope, opened)
                share_s = max(deadline - time.monotonic(), 0.0) / (len(subjects) - index)
                done = collect_graph(
                    session, graph, store, scope, name=subject.name, aims=wanted, model=model, budget_s=share_s,
                    seed=seed, progress=told, keep_disturbed=keep_disturbed,
                )  # fmt: skip
        except DeviceError as error:
            # What it measured before is in the store, and the next model has a process of its own.
            left_out.append(f"{subject.name} left out: {error}")
            not_measured.append(subject.name)
            lost = error
            continue
        total = total.with_those_of(done)
        if not done.finished:
            unfinished.append(subject.name)
    if lost is not None and len(not_measured) == len(subjects):
        raise lost
    if note := other_work_note(opened, "at the end", COLLECT_AGAIN):
        left_out.append(note)
    return _result(store, opened, subjects, left_out, not_measured, unfinished, total)


def _opened(subject: Subject, device: Device) -> tuple[OpGraph, Session]:
    """The model on the device, captured while the measuring process imports what it needs."""
    early = device if isinstance(device, StartsEarly) else None
    if early is not None:
        early.start_early(timeout_s=_TIMEOUT_S)
    try:
        captured = capture(subject.model, subject.args, subject.kwargs, target=device.key.kind)
        require_operators(len(captured.program.graph))
        return captured.program.graph, device.open(captured.program, captured.constants, timeout_s=_TIMEOUT_S)
    except BaseException:
        if early is not None:
            early.drop_early()
        raise


def _on_other_lanes(subject: Subject, scope: ScopeRow, device: Device) -> list[str]:
    if scope.software.engine is device.software.engine:
        return []
    why = f"{subject.name} has an operator that native lanes do not take, so it was measured on lanes of Python"
    return [f"{why}: training leaves its runs out beside those on native lanes"]


def _store_at(folder: Path) -> Store:
    try:
        store = Store.create(folder)
        writable = all(os.access(place, os.W_OK | os.X_OK) for place in (folder, *map(folder.joinpath, TABLES)))
        why = "" if writable else "its permissions do not allow it"
    except OSError as error:
        why = why_of(error)
    if why:
        raise UsageError(f"cannot write runs to {folder}: {why}. Name a folder that is writable, or can be made.")
    return store


def collect_graph(
    session: Session,
    graph: OpGraph,
    store: Store,
    scope: ScopeRow,
    *,
    name: str,
    aims: Aims,
    model: TrainedModel | None,
    budget_s: float,
    seed: int,
    progress: Progress,
    keep_disturbed: bool = False,
) -> Collected:
    """One model's share: first what its parts cost, then whole schedules found with those costs."""
    began = time.monotonic()
    rng = np.random.default_rng(seed)
    launches = launch_facts(session, graph)
    done = collect_model(
        graph,
        SessionMeasurer(session, repeats=_REPEATS),
        store,
        scope,
        model=name,
        widths=session.limits.widths,
        pair_widths=session.limits.pair_widths,
        max_pairs=aims.pairs,
        max_groups=aims.groups,
        budget_s=budget_s * (1.0 - _SCHEDULE_SHARE) if aims.schedules else budget_s,
        rng=rng,
        uncertainty=ModelUncertainty(model, graph, store, scope) if model is not None else None,
        probes=aims.probes,
        launches=launches,
        keep_disturbed=keep_disturbed,
        progress=lambda what, done, total: progress.update(done=done, total=total, incumbent=what),
    )
    left_s = budget_s - (time.monotonic() - began)
    alone = {(row.kernel.signature, row.kernel.width) for row in store.solo() if row.scope == scope.scope}
    if aims.schedules and all((operator.signature, 1) in alone for operator in graph.operators):
        recording = StoreRecording(store, scope.scope)
        # Operators were timed by their calls. That a store knows of their variants from tuning does not mean that they can be had here.
        problem = recording.problem(graph, model, limits=session.limits, calls_only=True)
        predictor = model.name if model is not None else "analytic"
        timed = measure_schedules(
            session,
            problem,
            store,
            scope,
            model=name,
            predictor=predictor,
            most=aims.schedules,
            budget_s=left_s,
            rng=rng,
            keep_disturbed=keep_disturbed,
        )
        finished = done.finished and timed.finished
        done = dataclasses.replace(done, schedules=timed.added, disturbed=done.disturbed + timed.disturbed, finished=finished)
    return done


def _result(
    store: Store,
    device: Device,
    subjects: Sequence[Subject],
    left_out: Sequence[str],
    not_measured: Sequence[str],
    unfinished: Sequence[str],
    total: Totals,
) -> CollectResult:
    found: Audit = audit(store)
    pairs = store.pairs()
    noise = found.noise_floor_pct
    return CollectResult(
        store=os.fspath(store.folder),
        device=device.key.name,
        models=tuple(subject.name for subject in subjects),
        left_out=tuple(left_out),
        unfinished=tuple(unfinished),
        solo_rows=len(store.solo()),
        pair_rows=len(pairs),
        group_rows=len(store.groups()),
        schedule_rows=len(store.schedules()),
        usable_pairs=len(pairs) - len(found.excluded & {row.key for row in pairs}),
        kept=total.kept,
        disturbed=total.disturbed,
        failures=total.failures,
        noise_floor_pct=noise if np.isfinite(noise) else None,
        findings=tuple(found.lines()),
        not_measured=tuple(not_measured),
    )
