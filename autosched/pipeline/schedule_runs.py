"""Schedules as rows of a data set: which to time while collecting, and how a timed one is written down."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autosched.core.graph import OpGraph
from autosched.core.records import Failure, ScheduleRecord
from autosched.core.schedule import Schedule
from autosched.datasets.facts import DISTURBED, DeviceFacts, stolen_share
from autosched.datasets.schema import GraphRow, LimitsRow, Row, ScheduleRow, ScopeRow, content_key
from autosched.datasets.splits import family_of
from autosched.datasets.store import Store
from autosched.device.base import Limits, Session
from autosched.pipeline.candidates import Candidate, by_key, propose
from autosched.search.problem import Problem
from autosched.search.strategy import SearchContext

# Two that need no model, rules, two searches whose schedules a model was optimised on, and random ones that nobody chose.
_NAMES = ("sequential", "sequential_wide", "critical_path", "list_policies", "opara", "estf", "anneal", "raf_asap", "linear_clustering")
_RANDOM = 4
_EVALUATIONS = 3000
_ROUNDS = 9
_LOT = 6
# Fewer leave nothing to choose from, so these are timed even when the time is up.
_LEAST = 3
_MIN_BLOCK_US = 3000.0


def limits_row(scope: str, model: str, graph: OpGraph, limits: Limits) -> LimitsRow:
    """What a session said of a graph, as a row."""
    return LimitsRow(
        scope, family_of(model), model, graph.hash, limits.max_lanes, limits.widths, limits.priorities, limits.lanes_matter,
        limits.launch_gap_us, limits.cross_lane_us, limits.fixed_us,
    )  # fmt: skip


def schedule_row(
    scope: str, model: str, graph: OpGraph, strategy: str, is_baseline: bool, schedule: Schedule, predicted: tuple[float, str],
    record: ScheduleRecord,
) -> ScheduleRow:  # fmt: skip
    """A timed schedule as a row; ``predicted`` is a time in microseconds and the name of the cost model that said so."""
    return ScheduleRow(scope, family_of(model), model, graph.hash, strategy, is_baseline, schedule, *predicted, record)


def is_disturbed(schedule: Schedule, record: ScheduleRecord, device: DeviceFacts) -> bool:
    """Whether other processes had cores that the schedule needed while it was timed."""
    return stolen_share(record.contamination, device, max(schedule.lanes, *schedule.width)) > DISTURBED


def schedule_candidates(problem: Problem, limits: Limits, rng: np.random.Generator) -> list[Candidate]:
    """Distinct schedules worth recording, random ones between those that somebody chose, so that a short collection has both.

    None of a width at which an operator has no time: nothing could be said of it before, and an undisturbed run may find that time yet.
    """
    names = [name for name in _NAMES if name != "sequential_wide" or len(limits.widths) > 1]
    context = SearchContext(rng, _EVALUATIONS, max_lanes=limits.max_lanes, widths=limits.widths)
    chosen, _ = propose(problem, names, context, lanes_matter=limits.lanes_matter)
    blind = SearchContext(rng, 1, max_lanes=limits.max_lanes, widths=(1,))
    random = [propose(problem, ["random"], blind, lanes_matter=limits.lanes_matter)[0] for _ in range(_RANDOM)]
    mixed: list[Candidate] = []
    for place, candidate in enumerate(chosen):
        mixed.append(candidate)
        if place % 2 and place // 2 < len(random):
            mixed += random[place // 2]
    return [group[0] for group in by_key(mixed).values() if problem.is_costed(group[0].schedule)]


@dataclass(frozen=True, slots=True)
class Timed:
    """What one collection of schedules came to: how many were new, how many others disturbed, and whether the time sufficed for all."""

    added: int
    disturbed: int
    finished: bool


def measure_schedules(
    session: Session,
    problem: Problem,
    store: Store,
    scope: ScopeRow,
    *,
    model: str,
    predictor: str,
    most: int,
    budget_s: float,
    rng: np.random.Generator,
    keep_disturbed: bool = False,
) -> Timed:
    """Time up to ``most`` schedules of a graph into ``store`` within ``budget_s`` seconds, but at least three.

    Nothing is proved here: what is recorded is how long schedules take, and none of them is kept.

    Args:
        problem: costs to search with; ``predictor`` names the cost model in them.
    """
    graph, limits = problem.graph, session.limits
    rows: list[Row] = [GraphRow(family_of(model), model, graph), limits_row(scope.scope, model, graph, limits)]
    store.append(rows)
    deadline = time.monotonic() + budget_s
    known = store.keys("schedules")
    mine = sum(row.graph == graph.hash and row.scope == scope.scope for row in store.schedules())
    wanted = [
        item
        for item in schedule_candidates(problem, limits, rng)
        if content_key("schedule", scope.scope, graph.hash, item.key) not in known
    ][: max(0, most - mine)]
    added = disturbed = asked = 0
    for begin in range(0, len(wanted), _LOT):
        lot = _that_fit(wanted[begin : begin + _LOT], deadline - time.monotonic(), least=_LEAST if begin == 0 else 0)
        if not lot:
            break
        asked += len(lot)
        timed, spoiled = _timed(session, graph, scope, lot, model, predictor, keep_disturbed)
        added, disturbed = added + store.append(timed), disturbed + spoiled
    return Timed(added, disturbed, finished=asked == len(wanted))


def _that_fit(lot: Sequence[Candidate], left_s: float, *, least: int) -> list[Candidate]:
    """As many from the front as their predicted times let hope for: each round times a schedule twice, at least for a block."""
    found: list[Candidate] = []
    for candidate in lot:
        left_s -= (_ROUNDS + 3) * 2 * max(candidate.predicted_us, _MIN_BLOCK_US) * 1e-6
        if left_s < 0 and len(found) >= least:
            break
        found.append(candidate)
    return found


def _timed(
    session: Session, graph: OpGraph, scope: ScopeRow, lot: Sequence[Candidate], model: str, predictor: str, keep: bool
) -> tuple[list[Row], int]:
    """Rows, and how many schedules were disturbed."""
    rows: list[Row] = []
    disturbed = 0
    answers = session.schedules([item.schedule for item in lot], rounds=_ROUNDS, min_block_us=_MIN_BLOCK_US)
    for item, answer in zip(lot, answers, strict=True):
        if isinstance(answer, Failure):
            continue
        spoiled = is_disturbed(item.schedule, answer, scope.facts)
        disturbed += spoiled
        if spoiled and not keep:
            continue
        predicted = (item.predicted_us, predictor)
        rows.append(schedule_row(scope.scope, model, graph, item.name, item.is_baseline, item.schedule, predicted, answer))
    return rows, disturbed
